"""Many small kernels in the place of few."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kineto_trace.analysis.findings.small_kernel_findings import (
    LEFT,
    MANY,
    OPTIMIZER_PASSES,
    optimizer_kernels,
    small_kernels,
    small_kernels_of_functions,
)
from kineto_trace.analysis.replay.step_replay import step_replay
from kineto_trace.model.context import Context
from support.trace_files.sampled_stacks import FORWARD, MAIN, OPTIMIZER, PERIOD_NS, Sample, stack_rows
from support.trace_files.simulated.host_and_gpu import LAUNCH, US, Program
from support.trace_files.traces import target, trace

STEPS = 5
LOOP = (*MAIN, "/job/loss.py(7): boxes")


def looping(count: int, kernel: int, *, stack: Sample = LOOP, name: str = "k", devices: int = 1) -> Context:
    """Steps of a sample in forward, which launches a large kernel, and one in `stack`, which launches many."""
    program, samples, updates = Program(), list[Sample](), list[dict[str, Any]]()
    for _ in range(STEPS):
        begin = program.now
        samples += [FORWARD, stack]
        program.operator("aten::linear", PERIOD_NS - 10 * US)
        program.host(PERIOD_NS // 10)
        program.launch(PERIOD_NS // 2)
        program.now = begin + PERIOD_NS
        for _ in range(count):
            program.operator("aten::add", 8 * US)
            program.host(US)
            program.launch(kernel)
            program.rows["kernel"][-1]["name"] = name
            program.host(10 * US)
        program.rows["kernel"][-1]["device"] = devices - 1
        if stack is STEP:
            updates.append({"name": "Optimizer.step#AdamW.step", "start": begin + PERIOD_NS, "duration": PERIOD_NS})
        program.now = begin + 2 * PERIOD_NS
        program.step(begin)
    rows = {kind: found for kind, found in program.rows.items() if found}
    common = {"thread": 1, "finished": 1, "inputs": -1, "scope": 7}
    rows["user_annotation"] += [{**common, **row, "id": 20_000 + number} for number, row in enumerate(updates)]
    rows["python_function"] = stack_rows(samples)
    return Context(trace(rows, length_ns=program.now + 1, sample_period_ns=PERIOD_NS, target=target()))


def test_a_function_that_launches_many_small_kernels_is_found() -> None:
    context = looping(200, 4 * US)
    found = context.get(small_kernels)
    assert found is not None
    assert context.trace.strings[found.function] == LOOP[-1]
    assert int(np.count_nonzero(found.work)) == 200 * STEPS
    (finding,) = small_kernels_of_functions(context)
    assert finding.title == "boxes (loss.py:7) launches 200 small kernels in each step"
    assert finding.where == "boxes (/job/loss.py:7)"
    assert finding.replayed
    # all of them, their launches and the host's time before them
    assert finding.saving_ns == pytest.approx((1 - LEFT) * STEPS * 200 * (11 * US + LAUNCH), rel=0.05)


@pytest.mark.parametrize(("count", "kernel"), [(MANY - 1, 4 * US), (200, 9 * US)], ids=["too few", "too large"])
def test_few_or_large_kernels_are_no_finding(count: int, kernel: int) -> None:
    context = looping(count, kernel)
    assert context.get(small_kernels) is None
    assert list(small_kernels_of_functions(context)) == []


def test_small_kernels_that_are_most_of_the_work_are_the_model() -> None:
    context = looping(200, 4 * US)
    took = context.trace.table("kernel")["duration"]
    took[took > PERIOD_NS // 4] = 100 * US
    assert context.get(small_kernels) is None


def test_the_hosts_time_before_the_first_of_them_is_not_theirs() -> None:
    first = looping(200, 4 * US)  # 9 ms after the launch before it
    (finding,) = small_kernels_of_functions(first)
    assert finding.saving_ns < STEPS * (200 * (11 * US + LAUNCH) + PERIOD_NS // 10)


def test_what_many_small_kernels_cost_is_told_only_where_the_steps_run_again() -> None:
    context = looping(200, 4 * US, devices=2)
    assert context.get(step_replay) is None
    assert list(small_kernels_of_functions(context)) == []


def test_a_trace_without_steps_has_no_number_of_kernels_for_each() -> None:
    context = looping(200, 4 * US)
    tables = {kind: table for kind, table in context.trace.tables.items() if kind != "user_annotation"}
    assert Context(replace(context.trace, tables=tables)).get(small_kernels) is None


STEP = (*MAIN, OPTIMIZER)


def test_an_optimizer_that_updates_parameters_one_by_one_is_found() -> None:
    context = looping(200, 4 * US, stack=STEP)
    (finding,) = optimizer_kernels(context)
    assert finding.name == "unfused_optimizer"
    assert finding.replayed
    assert finding.evidence.startswith("200 kernels in each step")
    assert 0 < finding.saving_ns <= (1 - OPTIMIZER_PASSES) * STEPS * 2 * PERIOD_NS
    assert context.get(small_kernels) is None  # they are the optimizer's alone


def test_a_fused_optimizer_is_no_finding() -> None:
    assert list(optimizer_kernels(looping(200, 4 * US, stack=STEP, name="multi_tensor_apply_kernel"))) == []


def test_an_optimizer_with_few_kernels_is_no_finding() -> None:
    assert list(optimizer_kernels(looping(MANY - 1, 4 * US, stack=STEP))) == []
