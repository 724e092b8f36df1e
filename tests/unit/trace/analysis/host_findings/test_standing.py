"""Of a program that stands still it is said where, and what it waits for; and nothing else."""

from collections.abc import Sequence
from typing import Any

import pytest
from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.findings.common_findings import common_findings
from kineto_trace.analysis.findings.finding_views import findings, findings_view
from kineto_trace.analysis.host_findings.standing import standing
from kineto_trace.model.context import Context
from kineto_trace.structure.call_forests import SEPARATOR
from support.trace_files.cause_checks import wrong
from support.trace_files.sampled_stacks import MAIN, SITE, TORCH, Sample, Stack, sampled_trace

PYTHON = "/usr/lib/python3.12/"
LOCK: Sample = (MAIN, "idle idle_lock")
CASES: list[tuple[Stack, str, str]] = [
    ((), "idle idle_lock", "waits for a lock"),
    ((), "idle idle_poll", "waits for events"),
    ((), "idle", "waits"),
    ((), "idle in os.read", "waits in os.read()"),
    ((), "idle idle_lock in held.acquire", "waits for a lock (held.acquire)"),
    ((), "waiting", "waits for the GIL"),
    ((PYTHON + "subprocess.py(2014): Popen._wait",), "idle idle_child", "waits for a child process"),
    ((TORCH + "distributed/distributed_c10d.py(3155): all_reduce",), "idle idle_lock", "waits in all_reduce"),
    ((SITE + "somewhere/pool.py(5): get",), "idle idle_io", "waits for a file, a pipe or the network"),
    ((), "running in loss.item", "waits for the GPU (loss.item)"),
]


def trace_of(samples: Sequence[Sample], **values: Any) -> Context:
    """The context of a trace of the main thread without steps."""
    return Context(sampled_trace(samples, **{"steps": 0, "pid": 1, **values}))


def told(samples: Sequence[Sample], **values: Any) -> list[Finding]:
    return list(standing(trace_of(samples, **values)))


@pytest.mark.parametrize(("inside", "state", "words"), CASES)
def test_what_the_main_thread_waits_for_is_told_with_the_program_s_line(inside: Stack, state: str, words: str) -> None:
    stack = (*MAIN, *inside)
    (finding,) = told([(stack, state)] * 50)
    line = 10 if inside else 42
    assert finding.title == f"Nothing moved: the main thread {words} in main (train.py:{line})"
    assert finding.evidence.startswith("all samples of the main thread in 500 ms are at this line")
    assert "`kinetoctl stacks 1`" in finding.advice
    assert (finding.saving_ns, finding.guess) == (0, False)


def test_a_few_samples_elsewhere_do_not_count_and_more_do() -> None:
    elsewhere: Sample = ((*MAIN, "/job/train.py(3): log"), "idle")
    (finding,) = told([LOCK] * 97 + [elsewhere] * 3)
    assert finding.evidence.startswith("97 of 100 samples of the main thread")
    assert not told([LOCK] * 90 + [elsewhere] * 10)


@pytest.mark.parametrize(
    "values",
    [
        {"steps": 2},
        {"ops": [{"start": 0, "duration": 1000, "name": "aten::add", "thread": 1}]},
        {"others": [("/job/other.py(1): works",)] * 50},
    ],
    ids=["steps", "operators", "another thread"],
)
def test_where_something_moves_nothing_is_said(values: dict[str, Any]) -> None:
    assert told([LOCK] * 50)
    assert not told([LOCK] * 50, **values)


def test_threads_that_wait_as_well_and_a_thread_that_runs_all_the_time_are_told_apart() -> None:
    assert told([LOCK] * 50, others=[(("/job/other.py(1): rests",), "idle")] * 50)
    assert not told([MAIN] * 50)  # one line of C code, such as a decomposition of a large matrix
    assert not told([LOCK] * 10)  # too few


def test_no_other_finding_stands_beside_it_and_it_promises_nothing() -> None:
    context = trace_of([((*MAIN, PYTHON + "queue.py(154): Queue.get"), "idle idle_lock")] * 50)
    assert [finding.name for finding in context.get(findings).findings] == ["stands_still"]
    assert wrong(context) == []
    (row,) = findings_view(context).rows()
    assert (row["saving_us"], row["saving_pct"], row["saving_per_step_us"]) == (None, None, None)
    assert row["where"] == "main (/job/train.py:10)"
    assert row["call_stack"].split(SEPARATOR)[0].endswith("Queue.get")


def test_it_comes_first_among_the_findings_of_a_job() -> None:
    hangs, loads = trace_of([LOCK] * 50), trace_of([MAIN] * 50, steps=5)
    assert loads.get(findings).findings
    ranks = [(rank, findings_view.partial(context)) for rank, context in enumerate([loads, hangs])]
    assert common_findings(findings_view.combine(ranks), 2).rows()[0]["finding"] == "stands_still"
