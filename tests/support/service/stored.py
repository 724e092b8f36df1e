"""Stored traces for tests of commands: small, by hand, in folders of columns."""

from pathlib import Path

from kineto_trace.model.target_info import TargetInfo
from kineto_trace.store.parquet_folder import save_columns

from support.trace_files.traces import H100, target, trace

DEVICE = {**H100, "name": "H200", "totalGlobalMem": 150_000_000_000, "sharedMemPerBlock": 49152}


def step(start_us: int, correlation: int, kernel_us: int) -> dict[str, list[dict[str, object]]]:
    """One training step of 100 us: an op of 40 us, a launch in it, and the kernel."""
    us = 1000
    return {
        "user_annotation": [
            {"name": f"ProfilerStep#{correlation}", "start": start_us * us, "duration": 100 * us, "thread": 1}
            | {"id": 100 + correlation, "finished": 1, "inputs": -1}
        ],
        "cpu_op": [
            {"name": "aten::mm", "start": (start_us + 10) * us, "duration": 40 * us, "thread": 1}
            | {"id": correlation, "finished": 1, "inputs": -1, "sequence": -1}
        ],
        "cuda_runtime": [
            {"name": "cudaLaunchKernel", "start": (start_us + 20) * us, "duration": 5 * us, "thread": 1}
            | {"correlation": correlation}
        ],
        "kernel": [
            {"name": "gemm", "start": (start_us + 30) * us, "duration": kernel_us * us, "stream": 7}
            | {"correlation": correlation, "grid_x": 132, "grid_y": 1, "grid_z": 1}
            | {"block_x": 256, "block_y": 1, "block_z": 1, "registers": 32}
        ],
    }


def store(folder: Path, *, rank: int | None = None, kernel_us: int = 30) -> Path:
    """A trace of two steps. Returns its folder."""
    first, second = step(0, 1, kernel_us), step(100, 2, kernel_us)
    rows = {kind: first[kind] + second[kind] for kind in first}
    process: TargetInfo = target(rank=rank, threads={1: "main"})
    save_columns(trace(rows, length_ns=250_000, target=process, devices=(DEVICE,)), folder)
    return folder
