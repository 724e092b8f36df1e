"""Times in these traces are microseconds. The GPU is idle from 100 to 9100 us unless a test says otherwise."""

from collections.abc import Sequence
from typing import Any

import pytest
from kineto_trace.analysis.cause_views import time_causes
from kineto_trace.analysis.findings.finding_views import findings
from kineto_trace.analysis.idle_pieces import (
    IDLE_CAUSES,
    NO_EVENT,
    NO_LAUNCH,
    NO_SAMPLE,
    NO_STACKS,
    NOTHING_EARLIER,
    idle_pieces,
    pageable_releases,
)
from kineto_trace.analysis.idle_views import idle_gaps_view
from kineto_trace.model.context import Context
from support.trace_files.traces import START_NS, trace

US = 1000
Row = dict[str, Any]
MB = 1 << 20
STEP, STEPS = 100_000, 4
LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


def row(name: str, start: int, end: int, **more: Any) -> Row:
    return {"name": name, "start": start * US, "duration": (end - start) * US, "thread": 1, "finished": 1, **more}


def without(entry: Row, *columns: str) -> Row:
    return {name: value for name, value in entry.items() if name not in columns}


def context(
    *,
    calls: Sequence[Row] = (),
    ops: Sequence[Row] = (),
    python: Sequence[Row] = (),
    launch: Row | None = None,
    **more: Sequence[Row],
) -> Context:
    """Two kernels with a gap of 9 ms, launched by a call at 9090 us unless `launch` is another one."""
    kernels = [without(row("k", 0, 100, correlation=1), "thread", "finished")]
    kernels.append(without(row("next", 9100, 9200, correlation=2), "thread", "finished"))
    made = [
        row("cudaLaunchKernel", -20, -10, correlation=1),
        launch or row("cudaLaunchKernel", 9090, 9095, correlation=2),
    ]
    tables = {
        "kernel": kernels,
        "cuda_runtime": [without(each, "finished") for each in (*made, *calls)],
        "cpu_op": [{"id": n + 1, **each} for n, each in enumerate(ops)],
        "python_function": [without(each, "finished") for each in python],
        **more,
    }
    return Context(trace(tables, length_ns=9200 * US, sample_period_ns=1000 * US if _sampled(python) else 0))


def _sampled(python: Sequence[Row]) -> bool:
    return any("self_samples" in each for each in python)


def pieces(found: Context) -> list[tuple[str, str | None, int, int]]:
    """Cause, name, start and end (us) of all pieces."""
    parts, strings = found.get(idle_pieces), found.trace.strings
    names = [strings[name] if name >= 0 else None for name in parts.name.tolist()]
    start, end = ((side - START_NS) // US for side in (parts.start, parts.end))
    causes = [IDLE_CAUSES[cause] for cause in parts.cause.tolist()]
    return list(zip(causes, names, start.tolist(), end.tolist(), strict=True))


def test_a_collective_of_nccl_is_launched_by_the_host_and_does_not_run_on_it() -> None:
    found = pieces(context(ops=[row("nccl:all_reduce", 2000, 3000)]))
    assert ("operators", "nccl:all_reduce", 2000, 3000) in found


def test_a_gap_is_divided_by_what_the_host_did_in_it() -> None:
    ops = [row("aten::slow", 100, 1000), row("gloo:all_reduce", 2000, 3000)]
    calls = [row("cudaMalloc", 3000, 4000), row("cudaEventSynchronize", 4000, 5000)]
    annotations = [row("enumerate(DataLoader)#_Single.__next__", 5000, 6000, id=8), row("metrics", 6000, 9000, id=9)]
    assert pieces(context(ops=ops, calls=calls, user_annotation=annotations)) == [
        ("operators", "aten::slow", 100, 1000),
        ("unknown", None, 1000, 2000),
        ("host_communication", "gloo:all_reduce", 2000, 3000),
        ("allocation", "cudaMalloc", 3000, 4000),
        ("synchronisation", "cudaEventSynchronize", 4000, 5000),
        ("data_loading", "enumerate(DataLoader)#_Single.__next__", 5000, 6000),
        ("annotation", "metrics", 6000, 9000),
        ("unknown", None, 9000, 9090),
        ("launch_latency", "cudaLaunchKernel", 9090, 9100),
    ]


def test_a_recorded_sleep_is_named_with_the_function_that_sleeps() -> None:
    python = [
        row("train.py(1): main", 0, 9200),
        row("train.py(7): throttle", 1000, 8000, line=9),
        row("<built-in function sleep>", 2000, 6100),
    ]
    found = context(python=python)
    assert pieces(found)[:4] == [
        ("python", "train.py(1): main", 100, 1000),
        ("python", "train.py(7): throttle", 1000, 2000),
        ("sleep", "train.py(7): throttle", 2000, 6100),
        ("python", "train.py(7): throttle", 6100, 8000),
    ]
    (gap,) = idle_gaps_view(found).rows()
    assert (gap["op"], gap["doing"], gap["doing_us"]) == (None, "sleep", 4100.0)
    assert gap["function"] == "throttle (train.py:9)"


def test_samples_divide_a_piece_equally() -> None:
    python = [
        row("train.py(1): main", 0, 9200, samples=9, self_samples=3, running=3),
        row("train.py(7): wait", 3000, 9000, samples=6, self_samples=6, idle=6),
    ]
    found = pieces(context(python=python))
    assert {(cause, name) for cause, name, *_ in found} == {
        ("python", "train.py(1): main"),
        ("blocked", "train.py(7): wait"),
        ("launch_latency", "cudaLaunchKernel"),
    }
    share = {cause: sum(end - start for each, _, start, end in found if each == cause) for cause, *_ in found}
    assert share["blocked"] == pytest.approx(8990 * 6 / 9, abs=1100)
    assert sum(share.values()) == pytest.approx(9000, abs=9)


def test_a_gap_without_a_sample_has_the_function_sampled_in_the_like_gaps() -> None:
    """Kernels each 4 ms, the gap of 2 ms before each "next" is sampled every 10 ms."""
    kernels = [row("next", 4000 * n + 2000, 4000 * n + 4000, correlation=n + 1) for n in range(10)]
    calls = [row("cudaLaunchKernel", 4000 * n + 1995, 4000 * n + 1999, correlation=n + 1) for n in range(10)]
    python = [row("train.py(7): wait", 500, 40500, samples=4, self_samples=4, idle=4)]
    tables = {
        "kernel": [without(each, "thread", "finished") for each in kernels],
        "cuda_runtime": [without(each, "finished") for each in calls],
        "python_function": [without(each, "finished") for each in python],
    }
    found = pieces(Context(trace(tables, length_ns=40000 * US, sample_period_ns=10_000 * US)))
    assert {(cause, name) for cause, name, *_ in found if cause != "launch_latency"} == {
        ("blocked", "train.py(7): wait")
    }


def test_after_a_wait_for_the_gpu_short_python_counts_for_the_wait_but_long_python_does_not() -> None:
    wait = row("cudaStreamSynchronize", 10, 120)
    short = [row("train.py(7): log", 200, 900), row("train.py(1): main", 0, 200)]
    assert {(cause, name) for cause, name, *_ in pieces(context(calls=[wait], python=short))} == {
        ("synchronisation", "cudaStreamSynchronize")
    }
    long = [row("train.py(7): augment", 200, 9000)]
    assert ("python", "train.py(7): augment", 200, 9000) in pieces(context(calls=[wait], python=long))


def test_a_slow_launching_call_is_told_and_so_is_the_queue_behind_it() -> None:
    launch = row("cudaGraphLaunch", 1000, 3000, correlation=2)
    assert pieces(context(ops=[row("aten::mm", 100, 1000)], launch=launch)) == [
        ("operators", "aten::mm", 100, 1000),
        ("operators", "cudaGraphLaunch", 1000, 3000),
        ("queued", "cudaGraphLaunch", 3000, 9100),
    ]


def test_work_that_was_launched_ahead_waits_in_its_queue() -> None:
    assert pieces(context(launch=row("cudaLaunchKernel", 50, 60, correlation=2))) == [
        ("queued", "cudaLaunchKernel", 100, 9100)
    ]


def test_the_queue_does_not_explain_why_the_first_recorded_activity_came_late() -> None:
    kernels = [{"name": "k", "start": 8000 * US, "duration": 100 * US, "correlation": 1}]
    calls = [{"name": "cudaLaunchKernel", "start": 100 * US, "duration": 10 * US, "correlation": 1, "thread": 1}]
    found = Context(trace({"kernel": kernels, "cuda_runtime": calls}, length_ns=8100 * US))
    assert pieces(found)[-1] == ("unknown", None, 110, 8000)
    assert found.get(idle_pieces).reason[-1] == NOTHING_EARLIER


def test_the_thread_of_the_steps_explains_what_the_launching_thread_does_not() -> None:
    steps = [row("ProfilerStep#1", 0, 9200, id=9, finished=1)]
    launch = row("cudaLaunchKernel", 9090, 9095, correlation=2, thread=2)
    python = [row("train.py(7): loss", 100, 5000), row("torch/autograd/graph.py(1): _engine_run_backward", 5000, 9200)]
    ops = [row("MulBackward0", 6000, 9096, thread=2)]
    assert pieces(context(launch=launch, python=python, ops=ops, user_annotation=steps))[:3] == [
        ("python", "train.py(7): loss", 100, 5000),
        ("operators", "torch/autograd/graph.py(1): _engine_run_backward", 5000, 6000),
        ("operators", "MulBackward0", 6000, 9090),
    ]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({}, NO_STACKS),
        ({"launch": row("cudaLaunchKernel", 9090, 9095, correlation=7)}, NO_LAUNCH),
        ({"python": [row("train.py(1): main", 9190, 9200)]}, NO_EVENT),
        ({"python": [row("train.py(1): main", 9190, 9200, samples=1, self_samples=1)]}, NO_SAMPLE),
    ],
)
def test_what_is_unknown_has_a_reason(more: dict[str, Any], reason: int) -> None:
    parts = context(**more).get(idle_pieces)
    unknown = parts.cause == IDLE_CAUSES.index("unknown")
    assert set(parts.reason[unknown].tolist()) == {reason}
    assert not parts.reason[~unknown].any()


def release_row(name: str, start: int, end: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "start": start * US, "duration": (end - start) * US, **more}


def release_context(
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
        annotations.append(release_row(f"ProfilerStep#{step}", at, at + STEP, thread=1, finished=1, id=100 + step))
        annotations.append(release_row(loader, at, at + 10, thread=1, finished=1, id=200 + step))
        ops.append(release_row("aten::to", at + 100, at + 20_100, thread=1, finished=1, id=number))
        calls.append(release_row("cudaMemcpyAsync", at + 110, at + 20_090, thread=1, correlation=number))
        copies.append(
            release_row(f"Memcpy HtoD ({kind} -> Device)", at + 120, at + 20_090, correlation=number, bytes=size)
        )
        ops.append(release_row("aten::sum", at + 20_100 + released, at + 60_000, thread=1, finished=1, id=number + 1))
        calls.append(release_row("cudaLaunchKernel", at + 59_900, at + 59_950, thread=1, correlation=number + 1))
        kernels.append(release_row("k", at + 59_990, at + STEP, correlation=number + 1))
    whole = {"samples": 40, "self_samples": 40, "running": 40}
    python = [
        release_row("/job/train.py(5): main", 0, STEP * STEPS, thread=1, **whole, lines=lines, callees=callees, line=9)
    ]
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
    found = release_context().get(pageable_releases)
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
    assert release_context(**changes).get(pageable_releases).length() == 0


def test_the_finding_of_pageable_copies_counts_the_release() -> None:
    told = {each.name: each for each in findings(release_context()).findings}
    copies = release_context().get(time_causes).total("pageable_copies")
    assert told["pageable_copies"].saving_ns >= copies + STEPS * 25_000 * US
    assert "the GPU is idle for another 100 ms while the host frees the memory" in told["pageable_copies"].evidence
    assert "host_python" not in told
