"""Traces of training steps whose operators and kernels take given times, for comparisons of traces."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from kineto_trace.analysis.diff.step_noise import StepSamples
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Trace

from support.trace_files.traces import target, trace

Row = dict[str, Any]


def stepped(
    ops_us: Mapping[str, Sequence[float]],
    kernels_us: Mapping[str, Sequence[float]] | None = None,
    *,
    rank: int | None = None,
    tail_ns: int = 0,
    annotated: bool = True,
) -> Trace:
    """A trace of as many steps as each row has values: what it takes in each step, 0 for a step without it.

    Kernels are launched outside operators. A step is as long as its operators and 1 ms. tail_ns: of the window after
    the last step. annotated: whether steps are marked.
    """
    rows: dict[str, list[Row]] = {"cpu_op": [], "user_annotation": [], "cuda_runtime": [], "kernel": []}
    kernels, at, number = dict(kernels_us or {}), 1000, 1
    steps = len(next(iter((*ops_us.values(), *kernels.values()))))
    for step in range(steps):
        begin = at
        for name, values in kernels.items():
            if values[step]:
                launch = {"name": "cudaLaunchKernel", "start": at, "duration": 100, "thread": 1, "correlation": number}
                rows["cuda_runtime"].append(launch)
                length = round(1000 * values[step])
                rows["kernel"].append({"name": name, "start": at + 500, "duration": length, "correlation": number})
                number, at = number + 1, at + 200
        for name, values in ops_us.items():
            if values[step]:
                length = round(1000 * values[step])
                rows["cpu_op"].append({"name": name, "start": at, "duration": length, "thread": 1, "finished": 1})
                at += length
        at += 1_000_000
        mark = {"name": f"ProfilerStep#{step + 7}", "start": begin, "duration": at - begin, "thread": 1, "finished": 1}
        rows["user_annotation"].append(mark)
    if not annotated:
        del rows["user_annotation"]
    for kind in ("cpu_op", "user_annotation"):
        for place, row in enumerate(rows.get(kind, ())):
            row |= {"id": place + 1, "inputs": -1, "sequence": -1}
    filled = {kind: entries for kind, entries in rows.items() if entries}
    return trace(filled, length_ns=at + tail_ns, target=target(rank=rank, threads={1: "main"}))


def context(*arguments: Any, **options: Any) -> Context:
    return Context(stepped(*arguments, **options))


def queued(
    host_ms: Sequence[float], gpu_ms: Sequence[float], *, rank: int | None = None, first: int = 7, before_ms: float = 0
) -> Trace:
    """A trace of steps that launch a kernel each, which waits for the one before; it ends with the last step.

    host_ms: length of each step on the host; gpu_ms: of its kernel. before_ms: of a kernel that was launched before.
    Kernels that would begin after the end are not recorded.
    """
    end = 1000 + round(1e6 * sum(host_ms))
    rows: dict[str, list[Row]] = {"user_annotation": [], "cpu_op": [], "cuda_runtime": [], "kernel": []}
    at, free = 1000, 1000 + round(1e6 * before_ms)
    for step, (host, gpu) in enumerate(zip(host_ms, gpu_ms, strict=True)):
        length, took, own = round(1e6 * host), round(1e6 * gpu), {"thread": 1, "finished": 1}
        named = {"start": at, "duration": length, "id": step + 1, "inputs": -1, "sequence": -1, **own}
        rows["user_annotation"].append({"name": f"ProfilerStep#{step + first}", **named})
        rows["cpu_op"].append({"name": "aten::mm", **named, "duration": 2000})
        launch = {"name": "cudaLaunchKernel", "start": at + 500, "duration": 500, "thread": 1, "correlation": step + 1}
        rows["cuda_runtime"].append(launch)
        free = max(free, at + 1000)
        if free < end:
            rows["kernel"].append({"name": "gemm", "start": free, "duration": took, "correlation": step + 1})
        at, free = at + length, free + took
    return trace(rows, length_ns=end, target=target(rank=rank, threads={1: "main"}))


def noisy(mean_us: float, steps: int, seed: int, spread: float = 0.02) -> list[float]:
    """Times around a mean, with a relative standard deviation."""
    return [mean_us * (1 + spread * float(each)) for each in np.random.default_rng(seed).standard_normal(steps)]


def of_steps(samples: StepSamples, chosen: Sequence[int]) -> StepSamples:
    """Some steps of a trace as if they were a trace of their own."""
    places = sorted(chosen)
    return replace(
        samples,
        us=samples.us[:, places],
        calls=samples.calls[:, places],
        steps=tuple(samples.steps[place] for place in places),
        step_us=samples.step_us[places],
    )
