"""An engine of Ignite with handlers. Needs packages that the project does not depend on."""

import tempfile
from typing import Any

import torch
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver
from ignite.metrics import Accuracy, Loss
from torch.utils.data import DataLoader, TensorDataset

from rootcause.programs.clock import Clock
from rootcause.programs.loops.parts import BATCH, histogram, network, pictures


def main(planted: str) -> None:
    clock, net, loss = Clock(), network(), torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9, foreach=True)
    trainer = create_supervised_trainer(net, optimizer, loss)

    def often(every: int, handler: Any, *given: Any) -> None:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=every), handler, *given)

    if planted == "ignite_saves":
        saver = DiskSaver(tempfile.mkdtemp(prefix="rootcause-"), create_dir=False)
        often(2, Checkpoint({"net": net, "optimizer": optimizer}, saver, n_saved=2))
    if planted == "ignite_evaluates":
        evaluator = create_supervised_evaluator(net, metrics={"accuracy": Accuracy(), "loss": Loss(loss)})
        held_back = DataLoader(TensorDataset(*pictures(4 * BATCH)), BATCH)
        often(4, lambda engine: evaluator.run(held_back))
    if planted == "ignite_handler":
        often(1, note_weights, net)
    often(1, lambda engine: engine.terminate() if clock.over() else None)
    trainer.run(DataLoader(TensorDataset(*pictures()), BATCH, shuffle=True), max_epochs=1_000)


def note_weights(engine: Engine, net: torch.nn.Module) -> None:
    """Histograms of the weights for a board."""
    histogram([value for value in net.parameters() if value.numel() > 100])
