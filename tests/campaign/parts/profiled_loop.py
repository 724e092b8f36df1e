"""A training loop that profiles itself all the time with torch.profiler's schedule, and checks each of its traces.

    python profiled_loop.py FAKE | CUDA | CPU

FAKE launches kernels of the fake libcupti beside a real model on the CPU, and does to that library what Kineto does to
a real one. Each own trace is one line of JSON on standard output: {"begin_ns", "end_ns" (Unix; when CUPTI belongs to
it), "ops": [of each active step], "kernels": [of each active step, or of the whole session with FAKE], "rss"}. An
agent runs in it. It ends with its standard input; the last line is {"steps", "misused"}.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[3] / "agent"))

import kineto_agent
import torch
from bench.training_loop import Training
from support.machine.native import FakeCuda
from torch import nn
from torch.autograd.profiler import profile as autograd_profile
from torch.profiler import ProfilerActivity, profile, schedule

# What Kineto shows of CUPTI's own work; it comes when buffers are full.
OVERHEAD = {"Activity Buffer Request", "Buffer Flush", "Command Buffer Full", "Instrumentation", "Resource"}
# Steps: most of the time is free.
PLANS = {"CUDA": (25, 3, 3), "CPU": (120, 30, 30), "FAKE": (120, 30, 30)}  # wait, warm-up, active
FAKE_KERNELS = 5  # a step


class Small:
    """Training of a few layers, in a millisecond a step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.data = torch.randn(16, 32)

    def step(self) -> None:
        """Trains one step."""
        self.optimizer.zero_grad()
        (self.model(self.data) - self.data).square().mean().backward()
        self.optimizer.step()


class Own:
    """The program's own profiler: what it saw."""

    def __init__(self, cuda: FakeCuda | None) -> None:
        self.cuda = cuda
        self.begin_ns = self.end_ns = 0
        self.fake_kernels = 0
        self._prepare: Any = autograd_profile._prepare_trace
        self._exit: Any = autograd_profile.__exit__

    def install(self) -> None:
        """Note the times at which CUPTI is Kineto's, and do to the fake what Kineto does."""
        own = self

        def prepare(profiler: Any) -> Any:
            own.begin_ns = time.time_ns()
            if own.cuda is not None:
                own.cuda.kineto_begin()
            return own._prepare(profiler)

        def leave(profiler: Any, *details: Any) -> Any:
            if own.cuda is not None:
                own.fake_kernels = own.cuda.kineto_end()
            own.end_ns = time.time_ns()
            return own._exit(profiler, *details)

        autograd_profile._prepare_trace = prepare
        autograd_profile.__exit__ = leave

    def report(self, profiler: Any) -> None:
        """Prints one line about one trace."""
        steps: list[tuple[int, int]] = []
        ops: list[int] = []
        kernels: list[int] = []
        for event in profiler.profiler.kineto_results.events():
            where = str(event.device_type())
            if event.name().startswith("ProfilerStep#"):
                if "CPU" in where:
                    steps.append((event.start_ns(), event.start_ns() + event.duration_ns()))
            elif event.name() not in OVERHEAD:
                (ops if "CPU" in where else kernels).append(event.start_ns())
        line = {
            "begin_ns": self.begin_ns,
            "end_ns": self.end_ns,
            "ops": per_step(steps, ops),
            "kernels": per_step(steps, kernels) if self.cuda is None else [self.fake_kernels],
            "rss": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE"),
        }
        print(json.dumps(line), flush=True)


def per_step(steps: list[tuple[int, int]], starts: list[int]) -> list[int]:
    """Number of events that began in each step; the last number is of those outside of all steps."""
    found = Counter(next((n for n, (a, b) in enumerate(sorted(steps)) if a <= at < b), -1) for at in starts)
    return [found[number] for number in range(len(steps))]


def main() -> int:
    """Train until standard input ends."""
    mode = sys.argv[1]
    cuda = FakeCuda() if mode == "FAKE" else None
    ended = threading.Event()

    def listen() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=listen, daemon=True).start()
    torch.set_num_threads(1)
    training: Any = Training("launch") if mode == "CUDA" else Small()
    for _ in range(5):
        training.step()
    kineto_agent.start()
    own = Own(cuda)
    own.install()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if mode == "CUDA" else [])]
    wait, warm_up, active = PLANS[mode]
    plan = schedule(wait=wait, warmup=warm_up, active=active)
    steps = 0
    with profile(activities=activities, schedule=plan, on_trace_ready=own.report) as profiler:
        while not ended.is_set() or steps % (wait + warm_up + active) != 0:
            training.step()
            if cuda is not None:
                cuda.launch(count=FAKE_KERNELS)
            profiler.step()
            steps += 1
    print(json.dumps({"steps": steps, "misused": cuda.misused if cuda is not None else 0}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
