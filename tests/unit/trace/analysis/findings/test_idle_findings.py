"""Findings of idle GPUs, in traces whose samples come every 10 ms."""

from typing import Any

import pytest
from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.findings import idle_findings
from kineto_trace.analysis.findings.finding_views import findings
from kineto_trace.analysis.findings.idle_findings import host_functions
from kineto_trace.model.context import Context
from kineto_trace.model.kernel_counters import PROCESS
from support.trace_files.sampled_stacks import MAIN, PERIOD_NS, Sample, stack_rows
from support.trace_files.traces import START_NS, target, trace

ONE, TWO = (*MAIN, "/job/a.py(3): one"), (*MAIN, "/job/b.py(4): two")
ONE_NS, TWO_NS = 49_998_750, 29_999_250  # of the window, as they are found
BUSY = ("/job/train.py(1): <module>", "/job/metrics.py(7): crunch")
Row = dict[str, Any]
US = 1000
STEP, STEPS = 30_000, 6
LIBRARY = "/usr/lib/python3/dist-packages/jax/_src/callback.py(8): call"
FUNCTION = "The GPU is idle while the host runs Python code in weights (train.py:4)"
CALLER = "The GPU is idle while the host runs Python code in main (train.py:9)"


def tables(*rows: dict[str, object]) -> dict[str, list[dict[str, object]]]:
    """Python functions between two kernels, the second of which was launched after them."""
    launch = {"name": "cudaLaunchKernel", "duration": 1000, "thread": 1}
    return {
        "python_function": list(rows),
        "kernel": [{"name": "k", "start": at * PERIOD_NS, "duration": PERIOD_NS, "correlation": at} for at in (0, 9)],
        "cuda_runtime": [{**launch, "start": 9 * PERIOD_NS - 2000, "correlation": 9}],
    }


def context_of(*rows: dict[str, object]) -> Context:
    threads = target(threads={1: "MainThread", 2: "metrics"})
    return Context(trace(tables(*rows), length_ns=10 * PERIOD_NS, sample_period_ns=PERIOD_NS, target=threads))


@pytest.mark.parametrize(
    ("least_ns", "told"),
    [
        (TWO_NS - 1, {"one": ONE_NS, "two": TWO_NS}),
        (TWO_NS, {"one": ONE_NS}),
        (ONE_NS - 1, {"one": ONE_NS}),
        (ONE_NS, {"many": ONE_NS + TWO_NS}),
        (ONE_NS + TWO_NS - 1, {"many": ONE_NS + TWO_NS}),
        (ONE_NS + TWO_NS, {}),
    ],
)
def test_functions_with_little_time_are_one_finding_if_together_they_have_more(
    monkeypatch: pytest.MonkeyPatch, least_ns: int, told: dict[str, int]
) -> None:
    context = context_of(*stack_rows([MAIN, *[ONE] * 5, *[TWO] * 3, MAIN]))
    monkeypatch.setattr(idle_findings, "LEAST_OF_WINDOW", least_ns / (10 * PERIOD_NS))
    found = {finding.title.split(" in ")[1].split()[0]: finding.saving_ns for finding in host_functions(context)}
    assert found == told


def test_who_ran_while_the_training_thread_waited_for_the_gil_is_told() -> None:
    main: list[Sample] = [MAIN, *[(MAIN, "waiting")] * 8, MAIN]
    other = stack_rows([BUSY] * 10, thread=2)
    rows = stack_rows(main)
    other = [{**row, "parent": row["parent"] + len(rows) if row["parent"] >= 0 else -1} for row in other]
    context = context_of(*rows, *other)
    finding = next(each for each in host_functions(context) if each.name == "host_gil")
    assert finding.evidence.endswith(
        "; crunch (/job/metrics.py:42) in thread metrics ran in 100 % of that thread's samples"
    )


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


def test_the_native_code_around_a_function_that_it_calls_back_goes_with_it() -> None:
    found = told()
    assert list(found) == [FUNCTION]
    assert found[FUNCTION].saving_ns == pytest.approx(STEPS * 10_000 * US, rel=0.02)
    assert "in native code that main (/job/train.py:9) calls and that calls this function" in found[FUNCTION].evidence


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


S = 1_000_000_000


def counted(waited_s: float, **changed: Any) -> dict[str, Any]:
    """Three child processes over a second: two that ran for 0.25 s and waited so long for a CPU, and one that slept."""
    empty: dict[str, list[int]] = {name: [] for name in ("thread", "interval", "cpu_ns", "wait_ns", "switches")}
    events = ("thread", "voluntary_switches", "involuntary_switches", "minor_faults", "major_faults")
    given = {
        "times": [START_NS, START_NS + S],
        "rows": empty,
        "events": {name: [] for name in events},
        "lives": {name: [] for name in ("thread", "first_ns", "last_ns")},
        "process": {name: [0] for name in PROCESS},
        "children": {
            "pid": [50, 51, 52],
            "first_ns": [START_NS] * 3,
            "last_ns": [START_NS + S] * 3,
            "cpu_ns": [S // 4, S // 4, 0],
            "wait_ns": [int(waited_s * S)] * 2 + [0],
            "major_faults": [0] * 3,
            "read_bytes": [-1] * 3,
        },
        "child_names": ["a", "b", "c"],
        "host_cores": 16,
        "usable_cores": 1,
        "quota_cores": 0.0,
        "quota_group": "",
        "notes": [],
    }
    return {**given, **changed}


def found(name: str, waits: str, counters: dict[str, Any]) -> list[Finding]:
    """The findings of this name in a trace in which the GPU waits 100 us for this operator."""
    rows = {
        "kernel": [row("k", at, at + 50, correlation=at + 1) for at in (0, 150)],
        "cuda_runtime": [row("cudaLaunchKernel", 149, 150, correlation=151, thread=1)],
        "cpu_op": [row(waits, 40, 149, thread=1)],
    }
    made = trace(rows, length_ns=200 * US, target=target(kernel_counters=counters))
    return [finding for finding in findings(Context(made)).findings if finding.name == name]


def loading(counters: dict[str, Any]) -> list[Finding]:
    loader = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    return found("workers_without_cores", loader, counters)


@pytest.mark.parametrize(
    ("changed", "limit"),
    [
        ({}, "1 of the host's 16 cores (CPU affinity)"),
        (
            {"usable_cores": 16, "quota_cores": 1.5, "quota_group": "/job"},
            "1.5 cores, the CPU quota of the control group /job",
        ),
        ({"usable_cores": 16}, "the host's cores with other programs"),
    ],
)
def test_workers_that_wait_for_a_cpu_are_told_with_what_limits_them(changed: dict[str, Any], limit: str) -> None:
    (finding,) = loading(counted(0.75, **changed))
    assert finding.title == f"Worker processes wait for a CPU: 2 busy processes share {limit}"
    assert finding.saving_ns == 75 * 99 * US // 100
    assert "together, the processes used 0.5 cores, and waited for a CPU for 75 %" in finding.evidence


def test_workers_that_have_their_cores_are_no_finding() -> None:
    assert loading(counted(0.05)) == []


def test_a_trace_without_the_kernels_counters_tells_nothing_of_them() -> None:
    assert loading({}) == []


def launching(waited: int, **changed: Any) -> list[Finding]:
    """Of a host whose launching thread ran for 0.4 s of a second."""
    counters = counted(0.0)
    counters["rows"] = {
        "interval": [0, 0], "thread": [1, 2], "cpu_ns": [4 * S // 10, 0], "wait_ns": [waited, S], "switches": [9, 9],
    }  # fmt: skip
    return found("host_without_cores", "aten::slow", {**counters, **changed})


def test_a_thread_that_launches_work_and_has_no_cpu_is_told() -> None:
    (finding,) = launching(4 * S // 10)
    assert finding.title == (
        "The threads that launch work wait for a CPU: they share 1 of the host's 16 cores (CPU affinity)"
    )
    assert finding.saving_ns == 149 * US // 2  # until the launch
    assert finding.evidence == "they had no CPU for 50 % of the time in which they could have run"


def test_who_takes_the_cpu_from_a_thread_that_launches_work_is_evidence() -> None:
    busy = {name: [0] for name in PROCESS} | {"cpu_ns": [4 * S // 10], "host_busy_ns": [15 * S]}
    neighbours = {"neighbours": {"pid": [70], "cpu_ns": [12 * S]}, "neighbour_names": ["cc"]}
    (finding,) = launching(4 * S // 10, usable_cores=16, process=busy, **neighbours)
    assert finding.evidence.endswith("; other processes used 14.1 of the host's 16 cores (cc 12.0)")


def test_a_thread_that_has_its_cpu_is_not_told_for_what_others_wait() -> None:
    assert launching(S // 100) == []
