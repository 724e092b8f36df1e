"""A deep residual network on measurements in bfloat16; the planted causes lie in what surrounds its layers."""

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rootcause.programs.clock import Clock
from rootcause.programs.gpu.devices import prepared, synchronize

SAVE_EVERY = 4  # steps
SAVED = 6  # layers
_NEIGHBOUR = """
import ctypes, signal, sys, torch
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the program
left = torch.randn(int(sys.argv[2]), int(sys.argv[2]), device=sys.argv[1], dtype=torch.bfloat16)
print("up", flush=True)
while True:
    for _ in range(16):
        left @ left
    if left.is_cuda:
        torch.cuda.synchronize()
"""


class Residual(nn.Module):
    """A layer around which the values go."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(width, width), nn.ReLU()
        nn.init.normal_(self.linear.weight, std=0.1 / width**0.5)

    def forward(self, values: Tensor) -> Tensor:
        """The values and what the layer adds."""
        out: Tensor = values + self.activation(self.linear(values))
        return out


class Metrics:
    """A thread that computes something in Python most of the time."""

    def __init__(self) -> None:
        threading.Thread(target=self.crunch, name="metrics", daemon=True).start()

    def crunch(self) -> None:
        """Works for 40 ms, and sleeps for 10."""
        total = 0
        while True:
            until = time.monotonic() + 0.04
            while time.monotonic() < until:
                total = (total * 31 + 7) % 1_000_003
            time.sleep(0.01)


class Uploaded:
    """A table of constants that is kept in host memory, and brought to the device for each step."""

    def __init__(self, rows: int, width: int, device: str) -> None:
        table = torch.randn(rows, width)
        self.table, self.device = table.pin_memory() if device == "cuda" else table, device

    def look_up(self, places: Tensor) -> Tensor:
        """Rows of the table."""
        return self.table.to(self.device, non_blocking=True)[places]


def watch(model: nn.Module, planted: str, device: str) -> None:
    """Does something after each layer."""
    means: dict[int, float] = {}

    def wait_for_layer(_layer: nn.Module, _given: Any, _out: Tensor) -> None:
        synchronize(device)

    def note_mean(layer: nn.Module, _given: Any, out: Tensor) -> None:
        means[id(layer)] = out.detach().mean().item()

    for layer in model.modules():
        if any(True for _ in layer.children()):
            continue
        if planted == "synchronize_each_layer":
            layer.register_forward_hook(wait_for_layer)
        elif planted == "item_each_layer":
            layer.register_forward_hook(note_mean)


def penalty(out: Tensor) -> Tensor:
    """Keeps outputs small, group by group."""
    total = out.new_zeros(())
    for group in out[:256].chunk(128, 1):
        total = total + 0.01 * group.abs().mean() + 0.001 * group.square().mean()
    return total


def plain_penalty(out: Tensor) -> Tensor:
    return 1.28 * out[:256].abs().mean() + 0.128 * out[:256].square().mean()


def save(model: nn.Sequential, path: Path) -> None:
    """A checkpoint of the first layers."""
    torch.save(model[:SAVED].state_dict(), path)


def neighbour(device: str, size: int) -> Iterator[None]:
    """Another program that computes on the same device."""
    command = [sys.executable, "-c", _NEIGHBOUR, device, str(size)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield
        process.kill()


def main(planted: str, device: str) -> None:
    full = prepared(device)
    width, batch, layers = (2048, 8192, 96) if full else (32, 64, 4)
    model = nn.Sequential(*(Residual(width) for _ in range(layers))).to(device)
    watch(model, planted, device)
    options: dict[str, Any] = {"foreach": False} if planted == "unfused_optimizer" else {"fused": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **options)
    data = torch.randn(batch, width, device=device, dtype=torch.bfloat16)
    places = torch.randint(0, 64, (batch,), device=device)
    uploaded = Uploaded(64 * 1024 if full else 64, width, device) if planted == "upload_each_step" else None
    others = neighbour(device, 8192 if full else 64) if planted == "gpu_neighbour" else iter([None])
    next(others)
    if planted == "gil":
        Metrics()
    make_penalty = penalty if planted == "tiny_kernels" else plain_penalty
    clock, step = Clock(), 0
    with tempfile.TemporaryDirectory() as folder:
        while not clock.over():
            step += 1
            wanted = data if uploaded is None else data + uploaded.look_up(places)
            with torch.autocast(device, dtype=torch.bfloat16):
                out = model(data)
            loss = (out - wanted).float().square().mean() + make_penalty(out)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if planted == "checkpoint" and step % SAVE_EVERY == 0:
                save(model, Path(folder, "model.pt"))
    next(others, None)
