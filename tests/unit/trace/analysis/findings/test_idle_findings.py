"""Findings of idle GPUs, in traces whose samples come every 10 ms."""

from kineto_trace.analysis.findings.idle_findings import host_functions
from kineto_trace.model.context import Context
from support.trace_files.sampled_stacks import MAIN, PERIOD_NS, Sample, stack_rows
from support.trace_files.traces import target, trace

BUSY = ("/job/train.py(1): <module>", "/job/metrics.py(7): crunch")


def test_who_ran_while_the_training_thread_waited_for_the_gil_is_told() -> None:
    main: list[Sample] = [MAIN, *[(MAIN, "waiting")] * 8, MAIN]
    other = stack_rows([BUSY] * 10, thread=2)
    rows = stack_rows(main)
    other = [{**row, "parent": row["parent"] + len(rows) if row["parent"] >= 0 else -1} for row in other]
    launch = {"name": "cudaLaunchKernel", "duration": 1000, "thread": 1}
    tables = {
        "python_function": [*rows, *other],
        "kernel": [{"name": "k", "start": at * PERIOD_NS, "duration": PERIOD_NS, "correlation": at} for at in (0, 9)],
        "cuda_runtime": [{**launch, "start": 9 * PERIOD_NS - 2000, "correlation": 9}],
    }
    context = Context(
        trace(
            tables,
            length_ns=10 * PERIOD_NS,
            sample_period_ns=PERIOD_NS,
            target=target(threads={1: "MainThread", 2: "metrics"}),
        )
    )
    finding = next(each for each in host_functions(context) if each.name == "host_gil")
    assert finding.evidence.endswith(
        "; crunch (/job/metrics.py:42) in thread metrics ran in 100 % of the samples of its thread"
    )
