"""What is found of threads that share the GIL or the processors, and of the garbage collector."""

from kineto_trace.analysis.host_findings.threads import garbage, gil, processors
from kineto_trace.analysis.host_findings.user_code import user_code
from support.trace_files.sampled_stacks import FORWARD, MAIN, PERIOD_NS, THREAD, sampled


def test_a_thread_that_holds_the_gil_is_named() -> None:
    others = [("/job/metrics.py(5): crunch",)] * 100
    context = sampled([*[FORWARD] * 70, *[((*MAIN,), "waiting")] * 30], others=others, threads={2: "metrics"})
    (finding,) = gil(context)
    assert finding.title == (
        "The training thread waits for Python's lock (GIL), which crunch (/job/metrics.py:42) in thread metrics holds"
    )
    assert finding.saving_ns == 30 * PERIOD_NS


def test_nobody_waits_for_the_gil() -> None:
    assert list(gil(sampled([FORWARD] * 100))) == []


def test_the_garbage_collector_is_named_with_the_line_at_which_it_runs_most() -> None:
    after = (*MAIN, "/job/callbacks.py(7): after_step")
    collecting = [*[(after, "running collecting")] * 25, *[(FORWARD, "running collecting")] * 5]
    context = sampled([*[FORWARD] * 60, *[after] * 10, *collecting])
    (finding,) = garbage(context)
    assert finding.title == ("Python's garbage collector runs in the steps, most in after_step (/job/callbacks.py:42)")
    assert finding.saving_ns == 30 * PERIOD_NS
    assert "gc.freeze()" in finding.advice
    taken = next(found for found in user_code(context) if "after_step" in found.title)
    assert taken.saving_ns == 10 * PERIOD_NS  # what the collector took is told once


def test_a_trace_without_collections_tells_of_none() -> None:
    assert list(garbage(sampled([FORWARD] * 100))) == []


def use(thread: int, running: int, cpu_share: float) -> dict[str, int]:
    values = {"thread": thread, "samples": 100, "python": 100, "waiting": 0, "has_gil": 0}
    return {**values, "running": running, "idle": 100 - running, "cpu_ns": int(cpu_share * 100 * PERIOD_NS)}


def test_a_thread_that_is_ready_but_has_half_a_processor_is_found() -> None:
    context = sampled([FORWARD] * 100, thread_use=[use(THREAD, 100, 0.5), use(3, 100, 0.5)], threads={1: "MainThread"})
    (finding,) = processors(context)
    assert finding.title == "The training thread is ready to run but has no CPU: 2 busy threads on 1.0 cores"
    assert round(finding.saving_ns / PERIOD_NS) == 50
    assert "torch.set_num_threads" in finding.advice


def test_a_thread_that_has_the_processor_whenever_it_is_ready_is_no_finding() -> None:
    assert list(processors(sampled([FORWARD] * 100, thread_use=[use(THREAD, 80, 0.78)]))) == []
