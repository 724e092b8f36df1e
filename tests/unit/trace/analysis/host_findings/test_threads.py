"""What is found of threads that share the GIL or the processors, and of the garbage collector."""

from typing import Any

import numpy as np
from kineto_trace.analysis.host_findings.threads import garbage, gil, paging, processors
from kineto_trace.analysis.host_findings.user_code import user_code
from kineto_trace.model.kernel_counters import PROCESS, KernelCounters
from support.trace_files.sampled_stacks import BACKWARD, FORWARD, MAIN, PERIOD_NS, THREAD, Sample, sampled
from support.trace_files.traces import START_NS


def test_a_thread_that_holds_the_gil_is_named() -> None:
    others = [("/job/metrics.py(5): crunch",)] * 100
    context = sampled([*[FORWARD] * 70, *[((*MAIN,), "waiting")] * 30], others=others, threads={2: "metrics"})
    (finding,) = gil(context)
    assert finding.title == (
        "The training thread waits for Python's lock (GIL), which crunch (/job/metrics.py:42) in thread metrics holds"
    )
    assert finding.saving_ns == 30 * PERIOD_NS


def test_the_loader_s_thread_that_pins_memory_cannot_be_moved_to_a_process() -> None:
    others = [("/venv/torch/utils/data/_utils/pin_memory.py(18): _pin_memory_loop",)] * 100
    context = sampled([*[FORWARD] * 70, *[((*MAIN,), "waiting")] * 30], others=others, threads={2: "pin"})
    (finding,) = gil(context)
    assert finding.advice.startswith("This thread of the DataLoader copies batches into pinned memory")


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


CHILDREN = ("pid", "first_ns", "last_ns", "cpu_ns", "wait_ns", "major_faults", "read_bytes")
BACKWARDS: list[Sample] = [(*MAIN, BACKWARD)] * 60
PAGING: list[Sample] = [
    *BACKWARDS,
    *[((*MAIN, BACKWARD), "idle idle_memory")] * 30,
    *[((*MAIN, BACKWARD), "idle idle_lock")] * 10,
]


def counted(major_faults: int, cpu_share: float = 0.0) -> dict[str, Any]:
    """What the kernel counted, of the training thread alone, which waited for no CPU."""
    one = np.array([1])
    found = KernelCounters(
        times=np.array([START_NS, START_NS + 100 * PERIOD_NS]),
        rows={
            "interval": one * 0, "thread": one * THREAD, "cpu_ns": one * int(cpu_share * 100 * PERIOD_NS),
            "wait_ns": one * 0, "switches": one,
        },
        events={
            "thread": one * THREAD, "voluntary_switches": one, "involuntary_switches": one, "minor_faults": one,
            "major_faults": one * major_faults,
        },
        lives=dict.fromkeys(("thread", "first_ns", "last_ns"), one[:0]),
        process=dict.fromkeys(PROCESS, one),
        children=dict.fromkeys(CHILDREN, one[:0]),
        child_names=(),
    )  # fmt: skip
    return found.to_json()


def test_memory_that_comes_from_storage_while_the_model_trains_is_found() -> None:
    (finding,) = paging(sampled(PAGING, kernel_counters=counted(4000)))
    assert finding.title == "The training thread waits for memory from storage, most in main (/job/train.py:42)"
    assert finding.saving_ns == 30 * PERIOD_NS
    assert finding.evidence.endswith("; 4,000 of its page faults waited for storage")
    assert "swap" in finding.advice


def test_without_the_kernels_counters_the_samples_tell() -> None:
    (finding,) = paging(sampled(PAGING))
    assert finding.saving_ns == 30 * PERIOD_NS


def test_a_wait_for_another_threads_mappings_is_not_for_storage() -> None:
    assert list(paging(sampled(PAGING, kernel_counters=counted(3)))) == []


def test_many_faults_that_samples_do_not_see_are_told_by_the_kernels_counters() -> None:
    """The thread seems to run in all samples, and the kernel says that it was blocked for 30 % of the time."""
    context = sampled([FORWARD] * 100, thread_use=[use(THREAD, 100, 0.7)], kernel_counters=counted(3000, 0.7))
    (finding,) = paging(context)
    assert finding.title == "The training thread waits for memory from storage"
    assert round(finding.saving_ns / PERIOD_NS) == 30
    assert list(processors(context)) == []  # it was not ready to run


def test_a_block_that_page_faults_cannot_explain_is_none_of_theirs() -> None:
    context = sampled([FORWARD] * 100, thread_use=[use(THREAD, 100, 0.7)], kernel_counters=counted(10, 0.7))
    assert list(paging(context)) == []
    assert len(list(processors(context))) == 1


def test_memory_that_other_code_waits_for_is_told_of_that_code_alone() -> None:
    after = (*MAIN, "/job/callbacks.py(7): look_up")
    context = sampled([*[FORWARD] * 70, *[(after, "idle idle_memory")] * 30])
    assert list(paging(context)) == []
    (finding,) = user_code(context)
    assert finding.title == "look_up (callbacks.py:42) waits for memory from storage"
    assert "swap" in finding.advice


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
