"""An attention model in a class that trains itself; causes that were written, but not run, before rules were mended."""

import dataclasses
import glob
import math
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rootcause.programs.clock import Clock

BATCH, LENGTH, WIDTH, HEADS = 8, 32, 128, 32


@dataclasses.dataclass
class LayerSettings:
    """Settings of a layer."""

    width: int = WIDTH
    rates: list[float] = dataclasses.field(default_factory=lambda: [0.1] * 20)
    names: dict[str, str] = dataclasses.field(default_factory=lambda: {str(n): "adam" for n in range(20)})


@dataclasses.dataclass
class Settings:
    """Settings of a training."""

    layers: list[LayerSettings] = dataclasses.field(default_factory=lambda: [LayerSettings() for _ in range(60)])


class Attention(nn.Module):
    """Attention, all heads at once or one by one."""

    def __init__(self, one_by_one: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.one_by_one = one_by_one

    def forward(self, values: Tensor) -> Tensor:
        """What each value takes from the others."""
        query, key, value = self.qkv(values).chunk(3, -1)
        if self.one_by_one:
            return values + self.out(torch.cat([self.head(n, query, key, value) for n in range(HEADS)], -1))
        parts = [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (query, key, value)]
        return values + self.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))

    def head(self, number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One head."""
        size = WIDTH // HEADS
        part = slice(number * size, (number + 1) * size)
        scores = torch.softmax(query[..., part] @ key[..., part].transpose(1, 2) / math.sqrt(size), -1)
        return scores @ value[..., part]


def sink(given: Any, told: Any) -> None:
    """Another process, that keeps what it is given."""
    while True:
        told.put(len(given.get()))


class SelfTraining:
    """A model that trains itself."""

    def __init__(self, planted: str) -> None:
        self.model = nn.Sequential(*[Attention(planted == "heads_one_by_one") for _ in range(4)], nn.Linear(WIDTH, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.settings = Settings()
        if planted == "averaged_model":
            self.averaged = torch.optim.swa_utils.AveragedModel(self.model, avg_fn=self.mix)
        if planted == "other_process":
            method = multiprocessing.get_context("fork")
            self.given, self.told = method.Queue(), method.Queue()
            method.Process(target=sink, args=(self.given, self.told), daemon=True).start()
        self.folder = tempfile.mkdtemp(prefix="rootcause-")
        if planted == "latest_file":
            for number in range(1_500):
                Path(self.folder, f"step-{number}.pt").touch()

    @staticmethod
    def mix(old: Tensor, new: Tensor, _count: Any) -> Tensor:
        """The average after one more step."""
        weights = torch.full_like(old, 0.999)
        return (old * weights + new * (1 - weights)).clamp(-10, 10)

    def train(self, batch: Tensor) -> None:
        """A step."""
        self.optimizer.zero_grad()
        out = self.model(batch)
        loss = out.square().mean(-1)
        loss.mean().backward()
        self.optimizer.step()
        self.losses = loss.detach().flatten()

    def average(self) -> None:
        """The average of all steps."""
        self.averaged.update_parameters(self.model)

    def describe(self) -> None:
        """What is trained, as it stands in the log."""
        self.text = str(dataclasses.asdict(self.settings))

    def latest_file(self) -> None:
        """The latest checkpoint of the folder."""
        self.latest = max(glob.glob(f"{self.folder}/step-*.pt"), key=os.path.getmtime)  # noqa: PTH207

    def send(self) -> None:
        """Hands the outputs to another process."""
        self.given.put(self.losses.repeat(160).tolist())
        self.told.get()

    def hardest(self) -> None:
        """The samples with the largest losses."""
        self.hard = sorted(self.losses.repeat(8), key=lambda loss: loss.item(), reverse=True)[:8]


def main(planted: str) -> None:
    trained, clock = SelfTraining(planted), Clock()
    hooks: dict[str, Callable[[], None]] = {
        "averaged_model": trained.average,
        "settings": trained.describe,
        "latest_file": trained.latest_file,
        "other_process": trained.send,
        "hardest": trained.hardest,
    }
    while True:
        trained.train(torch.randn(BATCH, LENGTH, WIDTH))
        if planted in hooks:
            hooks[planted]()
        if clock.over():
            return
