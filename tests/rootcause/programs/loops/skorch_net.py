"""A net of skorch with callbacks. Needs packages that the project does not depend on."""

import tempfile
from typing import Any

import numpy as np
import torch
from skorch import NeuralNetClassifier
from skorch.callbacks import Callback, Checkpoint
from skorch.dataset import ValidSplit

from rootcause.programs.clock import Clock
from rootcause.programs.loops.parts import BATCH, histogram, network, pictures


class Steps(Callback):
    """Ends the training when the clock says so."""

    def __init__(self) -> None:
        self.clock = Clock()

    def on_batch_end(self, net: Any, batch: Any = None, training: bool = False, **given: Any) -> None:
        if training and self.clock.over():
            raise KeyboardInterrupt


class Weights(Callback):
    """Histograms of the weights for a board."""

    def on_batch_end(self, net: Any, batch: Any = None, training: bool = False, **given: Any) -> None:
        histogram([value for value in net.module_.parameters() if value.numel() > 100])


def main(planted: str) -> None:
    rows = 5 if planted == "skorch_evaluates" else 4  # batches of an epoch: one of five is held back
    given, labels = pictures(rows * BATCH)
    callbacks: list[Callback] = [Steps()]
    if planted == "skorch_saves":
        callbacks.append(Checkpoint(monitor=None, dirname=tempfile.mkdtemp(prefix="rootcause-")))
    if planted == "skorch_callback":
        callbacks.append(Weights())
    net = NeuralNetClassifier(
        network(),
        criterion=torch.nn.CrossEntropyLoss,
        optimizer=torch.optim.SGD,
        optimizer__foreach=True,
        lr=1e-4,
        batch_size=BATCH,
        max_epochs=100_000,
        train_split=ValidSplit(rows) if planted == "skorch_evaluates" else None,
        callbacks=callbacks,
        verbose=0,
    )
    net.fit(given.numpy(), labels.numpy().astype(np.int64))
