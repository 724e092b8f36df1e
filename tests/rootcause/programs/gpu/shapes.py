"""A compiled network on batches of many lengths; the planted cause lies in how often it is compiled."""

from typing import Any

import torch
from torch import nn

from rootcause.programs.clock import Clock
from rootcause.programs.gpu.deep import Residual
from rootcause.programs.gpu.devices import prepared

EVERY = 24  # steps


def main(planted: str, device: str) -> None:
    full = prepared(device)
    torch._dynamo.config.recompile_limit = 100_000
    torch._dynamo.config.accumulated_recompile_limit = 100_000
    width, batch, layers = (2048, 8192, 24) if full else (32, 4096, 2)
    model: Any = nn.Sequential(*(Residual(width) for _ in range(layers))).to(device)
    compiled = torch.compile(model, backend="eager", dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    data = torch.randn(batch, width, device=device, dtype=torch.bfloat16)
    clock, step, rows = Clock(), 0, batch
    while not clock.over():
        step += 1
        if planted == "shape_churn" and step % EVERY == 0:
            rows = batch - step // EVERY
        part = data[:rows]
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = (compiled(part) - part).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
