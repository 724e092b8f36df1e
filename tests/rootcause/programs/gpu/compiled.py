"""A network that is compiled with torch.compile's own compiler; the planted cause lies in what its layers do."""

import logging
from typing import Any

import torch
from torch import Tensor, nn

from rootcause.programs.clock import Clock
from rootcause.programs.gpu.devices import prepared

log = logging.getLogger("layers")


class Mixer(nn.Module):
    """A layer with many elementwise operations around it. chatty: it says what it does."""

    def __init__(self, width: int, chatty: bool) -> None:
        super().__init__()
        self.linear, self.scale, self.chatty = nn.Linear(width, width), nn.Parameter(torch.ones(width)), chatty

    def forward(self, values: Tensor) -> Tensor:
        """The values and what the layer adds."""
        gate = torch.sigmoid(values * self.scale)
        inner = self.linear(values * gate)
        if self.chatty:
            log.debug("inner %s", inner.shape)
        out: Tensor = values + nn.functional.gelu(inner) * (1 - gate)
        return out


def main(planted: str, device: str) -> None:
    full = prepared(device)
    width, batch, layers = (1024, 12288, 16) if full else (32, 64, 4)
    model: Any = nn.Sequential(*(Mixer(width, planted == "graph_breaks") for _ in range(layers))).to(device)
    compiled = torch.compile(model, backend="inductor" if full else "eager")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    data = torch.randn(batch, width, device=device)
    clock = Clock()
    while not clock.over():
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = (compiled(data) - data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
