"""A deep network of small layers that is compiled as a whole, with a C compiler; the planted cause splits it."""

from typing import Any

import torch
from torch import Tensor, nn

from rootcause.programs.clock import Clock

WIDTH, LAYERS, ROWS = 32, 24, 32


class Gate(nn.Module):
    """Lets a part of its values through."""

    def __init__(self, checked: bool) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.checked = checked

    def forward(self, values: Tensor) -> Tensor:
        """The next values. Raises ValueError if they overflow."""
        found = values * torch.sigmoid(self.gate(values)) + self.out(values)
        if self.checked and not torch.isfinite(found).all():
            raise ValueError("the values of a layer are not finite")
        return found


def main(planted: str) -> None:
    clock = Clock()
    model: Any = nn.Sequential(*(Gate(planted == "graph_breaks") for _ in range(LAYERS)))
    compiled = torch.compile(model, dynamic=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    data = torch.randn(ROWS, WIDTH)
    while True:
        loss = compiled(data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if clock.over():
            return
