"""A small trace of a loop with Python samples, operators and GPU work, for tests of profiles."""

from typing import Any

from kineto_trace.model.trace import Trace

from support.trace_files.traces import H100, target, trace

SPAN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OWN_SPAN = "00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01"
PERIOD_NS = 10_000_000
THREAD = 70
_OP = {"thread": THREAD, "sequence": -1, "finished": 1, "inputs": -1}
_FRAME = {"thread": THREAD, "parent": -1}
ROWS: dict[str, list[dict[str, Any]]] = {
    "user_annotation": [
        {**_OP, "start": 0, "duration": 1000, "name": "step", "id": 1},
        {**_OP, "start": 500, "duration": 400, "name": f"request traceparent={OWN_SPAN}", "id": 7},
    ],
    "cpu_op": [
        {**_OP, "start": 100, "duration": 300, "name": "aten::linear", "id": 2},
        {**_OP, "start": 150, "duration": 100, "name": "aten::mm", "id": 3},
        {**_OP, "start": 550, "duration": 300, "name": "aten::linear", "id": 4},
        {**_OP, "start": 600, "duration": 100, "name": "aten::mm", "id": 5},
    ],
    "cuda_runtime": [
        {"start": 160, "duration": 10, "name": "cudaLaunchKernel", "thread": THREAD, "correlation": 1},
        {"start": 610, "duration": 10, "name": "cudaLaunchKernel", "thread": THREAD, "correlation": 2},
    ],
    "kernel": [
        {"start": 300, "duration": 40, "name": "gemm", "stream": 7, "correlation": 1},
        {"start": 700, "duration": 2, "name": "gemm", "stream": 7, "correlation": 2},
        {"start": 900, "duration": 7, "name": "lost", "stream": 7, "correlation": 9},
    ],
    "gpu_memcpy": [{"start": 990, "duration": 5, "name": "Memcpy HtoD", "stream": 7, "correlation": 8}],
}
_F = {**_FRAME, "name": "/app/train.py(3): f", "samples": 2, "self_samples": 2, "parent": 0, "depth": 1}
SAMPLES: list[dict[str, Any]] = [
    {**_FRAME, "start": 2000, "duration": 50, "name": "/app/train.py(9): main", "samples": 5, "self_samples": 1},
    {**_F, "start": 2000, "duration": 20, "lines": "4: 1 running, 1 waiting", "running": 1, "waiting": 1},
    {**_F, "start": 2030, "duration": 20, "lines": "5: 2 idle", "idle": 2, "idle_lock": 2},
]


def profiled(**changes: Any) -> Trace:
    """The trace; changes: of its target."""
    known: dict[str, Any] = {
        "threads": {THREAD: "MainThread"},
        "command": ["python", "/app/train.py"],
        "python_version": "3.11.7",
        "rank": 3,
        "world_size": 8,
        "job_id": "17",
        "labels": {"team": "vision"},
    }
    return trace(
        {**ROWS, "python_function": SAMPLES},
        sample_period_ns=PERIOD_NS,
        target=target(**{**known, **changes}),
        devices=({**H100, "name": "NVIDIA H100"},),
    )
