"""What is said of worker processes while the GPU waits for the next batch."""

from typing import Any

import pytest
from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.findings.finding_views import findings
from kineto_trace.model.context import Context
from kineto_trace.model.kernel_counters import PROCESS
from support.trace_files.traces import START_NS, target, trace

US, S = 1000, 1_000_000_000


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


def found(counters: dict[str, Any]) -> list[Finding]:
    """Of a trace in which the GPU waits 100 us for a batch."""
    rows = {
        "kernel": [{"name": "k", "start": at * US, "duration": 50 * US, "correlation": at + 1} for at in (0, 150)],
        "cuda_runtime": [
            {"name": "cudaLaunchKernel", "start": 149 * US, "duration": US, "correlation": 151, "thread": 1}
        ],
        "cpu_op": [
            {
                "name": "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__",
                "start": 40 * US,
                "duration": 109 * US,
                "thread": 1,
            }
        ],
    }
    made = trace(rows, length_ns=200 * US, target=target(kernel_counters=counters))
    return [finding for finding in findings(Context(made)).findings if finding.name == "workers_without_cores"]


@pytest.mark.parametrize(
    ("changed", "limit"),
    [
        ({}, "1 of the host's 16 cores, which is all that this process may use"),
        (
            {"usable_cores": 16, "quota_cores": 1.5, "quota_group": "/job"},
            "1.5 cores, the CPU quota of the control group /job",
        ),
        ({"usable_cores": 16}, "the host's cores, which other programs use, too"),
    ],
)
def test_workers_that_wait_for_a_cpu_are_told_with_what_limits_them(changed: dict[str, Any], limit: str) -> None:
    (finding,) = found(counted(0.75, **changed))
    assert finding.title == f"Worker processes wait for a CPU: 2 busy processes share {limit}"
    assert finding.saving_ns == 75 * 99 * US // 100
    assert "0.5 cores together, and in 75 %" in finding.evidence


def test_workers_that_have_their_cores_are_no_finding() -> None:
    assert found(counted(0.05)) == []


def test_a_trace_without_the_kernels_counters_tells_nothing_of_them() -> None:
    assert found({}) == []


def launching(waited: int, **changed: Any) -> list[Finding]:
    """Of a trace in which the GPU waits for a host whose launching thread ran for 0.4 s of a second."""
    rows = {
        "kernel": [{"name": "k", "start": at * US, "duration": 50 * US, "correlation": at + 1} for at in (0, 150)],
        "cuda_runtime": [
            {"name": "cudaLaunchKernel", "start": 149 * US, "duration": US, "correlation": 151, "thread": 1}
        ],
        "cpu_op": [{"name": "aten::slow", "start": 40 * US, "duration": 109 * US, "thread": 1}],
    }
    counters = counted(0.0)
    counters["rows"] = {
        "interval": [0, 0], "thread": [1, 2], "cpu_ns": [4 * S // 10, 0], "wait_ns": [waited, S], "switches": [9, 9],
    }  # fmt: skip
    made = trace(rows, length_ns=200 * US, target=target(kernel_counters={**counters, **changed}))
    return [finding for finding in findings(Context(made)).findings if finding.name == "host_without_cores"]


def test_a_thread_that_launches_work_and_has_no_cpu_is_told() -> None:
    (finding,) = launching(4 * S // 10)
    assert finding.title == (
        "The threads that launch work wait for a CPU: "
        "they share 1 of the host's 16 cores, which is all that this process may use"
    )
    assert finding.saving_ns == 149 * US // 2  # until the launch
    assert finding.evidence == "in 50 % of the time in which they could have run they had no CPU"


def test_a_thread_that_has_its_cpu_is_not_told_for_what_others_wait() -> None:
    assert launching(S // 100) == []
