"""When the training thread releases what it copied. Times in these traces are microseconds."""

from typing import Any

import pytest
from kineto_trace.analysis.causes.time_causes import time_causes
from kineto_trace.analysis.findings.finding_rules import findings
from kineto_trace.analysis.idle.pageable_releases import pageable_releases
from kineto_trace.model.context import Context
from support.trace_files.traces import START_NS, trace

US, MB = 1000, 1 << 20
STEP, STEPS = 100_000, 4
LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


def row(name: str, start: int, end: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "start": start * US, "duration": (end - start) * US, **more}


def context(
    *,
    size: int = 150 * MB,
    kind: str = "Pageable",
    loader: str = LOADER,
    lines: str = "9: 32 running; 10: 8 running",
    callees: str = "9 images.to: 20 running; 10 images.sum: 8 running",
    released: int = 25_000,
) -> Context:
    """Steps of 100 ms: a copy of 20 ms, the release, another operator until 60 ms, and a kernel."""
    ops, calls, copies, kernels, annotations = [], [], [], [], []
    for step in range(STEPS):
        at, number = step * STEP, 2 * step + 1
        annotations.append(row(f"ProfilerStep#{step}", at, at + STEP, thread=1, finished=1, id=100 + step))
        annotations.append(row(loader, at, at + 10, thread=1, finished=1, id=200 + step))
        ops.append(row("aten::to", at + 100, at + 20_100, thread=1, finished=1, id=number))
        calls.append(row("cudaMemcpyAsync", at + 110, at + 20_090, thread=1, correlation=number))
        copies.append(row(f"Memcpy HtoD ({kind} -> Device)", at + 120, at + 20_090, correlation=number, bytes=size))
        ops.append(row("aten::sum", at + 20_100 + released, at + 60_000, thread=1, finished=1, id=number + 1))
        calls.append(row("cudaLaunchKernel", at + 59_900, at + 59_950, thread=1, correlation=number + 1))
        kernels.append(row("k", at + 59_990, at + STEP, correlation=number + 1))
    whole = {"samples": 40, "self_samples": 40, "running": 40}
    python = [row("/job/train.py(5): main", 0, STEP * STEPS, thread=1, **whole, lines=lines, callees=callees, line=9)]
    tables = {
        "cpu_op": ops,
        "cuda_runtime": calls,
        "gpu_memcpy": copies,
        "kernel": kernels,
        "user_annotation": annotations,
        "python_function": python,
    }
    return Context(trace(tables, length_ns=STEP * STEPS * US, sample_period_ns=10_000 * US))


def test_the_time_between_a_copy_and_the_next_operator_releases_the_batch() -> None:
    found = context().get(pageable_releases)
    assert ((found.start - START_NS) // US).tolist() == [20_100 + step * STEP for step in range(STEPS)]
    assert found.length() == STEPS * 25_000 * US


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "Pinned"},
        {"loader": "load"},  # nothing says that a worker made the batch
        {"size": 10 * MB},  # would be released sooner
        {"released": 500},
        {"lines": "9: 22 running; 10: 18 running"},  # too few samples outside of the copying method
        {"callees": "9 images.sum: 20 running"},  # the line does not copy
        {"callees": "9 images.to: 20 running; 9 f: 12 running"},  # it calls something else
        {"lines": "9: 20 running, 12 idle"},  # it waits
    ],
    ids=str,
)
def test_without_all_of_the_evidence_nothing_is_said(changes: dict[str, Any]) -> None:
    assert context(**changes).get(pageable_releases).length() == 0


def test_the_finding_of_pageable_copies_counts_the_release() -> None:
    told = {each.name: each for each in findings(context()).findings}
    copies = context().get(time_causes).total("pageable_copies")
    assert told["pageable_copies"].saving_ns >= copies + STEPS * 25_000 * US
    assert "100 ms more the GPU is idle while the host releases the memory" in told["pageable_copies"].evidence
    assert "host_python" not in told
