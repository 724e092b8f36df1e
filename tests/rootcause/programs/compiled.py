"""A network that is compiled with torch.compile (without a C compiler); the planted causes lie in how it is used."""

from typing import Any

import torch
from torch import Tensor, nn

from rootcause.programs.clock import Clock

WIDTH = 256


class Residual(nn.Module):
    """Two layers around which the input goes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, values: Tensor) -> Tensor:
        """The input and what the layers add."""
        out: Tensor = values + self.down(nn.functional.gelu(self.up(values)))
        return out


def main(planted: str) -> None:
    clock = Clock()
    if planted == "recompiles":
        torch._dynamo.config.recompile_limit = 100_000
        torch._dynamo.config.accumulated_recompile_limit = 100_000
    model: Any = nn.Sequential(*(Residual(WIDTH) for _ in range(3)))
    compiled = torch.compile(model, backend="eager", dynamic=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    data = torch.randn(4096, WIDTH)
    step = 0
    while True:
        step += 1
        rows = 256 + step if planted == "recompiles" else 256
        if planted == "compile_in_the_loop":
            torch._dynamo.reset()
            compiled = torch.compile(model, backend="eager", dynamic=False)
        batch = data[:rows]
        loss = (compiled(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if clock.over():
            return
