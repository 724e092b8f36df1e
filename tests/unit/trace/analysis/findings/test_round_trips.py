"""Functions that native code calls back. Times in these traces are microseconds."""

from typing import Any

import pytest
from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.findings.idle_findings import host_functions
from kineto_trace.model.context import Context
from support.trace_files.traces import trace

Row = dict[str, Any]
US = 1000
STEP, STEPS = 30_000, 6
LIBRARY = "/usr/lib/python3/dist-packages/jax/_src/callback.py(8): call"


def row(name: str, start: int, end: int, **more: Any) -> Row:
    return {"name": name, "start": start * US, "duration": (end - start) * US, **more}


def told(
    *,
    library: str = LIBRARY,
    call_line: int = 9,
    callees: str = "9 update: 72 running",
    function: int = 6000,
    late: int = 0,
) -> dict[str, Finding]:
    """Steps of 30 ms with a gap of 10 ms, in which a function is called back for some time.

    late: time without work before the kernel of a step, in which the caller is.
    """
    calls: list[Row] = []
    copies: list[Row] = []
    kernels: list[Row] = []
    python: list[Row] = []
    for step in range(STEPS):
        at, number = step * STEP, 3 * step + 1
        parts = (("Memcpy DtoH", 0, 1000), ("Memcpy HtoD", 11_000, 12_000), ("k", 12_000 + late, STEP))
        for place, (name, start, end) in enumerate(parts):
            made = at + start - 10
            calls.append(row("cudaLaunchKernel", made, made + 5, thread=1, correlation=number + place))
            activity = row(name, at + start, at + end, correlation=number + place)
            (kernels if name == "k" else copies).append(activity)
        start, end, samples = at + 1000, at + 1000 + function, function // 2000
        python.append(row(library, start, end, thread=1, samples=samples, call_line=call_line, depth=1))
        own = {"samples": samples, "self_samples": samples, "running": samples}
        python.append(row("/job/train.py(3): weights", start, end, thread=1, **own, line=4, depth=2))
    count = STEPS * (STEP - function) // 2000
    whole: Row = {"samples": 90, "self_samples": count, "running": count, "lines": f"9: {count} running"}
    python.append(row("/job/train.py(7): main", 0, STEP * STEPS, thread=1, **whole, callees=callees, line=9))
    tables = {"cuda_runtime": calls, "gpu_memcpy": copies, "kernel": kernels, "python_function": python}
    found = Context(trace(tables, length_ns=STEP * STEPS * US, sample_period_ns=2000 * US))
    return {each.title: each for each in host_functions(found)}


FUNCTION = "The GPU waits for the host in weights (/job/train.py:4): it runs Python"
CALLER = "The GPU waits for the host in main (/job/train.py:9): it runs Python"


def test_the_native_code_around_a_function_that_it_calls_back_goes_with_it() -> None:
    found = told()
    assert list(found) == [FUNCTION]
    assert found[FUNCTION].saving_ns == pytest.approx(STEPS * 10_000 * US, rel=0.02)
    assert "in native code of main (/job/train.py:9), which calls the function back" in found[FUNCTION].evidence


def test_what_the_caller_does_in_other_gaps_stays_its_own() -> None:
    found = told(late=2000)
    assert found[CALLER].saving_ns == pytest.approx(STEPS * 2000 * US, rel=0.2)
    assert found[FUNCTION].saving_ns == pytest.approx(STEPS * 10_000 * US, rel=0.1)


@pytest.mark.parametrize(
    "changes",
    [
        {"library": "/job/other.py(8): call"},  # the user's own code calls it
        {"call_line": 8},  # another line calls it
        {"callees": "9 update: 20 running"},  # the line runs Python of its own
        {"function": 2000},  # most of these gaps is not the function's
        {"late": 12_000},  # most of the caller's time is elsewhere
    ],
    ids=str,
)
def test_without_all_of_the_evidence_they_are_two_findings(changes: dict[str, Any]) -> None:
    found = told(**changes)
    assert {FUNCTION, CALLER} <= set(found)
    assert "calls the function back" not in found[FUNCTION].evidence
