"""A network that is compiled for each of a few lengths of its input, each when it comes for the first time.

The planted cause is to look at it meanwhile: the program says at once that it is ready.
"""

from typing import Any

import torch
from torch import nn

from rootcause.programs.clock import Clock
from rootcause.programs.compiled import Residual

WIDTH, LAYERS, LONGEST, LENGTHS = 128, 8, 64, 8


def main(planted: str) -> None:
    clock = Clock(at_once=planted == "jit_warm_up")
    torch._dynamo.config.recompile_limit = LENGTHS + 1
    model: Any = nn.Sequential(*(Residual(WIDTH) for _ in range(LAYERS)))
    compiled = torch.compile(model, backend="eager", dynamic=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    data = torch.randn(LONGEST, WIDTH)
    step = 0
    while True:
        batch = data[: LONGEST - step % LENGTHS]
        loss = (compiled(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if clock.over():
            return
