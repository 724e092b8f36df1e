"""What the programs train, and what they do beside it in a function of their own."""

import torch
from torch import Tensor, nn

SIDE, BATCH, ROWS, CLASSES = 16, 32, 2_048, 10


def network() -> nn.Sequential:
    """A small convolutional network with a wide end: its checkpoint is 5 MB."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 144, 512),
        nn.ReLU(), nn.Linear(512, CLASSES),
    )  # fmt: skip


def pictures(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Pictures and their labels."""
    return torch.rand(rows, 3, SIDE, SIDE), torch.arange(rows) % CLASSES


def histogram(weights: list[Tensor]) -> dict[float, int]:
    """How often numbers are in the weights, number by number."""
    counts: dict[float, int] = {}
    for weight in weights:
        for number in weight.detach().flatten()[:6_000].tolist():
            counts[round(number, 2)] = counts.get(round(number, 2), 0) + 1
    return counts
