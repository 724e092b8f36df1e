"""A wide classifier of embeddings in bfloat16, bound by its matrix products; the planted causes were written after the
rules, by somebody who had not read them.

A step with nothing planted leaves the host idle: it is several steps ahead of the device. So each cause either makes
the host wait for the device and work while the device has nothing to do, or gives the device more to do.
"""

import copy
import json
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rootcause.programs.clock import Clock
from rootcause.programs.gpu.devices import Prefetched, prepared

CLASSES = 64
SAVE_EVERY = 3  # steps
LOGGED_ROWS = 384
BALANCING_ROUNDS, TOLERANCE = 100, 1e-12  # float32 does not get so close: all rounds are run


class Pair(nn.Module):
    """Two layers around which the values go."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        """The values and what the layers add."""
        out: Tensor = values + self.outer(functional.relu(self.inner(values), inplace=True))
        return out


class Classifier(nn.Module):
    """Scores of the classes for embeddings."""

    def __init__(self, given: int, width: int, pairs: int) -> None:
        super().__init__()
        self.entry = nn.Linear(given, width, bias=False)
        self.trunk = nn.Sequential(*(Pair(width) for _ in range(pairs)))
        self.readout = nn.Linear(width, CLASSES, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """One row for each input."""
        scores: Tensor = self.readout(self.trunk(self.entry(inputs)))
        return scores


class Confusion:
    """Which class was taken for which, and how often a guess of each sureness is right."""

    def __init__(self) -> None:
        self.table = np.zeros((CLASSES, CLASSES), dtype=np.int64)
        self.right, self.all = [0] * 10, [0] * 10

    def update(self, scores: Tensor, labels: Tensor) -> float:
        """Counts a batch. Returns the mean F1 of the classes until now."""
        sureness, guesses = (part.cpu().numpy() for part in scores.float().softmax(1).max(1))
        for truth, guess, sure in zip(labels.cpu().numpy(), guesses, sureness, strict=True):
            self.table[truth, guess] += 1
            self.all[min(int(10 * sure), 9)] += 1
            self.right[min(int(10 * sure), 9)] += int(truth == guess)
        shares = [
            2 * self.table[label, label] / max(self.table[label].sum() + self.table[:, label].sum(), 1)
            for label in range(CLASSES)
        ]
        return float(np.mean(shares))


class GradientLogger:
    """Histograms of gradients for a dashboard."""

    def __init__(self) -> None:
        self.records: dict[str, list[float]] = {}

    def log_gradients(self, model: nn.Module) -> None:
        """One histogram for each parameter."""
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                self.records[f"gradients/{name}"] = torch.histc(parameter.grad, bins=64).tolist()


class PredictionLog:
    """Predictions of each step, for a page that shows what the model confuses."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("w")

    def append(self, step: int, scores: Tensor, labels: Tensor) -> None:
        """Writes the probabilities of some samples."""
        rows = scores[:LOGGED_ROWS].float().softmax(1).tolist()
        record = {"step": step, "probabilities": rows, "labels": labels[:LOGGED_ROWS].tolist()}
        self.file.seek(0)
        self.file.write(json.dumps(record) + "\n")


def class_balanced(scores: Tensor, labels: Tensor) -> Tensor:
    """The mean over classes of their mean losses: rare classes count as much as common ones."""
    losses = functional.cross_entropy(scores, labels, reduction="none")
    means = []
    for label in range(CLASSES):
        of_class = losses[labels == label]
        if len(of_class):
            means.append(of_class.mean())
    return torch.stack(means).mean()


def balanced_targets(scores: Tensor) -> Tensor:
    """Soft targets in which every class has the same share (Sinkhorn's iteration), until they hardly change."""
    shares = scores.detach().float().softmax(1)
    for _ in range(BALANCING_ROUNDS):
        before = shares
        shares = shares / shares.sum(0, keepdim=True) * (len(shares) / CLASSES)
        shares = shares / shares.sum(1, keepdim=True)
        if (shares - before).abs().max() < TOLERANCE:
            break
    return shares


def distillation_weight(step: int) -> float:
    """How much the teacher counts: less and less in the first steps, and then nothing."""
    return max(0.0, 1.0 - step / 4)


def save_ends(model: Classifier, folder: Path) -> None:
    """The first and the last layer, for a service that fetches them; they survive a loss of power."""
    part = folder / "ends.pt.part"
    with part.open("wb") as file:
        torch.save({"entry": model.entry.state_dict(), "readout": model.readout.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(folder / "ends.pt")


class Trainer:
    """The model, its optimizer and its data."""

    def __init__(self, planted: str, device: str, folder: Path) -> None:
        full = prepared(device)
        self.planted, self.device, self.folder = planted, device, folder
        given, width, pairs, batch = (1024, 4096, 7, 16384) if full else (16, 32, 2, 256)
        self.model = Classifier(given, width, pairs).to(device)
        self.teacher = copy.deepcopy(self.model).requires_grad_(False) if planted == "idle_teacher" else None
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.batches = Prefetched(
            [(torch.randn(batch, given, dtype=torch.bfloat16), torch.randint(0, CLASSES, (batch,))) for _ in range(4)],
            device,
        )
        self.confusion, self.gradients = Confusion(), GradientLogger()
        self.predictions = PredictionLog(folder / "predictions.jsonl")

    def loss(self, inputs: Tensor, scores: Tensor, labels: Tensor, step: int) -> Tensor:
        """What is made small."""
        if self.planted == "class_balanced_loss":
            return class_balanced(scores, labels)
        loss = functional.cross_entropy(scores, labels)
        if self.planted == "balanced_until_converged":
            loss = loss + 0.1 * functional.cross_entropy(scores, balanced_targets(scores))
        if self.teacher is not None:
            with torch.no_grad():
                wanted = self.teacher(inputs).softmax(1)
            loss = loss + distillation_weight(step) * functional.cross_entropy(scores, wanted)
        return loss

    def step(self, step: int) -> None:
        """One step of training."""
        inputs, labels = self.batches.take()
        with torch.autocast(self.device, dtype=torch.bfloat16):
            scores = self.model(inputs)
            loss = self.loss(inputs, scores, labels, step)
        loss.backward()
        if self.planted == "gradient_histograms":
            self.gradients.log_gradients(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.planted == "confusion_in_numpy":
            self.confusion.update(scores.detach(), labels)
        elif self.planted == "predictions_as_json":
            self.predictions.append(step, scores.detach(), labels)
        elif self.planted == "ends_saved" and step % SAVE_EVERY == 0:
            save_ends(self.model, self.folder)


def main(planted: str, device: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer, clock, step = Trainer(planted, device, Path(folder)), Clock(), 0
        while not clock.over():
            step += 1
            trainer.step(step)
