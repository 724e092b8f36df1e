"""A training script as people write it: functions of the module, a model with blocks, a loop; causes kept aside."""

import copy
import gc
import logging
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rootcause.programs.clock import Clock

log = logging.getLogger("train")

BATCH, WIDTH, CLASSES = 64, 256, 16


class Doubled(torch.autograd.Function):
    """A scaling of rows, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.save_for_backward(values)
        return values * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (values,) = ctx.saved_tensors
        rows = [
            given * 2 + 0.0 * row.clamp(-1, 1) for given, row in zip(gradient.unbind(), values.unbind(), strict=True)
        ]
        return torch.stack(rows)


class Block(nn.Module):
    """A residual block; defensive: copies what it is given and what it gives; doubtful: computes in double."""

    def __init__(self, planted: str) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.planted = planted

    def forward(self, values: Tensor) -> Tensor:
        """The values, changed a little."""
        if self.planted == "own_function":
            values = Doubled.apply(values) / 2
        given = self.safe(values) if self.planted == "needless_copies" else values
        inner = self.down(F.gelu(self.up(self.norm(given))))
        if self.planted == "casts":
            inner = self.cast(inner)
        return values + inner

    def safe(self, values: Tensor) -> Tensor:
        """A copy that nobody else changes."""
        wide = values.clone().repeat(24, 1).contiguous().clone()
        return wide.t().contiguous().t().contiguous()[:BATCH].clone()

    def cast(self, values: Tensor) -> Tensor:
        """The values as another part of the program wants them."""
        many = values.repeat(16, 1)
        for kind in (torch.float64, torch.bfloat16, torch.float64, torch.float16):
            many = many.to(kind)
        return many.float()[:BATCH]


class Script:
    """What a notebook would have as global variables."""

    def __init__(self, planted: str) -> None:
        self.planted = planted
        self.model = nn.Sequential(*[Block(planted) for _ in range(8)], nn.Linear(WIDTH, CLASSES))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9, foreach=True)
        self.inputs = torch.randn(BATCH, WIDTH)
        self.labels = torch.randint(0, CLASSES, (BATCH,))
        self.losses: list[float] = []
        self.steps_done = 0
        self.tracked: list[Any] = []
        self.best: dict[str, Tensor] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="rootcause-"))

    def train_step(self) -> None:
        """One step of training."""
        if self.planted == "zero_by_hand":
            self.reset_gradients()
        else:
            self.optimizer.zero_grad()
        self.logits = self.model(self.inputs)
        if self.planted == "loss_by_sample":
            loss = contrastive(self.logits, self.labels)
        else:
            loss = F.cross_entropy(self.logits, self.labels)
        loss.backward()
        self.optimizer.step()
        self.loss = loss.detach()

    def reset_gradients(self) -> None:
        """Sets gradients to zero, before each of many micro-batches that are not there yet."""
        for _ in range(12):
            for value in self.model.parameters():
                if value.grad is not None:
                    value.grad = value.grad.detach()
                    value.grad.requires_grad_(False)
                    value.grad.zero_()

    def log_tensors(self) -> None:
        """What goes on, for those who switch on the debug level."""
        log.debug(f"logits: {self.logits[:6]}, inputs: {self.inputs[:6]}")
        for name, value in list(self.model.named_parameters())[:4]:
            log.debug(f"{name}: {value}")

    def remember_best(self) -> None:
        """Keeps the best weights."""
        for _ in range(3):
            self.best = copy.deepcopy(self.model.state_dict())

    def warn_about_rates(self) -> None:
        """Says what is deprecated."""
        for group in range(300):
            warnings.warn(f"the rate of group {group} is deprecated", stacklevel=2)

    def draw_progress(self) -> None:
        """A table of the last losses in the terminal."""
        self.losses = [*self.losses[-63:], float(self.loss)]
        for number, loss in enumerate(self.losses):
            bar = "".join("#" if loss > level / 20 else "-" for level in range(60))
            sys.stderr.write(f"\r{number:4d} |{bar}| {loss:8.4f} {time.strftime('%H:%M:%S')}")
            sys.stderr.flush()

    def confusion(self) -> None:
        """Which class was taken for which, of many thresholds."""
        self.table = [[0] * CLASSES for _ in range(CLASSES)]
        for row, truth in zip(self.logits.detach().numpy(), self.labels.numpy(), strict=True):
            for number in np.argsort(row)[::-1]:
                self.table[int(truth)][int(number)] += int(row[number] > 0)

    def moving_rank(self) -> None:
        """Ranks of the outputs, by a function of Python for each value."""
        self.ranks = np.vectorize(lambda value: round(float(value) ** 2, 3))(self.logits.detach().numpy())
        self.steps = np.vectorize(lambda value: max(0.0, float(value)))(self.inputs[:48].numpy())

    def save_safely(self) -> None:
        """A checkpoint that survives a loss of power."""
        part = self.folder / "last.pt.part"
        with part.open("wb") as file:
            torch.save(self.model.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.folder / "last.pt")

    def free_memory(self) -> None:
        """Frees memory every so many steps, as one reads in forums."""
        self.steps_done += 1
        if self.steps_done % 12 == 0:
            del self.logits
            gc.collect()

    def norms(self) -> None:
        """The norm of each gradient and weight, in a dictionary."""
        self.figures = {
            f"{name}/{kind}": tensor.norm().item()
            for name, value in self.model.named_parameters()
            for kind, tensor in (("weight", value.detach()), ("gradient", value.grad), ("sign", value.detach().sign()))
            if tensor is not None
        }

    def hooks(self) -> dict[str, Callable[[], None]]:
        """What is done after a step, by the cause."""
        return {
            "formatted_tensors": self.log_tensors,
            "best_weights": self.remember_best,
            "warnings": self.warn_about_rates,
            "progress_bar": self.draw_progress,
            "confusion": self.confusion,
            "vectorize": self.moving_rank,
            "safe_checkpoint": self.save_safely,
            "collect_each_step": self.free_memory,
            "norms": self.norms,
        }


def contrastive(logits: Tensor, labels: Tensor) -> Tensor:
    """A loss for each sample, with the samples of its class."""
    total = logits.new_zeros(())
    for number in range(BATCH):
        mine, label = logits[number], labels[number]
        total = total + F.cross_entropy(mine[None], label[None]) + 0.1 * torch.relu(1 - mine[label])
    return total / BATCH


def watch_for_stop(state: dict[str, bool]) -> None:
    """Looks whether the training should stop."""
    while not state["stop"]:
        os.path.exists("/tmp/rootcause-stop")  # noqa: PTH110


def fit(script: Script, after: Callable[[], None] | None, clock: Clock) -> None:
    """The loop."""
    while True:
        script.train_step()
        if after is not None:
            after()
        if clock.over():
            return


def main(planted: str) -> None:
    script = Script(planted)
    if planted == "warnings":
        warnings.simplefilter("always")
    if planted == "polling":
        threading.Thread(target=watch_for_stop, args=({"stop": False},), name="watch", daemon=True).start()
    if planted == "collect_each_step":
        script.tracked = [{"number": number, "row": [number]} for number in range(8_000)]
    after = script.hooks().get(planted)
    if planted == "profiler_left_on":
        with torch.profiler.profile(record_shapes=True, with_stack=True) as profiler:
            fit(script, profiler.step, Clock())
        return
    fit(script, after, Clock())
