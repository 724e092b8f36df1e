"""Programs on a host and a GPU, run in a model of both, and the traces that would be recorded of them."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from kineto_trace.analysis import step_replay as replaying
from kineto_trace.analysis.distributed.rank_simulation import LAUNCH_NS
from kineto_trace.arrays.intervals import Union, union
from kineto_trace.model.context import Context

from support.trace_files.traces import START_NS, target, trace

US = 1_000
LAUNCH = 4 * US  # of the host, for each call
Row = dict[str, Any]


@dataclass
class Program:
    """A program on a host and a GPU with one queue, as it runs: each method appends to its trace.

    now: of the host; idle_from: when the GPU has done everything. Both since START_NS, in ns.
    """

    now: int = 0
    idle_from: int = 0
    rows: dict[str, list[Row]] = field(
        default_factory=lambda: {"cuda_runtime": [], "kernel": [], "cpu_op": [], "user_annotation": []}
    )

    def host(self, length: int) -> tuple[int, int]:
        """Works for a time. Returns when."""
        self.now += length
        return self.now - length, self.now

    def call(self, name: str, length: int = LAUNCH, **more: Any) -> int:
        """Calls CUDA. Returns the correlation."""
        number = len(self.rows["cuda_runtime"]) + 1
        row = {"name": name, "start": self.now, "duration": length, "thread": 1, "correlation": number}
        self.rows["cuda_runtime"].append({**row, **more})
        self.now += length
        return number

    def launch(self, *kernels: int) -> None:
        """Launches work that takes so long, in one call."""
        began = self.now
        number = self.call("cudaLaunchKernel")
        for length in kernels:
            start = max(self.idle_from, began + LAUNCH_NS)
            self.rows["kernel"].append({"name": "k", "start": start, "duration": length, "correlation": number})
            self.idle_from = start + length

    def wait(self) -> None:
        """Waits until the GPU has done everything."""
        self.call("cudaStreamSynchronize", max(self.idle_from - self.now, 0) + replaying.WAIT_NS)

    def step(self, begin: int) -> None:
        """Marks a step that ends now."""
        number = len(self.rows["user_annotation"])
        row = {"name": f"ProfilerStep#{number}", "start": begin, "duration": self.now - begin, "thread": 1}
        self.rows["user_annotation"].append({**row, "finished": 1, "id": 10_000 + number, "inputs": -1, "scope": 7})

    def operator(self, name: str = "aten::add", length: int = 0) -> None:
        """Marks an operator of a length, which begins now, for the time of recording it."""
        row = {"name": name, "start": self.now, "duration": length, "thread": 1, "finished": 1, "inputs": -1}
        self.rows["cpu_op"].append({**row, "id": len(self.rows["cpu_op"]) + 1, "sequence": -1, "scope": 0})

    def context(self, **changes: Any) -> Context:
        rows = {kind: found for kind, found in self.rows.items() if found}
        return Context(trace(rows, length_ns=self.now, target=target(**changes)))


def absolute(*times: tuple[int, int]) -> Union:
    """A union of times since START_NS."""
    found = np.array(times, np.int64).reshape(-1, 2) + START_NS
    return union(found[:, 0], found[:, 1])
