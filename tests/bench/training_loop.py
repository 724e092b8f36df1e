"""A training loop that logs the end of every step; a target for the overhead benchmark and the GPU tests.

usage: training_loop.py WORK LOG [--torch-profiler AT_S,FOR_S,TRACE_FILE]

WORK is "launch" (a small transformer, about 1,100 kernels a step: the CPU is the limit), "compute" (a large
one: the GPU is) or "cpu" (no GPU needed). Prints "ready PID" once warm and runs until its standard input
closes; then writes LOG: {"steps": [ns, ...] (Unix time at each step's end), "marks": {name: ns}}.
With --torch-profiler the loop profiles itself, as people do today: start after AT_S seconds, stop after
FOR_S more, export, go on.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Batch x tokens x width, in and out."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        down: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return x + down


# width, heads, layers, batch, tokens, dtype, foreach optimizer, device
WORK: dict[str, tuple[int, int, int, int, int, torch.dtype, bool, str]] = {
    "launch": (256, 4, 8, 4, 64, torch.float32, False, "cuda"),
    "compute": (768, 12, 12, 16, 1024, torch.bfloat16, True, "cuda"),
    "cpu": (64, 2, 2, 2, 16, torch.float32, False, "cpu"),
}
VOCABULARY = 8192


class Training:
    """Model, optimizer and data of one kind of work."""

    def __init__(self, work: str) -> None:
        width, heads, layers, batch, tokens, dtype, foreach, device = WORK[work]
        torch.manual_seed(0)
        blocks = [Block(width, heads) for _ in range(layers)]
        model = nn.Sequential(nn.Embedding(VOCABULARY, width), *blocks, nn.Linear(width, VOCABULARY))
        self.model = model.to(device).to(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=foreach)
        self.data = torch.randint(0, VOCABULARY, (batch, tokens), device=device)
        self.device = device

    def step(self) -> None:
        """One training step; returns when the device has finished it."""
        logits = self.model(self.data).view(-1, VOCABULARY).float()
        loss = nn.functional.cross_entropy(logits, self.data.view(-1))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        if self.device == "cuda":
            torch.cuda.synchronize()


class OwnProfiler:
    """torch.profiler used in the script, for comparison. Times are seconds after the first call."""

    def __init__(self, at_s: float, for_s: float, trace_file: str) -> None:
        self.at_s, self.for_s, self.trace_file = at_s, for_s, trace_file
        self.begin = time.time()
        self.profiler: Any = None
        self.marks: dict[str, int] = {}

    def between_steps(self) -> None:
        """Starts or stops the profiler when it is time."""
        now_s = time.time() - self.begin
        if not self.marks and now_s >= self.at_s:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self.marks["requested"] = time.time_ns()
            self.profiler = torch.profiler.profile(activities=activities)
            self.profiler.start()
            self.marks["collecting"] = time.time_ns()
        elif self.profiler is not None and now_s >= self.at_s + self.for_s:
            self.marks["collected"] = time.time_ns()
            self.profiler.stop()
            self.profiler.export_chrome_trace(self.trace_file)
            self.marks["stored"] = time.time_ns()
            self.profiler = None


def main() -> int:
    """Runs the loop until standard input closes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("work", choices=sorted(WORK))
    parser.add_argument("log", type=Path)
    parser.add_argument("--torch-profiler", metavar="AT_S,FOR_S,TRACE_FILE")
    options = parser.parse_args()
    training = Training(options.work)
    for _ in range(20):
        training.step()
    stop = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    own = None
    if options.torch_profiler:
        at_s, for_s, trace_file = options.torch_profiler.split(",")
        own = OwnProfiler(float(at_s), float(for_s), trace_file)
    print("ready", flush=True)
    steps: list[int] = []
    while not stop.is_set():
        if own is not None:
            own.between_steps()
        training.step()
        steps.append(time.time_ns())
        if own is not None and "stored" in own.marks and time.time_ns() - own.marks["stored"] > 5e9:
            break
    options.log.write_text(json.dumps({"steps": steps, "marks": own.marks if own else {}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
