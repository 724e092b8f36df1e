"""Phases of steps, hot lines and loading, on the host."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kineto_trace.analysis.cause_views import host_causes
from kineto_trace.analysis.host_findings.threads import per_step
from kineto_trace.analysis.host_time.moment_classes import MomentClass, moment_classes
from kineto_trace.analysis.host_time.step_phase_views import data_loading, hot_lines, step_phase_times
from kineto_trace.analysis.host_time.user_calls import MAX_MOMENTS, moments
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Table
from support.trace_files.sampled_stacks import (
    BACKWARD,
    FORWARD,
    LOADER,
    MAIN,
    OPTIMIZER,
    Sample,
    sampled,
    sampled_trace,
)
from support.trace_files.traces import trace

MS = 1_000_000


def op(name: str, start_ms: int, end_ms: int, **values: int) -> dict[str, Any]:
    return {"name": name, "start": start_ms * MS, "duration": (end_ms - start_ms) * MS, "thread": 1, **values}


OPS = [
    op("aten::linear", 20, 50, sequence=7, torch_thread=1),
    op("aten::item", 55, 60),
    op("autograd::engine::evaluate_function: LinearBackward0", 60, 80, sequence=7, forward_thread=1),
]
ANNOTATIONS = [
    op("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 10),
    op("Optimizer.step#SGD.step", 80, 90),
]


def test_the_parts_of_a_step_sum_to_its_length() -> None:
    context = sampled([FORWARD] * 10, ops=OPS, annotations=ANNOTATIONS)
    step, average = step_phase_times(context).rows()
    parts = ("total", "loading", "forward", "backward", "optimizer", "other")
    assert [step[f"{name}_us"] / 1000 for name in parts] == [100, 10, 30, 20, 10, 30]
    assert (step["step"], average["step"], average["other_pct"]) == ("0", "average", 30.0)


def test_an_optimizers_closure_is_no_part_of_the_optimizer() -> None:
    closure = [op("Optimizer.zero_grad#LBFGS.zero_grad", 16, 18), op("Optimizer.step#LBFGS.step", 15, 90)]
    (step, _) = step_phase_times(sampled([FORWARD] * 10, ops=OPS, annotations=closure)).rows()
    assert [step[f"{name}_us"] / 1000 for name in ("forward", "backward", "optimizer", "other")] == [30, 20, 12, 38]


def test_a_closure_lasts_as_long_as_its_python_functions() -> None:
    samples: list[Sample] = [MAIN] * 2
    samples += [(*MAIN, OPTIMIZER, "/job/train.py(30): main.<locals>.closure")] * 5
    samples += [(*MAIN, OPTIMIZER)] * 2
    step_annotation = [op("Optimizer.step#LBFGS.step", 15, 90)]
    (step, _) = step_phase_times(sampled([*samples, MAIN], ops=OPS, annotations=step_annotation)).rows()
    assert [step[f"{name}_us"] / 1000 for name in ("forward", "backward", "optimizer", "other")] == [30, 20, 15, 35]


def test_the_samples_of_an_optimizer_are_not_stretched_over_its_closure() -> None:
    closure = (*MAIN, OPTIMIZER, "/job/train.py(30): main.<locals>.closure", BACKWARD)
    annotation = [op("Optimizer.step#LBFGS.step", 60, 100)]
    found = sampled([*[MAIN] * 6, *[closure] * 2, *[(*MAIN, OPTIMIZER)] * 2], annotations=annotation).get(
        moment_classes
    )
    assert found.weight[found.kind == MomentClass.OPTIMIZER].sum() == 20 * MS


def test_exact_calls_count_only_as_far_as_they_lie_in_the_steps() -> None:
    call = {"name": "/job/a.py(3): log", "start": 0, "duration": 190_000, "thread": 1, "parent": -1, "lines": -1}
    step = {"name": "ProfilerStep#1", "start": 60_000, "duration": 80_000, "thread": 1, "finished": 1, "inputs": -1}
    (row,) = hot_lines(Context(trace({"python_function": [call], "user_annotation": [step]}))).rows()
    assert (row["time_us"], row["share_pct"]) == (80, 100)


@pytest.mark.slow
def test_a_slice_that_claims_any_number_of_samples_takes_its_share_and_no_more_memory() -> None:
    whole = sampled_trace([FORWARD] * 9 + [(*MAIN, "/job/a.py(3): log")])
    table = whole.table("python_function")
    many = Table(table.kind, {**table.columns, "self_samples": table["self_samples"] * 200_000_000})
    context = Context(replace(whole, tables={**whole.tables, "python_function": many}))
    assert [round(row["share_pct"]) for row in hot_lines(context).rows()] == [90, 10]
    assert len(context.get(moments)) <= MAX_MOMENTS


def test_a_slice_that_claims_a_negative_number_of_samples_has_none() -> None:
    whole = sampled_trace([FORWARD] * 9 + [(*MAIN, "/job/a.py(3): log")])
    table = whole.table("python_function")
    odd = {name: np.where(np.arange(len(table)) == 3, -7, table[name]) for name in ("self_samples", "idle")}
    context = Context(
        replace(whole, tables={**whole.tables, "python_function": Table(table.kind, {**table.columns, **odd})})
    )
    assert [(row["moments"], row["idle_pct"]) for row in hot_lines(context).rows()] == [(8, 0), (1, 0)]


def test_steps_that_the_recording_cut_off_are_left_out() -> None:
    whole = sampled_trace([FORWARD] * 10, steps=5)
    marks = whole.table("user_annotation")
    cut = Table(marks.kind, {**marks.columns, "finished": np.array([1, 1, 1, 1, 0], np.uint8)})
    context = Context(replace(whole, tables={**whole.tables, "user_annotation": cut}))
    assert [row["step"] for row in step_phase_times(context).rows()] == ["0", "1", "2", "3", "average"]


def test_where_no_step_is_complete_no_time_is_that_of_a_step() -> None:
    whole = sampled_trace([FORWARD] * 10, steps=1)
    marks = whole.table("user_annotation")
    cut = Table(marks.kind, {**marks.columns, "finished": np.zeros(1, np.uint8)})
    context = Context(replace(whole, tables={**whole.tables, "user_annotation": cut}))
    causes, lines = host_causes(context), hot_lines(context).rows()
    assert (causes.steps, len(causes.causes) > 0, [row["per_step_us"] for row in lines]) == (0, True, [None])
    assert per_step(context, 50 * MS).endswith("% of the incomplete steps)")


def test_a_trace_without_steps_counts_as_one() -> None:
    result = step_phase_times(Context(trace({"cpu_op": OPS}, length_ns=100 * MS)))
    assert [row["step"] for row in result.rows()] == ["all", "average"]
    assert result.notes == ("the trace has no training steps: the whole trace counts as one",)


def test_hot_lines_are_the_programs_own_with_what_they_call() -> None:
    samples: list[Sample] = [*[(*MAIN, BACKWARD)] * 6, *[((*MAIN, "/job/a.py(3): log"), "idle")] * 4]
    first, second = hot_lines(sampled(samples)).rows()
    assert (first["function"], first["line"], first["calls"], first["part"]) == (
        "main",
        42,
        "Tensor.backward",
        "backward",
    )
    assert (second["function"], second["file"], second["part"]) == ("log", "/job/a.py", "other")
    assert (second["time_us"], second["share_pct"], second["idle_pct"]) == (40_000, 40.0, 100.0)


def test_hot_lines_name_the_c_function_that_a_line_calls() -> None:
    work = (*MAIN, "/job/a.py(3): work")
    samples: list[Sample] = [
        *[FORWARD] * 4,
        *[(work, "running in pickle.dumps")] * 3,
        (work, "running in .tolist"),
        work,
    ]
    rows = [(row["calls"], row["moments"]) for row in hot_lines(sampled(samples)).rows() if row["function"] == "work"]
    assert rows == [("pickle.dumps", 3), (".tolist", 1), (None, 1)]


def test_hot_lines_without_python_say_what_to_record() -> None:
    result = hot_lines(Context(trace({"cpu_op": OPS}, length_ns=100 * MS)))
    assert (len(result), result.notes) == (
        0, ("the trace has no Python functions of the training thread: record with --with-stack",)
    )  # fmt: skip


def test_loading_is_told_by_what_the_training_thread_does_for_it() -> None:
    samples: list[Sample] = [*[FORWARD] * 6, *[((*MAIN, LOADER, "/job/a.py(3): Images.__getitem__"), "idle")] * 4]
    every, read = data_loading(sampled(samples, steps=2)).rows()
    assert (every["what"], every["time_us"], every["per_step_us"]) == ("all", 40_000, 20_000)
    assert (read["what"], read["function"], read["share_pct"]) == (
        "in the training process",
        "Images.__getitem__",
        40.0,
    )


def test_loading_without_a_loader_is_zero_and_says_so() -> None:
    result = data_loading(sampled([FORWARD] * 6))
    assert [row["time_us"] for row in result.rows()] == [0.0]
    assert result.notes == ("torch's DataLoader was not seen in the steps",)
