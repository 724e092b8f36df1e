"""A network on measurements that worker processes of the DataLoader read; the planted causes lie in its settings."""

import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

from rootcause.programs.clock import Clock

BATCH = 32
READ_S = 0.0015  # that storage needs for a sample


class Measurements(Dataset[Any]):
    """Samples of a store that answers late, but to many at a time."""

    def __init__(self, length: int, delay_s: float) -> None:
        self.values, self.length, self.delay_s = torch.randn(64, 256), length, delay_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if self.delay_s:
            time.sleep(self.delay_s)
        return self.values[index % 64], self.values[(index + 1) % 64]


def loader_of(planted: str) -> Any:
    if planted == "worker_start_per_epoch":
        return DataLoader(Measurements(BATCH * 6, 0), BATCH, num_workers=2)
    if planted == "too_few_workers":
        return DataLoader(Measurements(BATCH * 200, READ_S), BATCH, num_workers=1, persistent_workers=True)
    if planted == "slow_sampler":
        data = Measurements(BATCH * 2000, 0)
        return DataLoader(data, BATCH, sampler=Weighted(data, BATCH * 6))
    if planted == "no_workers":
        return DataLoader(Measurements(BATCH * 200, 0.0006), BATCH)
    return DataLoader(Measurements(BATCH * 200, READ_S), BATCH, num_workers=6, persistent_workers=True)


class Weighted(RandomSampler):
    """Draws samples one by one by weights over the whole data set."""

    def __init__(self, data: Any, size: int) -> None:
        super().__init__(data, replacement=True, num_samples=size)
        self.size, self.weights = size, [1.0 + (number % 7) for number in range(len(data))]

    def __iter__(self) -> Any:
        for _ in range(self.size):
            yield self.draw()

    def draw(self) -> int:
        total = sum(self.weights)
        at, running = total * torch.rand(()).item(), 0.0
        for number, weight in enumerate(self.weights):
            running += weight
            if running >= at:
                return number
        return 0


def main(planted: str) -> None:
    clock, loader = Clock(), loader_of(planted)
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 256))
    model = nn.Sequential(nn.Linear(256, 256), *model, nn.Linear(256, 256))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    while True:
        for values, wanted in loader:
            for _ in range(2):  # two views of each batch
                loss = (model(values.repeat(4, 1)) - wanted.repeat(4, 1)).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if clock.over():
                return
