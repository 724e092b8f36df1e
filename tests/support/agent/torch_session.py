"""A session of torch's profiler as the agent has it, in a process of its own, with a daemon's side that copies.

Run with "python -m support.agent.torch_session PLAN", where PLAN is Python text that uses what is here.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import threading  # noqa: F401 - for plans
import time
from pathlib import Path
from typing import Any

from kineto_agent.sources.interface import SourceRequest
from kineto_agent.sources.torch import libtorch_symbols
from kineto_agent.sources.torch.torch_profiler import DOCUMENT, prepare

from support.agent.copied_session import CopiedSession

TYPES = frozenset(("cpu_op", "user_annotation", "python_function"))


class Recording(CopiedSession):
    """A session of torch's profiler."""

    def __init__(self, limit_bytes: int = 128 << 20, **options: Any) -> None:
        super().__init__(lambda: prepare(SourceRequest(TYPES, limit_bytes, options), "a test"))


def in_pieces() -> None:
    """Make the session treat this torch's functions as ones that it cannot trust."""
    libtorch_symbols.TRUSTED = ()  # type: ignore[assignment]


def documents(data: bytes) -> list[bytes]:
    """The JSON texts of a recording."""
    head, *found = data.split(DOCUMENT)
    assert head == b""
    return found


def rss_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def kept_bytes() -> int:
    """Memory of this process that is neither garbage nor pages of files, which come and go as the kernel likes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * 4096


def rows(data: bytes) -> list[dict[str, Any]]:
    """The X rows of all documents."""
    return [row for text in documents(data) for row in json.loads(text)["traceEvents"] if row["ph"] == "X"]


class Model:
    """Three layers that are trained; about 60 ops a step."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        self._torch = torch
        self._layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
        self._optimizer = torch.optim.SGD(self._layers.parameters(), lr=0.01)

    def step(self) -> None:
        """Train one iteration."""
        with self._torch.profiler.record_function("step"):
            self._optimizer.zero_grad()
            self._layers(self._torch.randn(4, 8)).sum().backward()
            self._optimizer.step()

    def step_until(self, ended: Any) -> tuple[int, float]:
        """Train until the condition holds. Returns the number of steps and the longest one in s."""
        count, longest, before = 0, 0.0, time.monotonic()
        while not ended():
            self.step()
            count, now = count + 1, time.monotonic()
            longest, before = max(longest, now - before), now
        return count, longest


if __name__ == "__main__":
    exec(compile(sys.argv[1], "<plan>", "exec"))
