"""A module of Lightning with callbacks and a logger. Needs packages that the project does not depend on."""

import copy
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import PIL.Image
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from rootcause.programs.clock import Clock

try:
    import lightning.pytorch as pl
    from lightning.pytorch.loggers.logger import Logger
except ImportError:
    import pytorch_lightning as pl
    from pytorch_lightning.loggers.logger import Logger

SIDE, BATCH, ROWS = 24, 32, 2_048


class Pictures(Dataset[tuple[Tensor, Tensor]]):
    """Pictures of a table: in memory, as files of JPEG, or by rows of a table of pandas."""

    def __init__(self, planted: str) -> None:
        self.planted = planted
        self.pictures = torch.rand(64, 3, SIDE, SIDE)
        self.frame = pandas.DataFrame(
            {"picture": np.arange(ROWS) % 64, "label": np.arange(ROWS) % 10, "split": "train"}
        )
        picture = PIL.Image.fromarray(np.random.default_rng(0).integers(0, 255, (120, 160, 3), dtype=np.uint8))
        kept = io.BytesIO()
        picture.save(kept, "JPEG")
        self.jpeg = kept.getvalue()

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        if self.planted == "pandas_rows":
            row = self.frame[self.frame["split"] == "train"].iloc[number]
            return self.pictures[int(row["picture"])], torch.tensor(int(row["label"]))
        if self.planted == "pil":
            return self.decode(), torch.tensor(number % 10)
        return self.pictures[number % 64], torch.tensor(number % 10)

    def decode(self) -> Tensor:
        """A picture out of its file, turned and made smaller."""
        picture = PIL.Image.open(io.BytesIO(self.jpeg)).convert("RGB").rotate(7).resize((SIDE, SIDE))
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255


class Classifier(pl.LightningModule):
    """A small convolutional network."""

    def __init__(self, planted: str) -> None:
        super().__init__()
        self.planted = planted
        self.net = nn.Sequential(
            nn.Conv2d(3, 24, 3), nn.ReLU(), nn.Conv2d(24, 24, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)
        )
        self.net(torch.zeros(1, 3, SIDE, SIDE))

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        """The loss of a batch."""
        pictures, labels = batch
        out = self.net(pictures)
        loss = nn.functional.cross_entropy(out, labels)
        if self.planted == "pl_logs":
            for name, value in self.net.named_parameters():
                for kind in ("mean", "std", "max", "min", "norm"):
                    self.log(f"{name}/{kind}", getattr(value.detach(), kind)(), on_step=True, on_epoch=True)
        if self.planted == "pl_metric":
            self.log("accuracy", self.accuracy(out, labels))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        """The loss of a batch that is held back."""
        pictures, labels = batch
        self.log("held_back", nn.functional.cross_entropy(self.net(pictures), labels))

    def accuracy(self, out: Tensor, labels: Tensor) -> float:
        """The share of right labels among the first three."""
        right = 0
        for row, label in zip(out.detach(), labels, strict=True):
            for guess in row.topk(3).indices:
                if guess.item() == label.item():
                    right += 1
        return right / len(labels)

    def configure_optimizers(self) -> Any:
        """The optimizer."""
        return torch.optim.SGD(self.parameters(), lr=1e-4, foreach=True)


class Steps(pl.Callback):
    """Ends the training when the clock says so."""

    def __init__(self) -> None:
        self.clock = Clock()

    def on_train_batch_end(self, trainer: Any, module: Any, *given: Any) -> None:
        trainer.should_stop = self.clock.over()


class Average(pl.Callback):
    """A copy of the weights of each step, for an average."""

    def on_train_batch_end(self, trainer: Any, module: Any, *given: Any) -> None:
        self.kept = [copy.deepcopy(module.net) for _ in range(4)]


class Gradients(pl.Callback):
    """Gradients of each layer, as figures."""

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self.figures: dict[str, float] = {}
        for name, value in module.named_parameters():
            for row in value.grad.flatten(1)[:24] if value.dim() > 1 else value.grad[None]:
                self.figures[name] = max(row.abs().max().item(), self.figures.get(name, 0.0))


class Lines(Logger):
    """A logger that writes each figure to a file."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="rootcause-"), "log.jsonl")

    @property
    def name(self) -> str:
        return "lines"

    @property
    def version(self) -> str:
        return "1"

    def log_hyperparams(self, *given: Any, **named: Any) -> None:
        """Nothing."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        for name, value in metrics.items():
            with self.path.open("a") as file:
                file.write(json.dumps({"step": step, name: value}) + "\n")


def main(planted: str) -> None:
    callbacks: list[Any] = [Steps()]
    sys.stdout = sys.stderr  # what the library prints is not for those who count steps
    if planted == "pl_copies":
        callbacks.append(Average())
    if planted == "pl_gradients":
        callbacks.append(Gradients())
    if planted == "pl_saves":
        callbacks.append(pl.callbacks.ModelCheckpoint(tempfile.mkdtemp(prefix="rootcause-"), every_n_train_steps=1))
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1_000,
        callbacks=callbacks,
        logger=Lines() if planted == "pl_logs" else False,
        enable_checkpointing=planted == "pl_saves",
        val_check_interval=4 if planted == "pl_validates" else None,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        default_root_dir=tempfile.mkdtemp(prefix="rootcause-"),
    )
    held_back = torch.utils.data.Subset(Pictures(planted), range(4 * BATCH))
    trainer.fit(
        Classifier(planted),
        DataLoader(Pictures(planted), BATCH, shuffle=True),
        DataLoader(held_back, BATCH) if planted == "pl_validates" else None,
    )
