"""Which time of the training thread belongs to a function: by votes of samples, as exactly as the operators."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kineto_trace.analysis.host_time.framework_calls import framework_calls
from kineto_trace.analysis.replay.function_slots import FunctionSlots, function_slots
from kineto_trace.arrays.intervals import Union
from kineto_trace.model.context import Context
from support.trace_files.sampled_stacks import MAIN, PERIOD_NS, Sample, sampled, sampled_trace
from support.trace_files.traces import START_NS

CROP, BLUR = (*MAIN, "/job/a.py(1): crop"), (*MAIN, "/job/b.py(2): blur")


def operator(name: str, start: float, end: float, thread: int = 1) -> dict[str, Any]:
    """An operator from one sample to another."""
    span = {"start": int(start * PERIOD_NS), "duration": int((end - start) * PERIOD_NS)}
    return {"name": name, **span, "thread": thread}


def of_function(context: Context, name: str) -> list[tuple[float, float]]:
    """The time of a function, from which sample to which."""
    tree = context.get(framework_calls)
    names = np.array([context.trace.strings[number] == name for number in tree.name.tolist()], np.bool_)
    return spans(context.get(function_slots).of(names))


def spans(found: Union) -> list[tuple[float, float]]:
    edges = zip(found.start.tolist(), found.end.tolist(), strict=True)
    return [((low - START_NS) / PERIOD_NS, (high - START_NS) / PERIOD_NS) for low, high in edges]


def test_a_sample_in_one_step_tells_the_function_in_every_step() -> None:
    ops = [operator(name, 4 * step + at, 4 * step + at + 1) for step in range(3) for at, name in enumerate("abcd")]
    samples: list[Sample] = [MAIN, CROP, MAIN, MAIN, MAIN, CROP, MAIN, MAIN, *[MAIN] * 4]  # none in the last step
    assert of_function(sampled(samples, steps=3, ops=ops), CROP[-1]) == [(1, 2), (5, 6), (9, 10)]


def test_operators_that_repeat_within_a_step_are_told_apart_by_their_order() -> None:
    ops = [operator("a", 4 * step + at, 4 * step + at + 1) for step in range(3) for at in range(4)]
    context = sampled([MAIN, MAIN, CROP, MAIN] * 3, steps=3, ops=ops)
    assert of_function(context, CROP[-1]) == [(2, 3), (6, 7), (10, 11)]


def test_steps_may_have_different_numbers_of_operators() -> None:
    ops = [operator("a", 0, 1), operator("b", 1, 2), operator("c", 2, 3)]  # the second step has no b
    ops += [operator("a", 4, 5), operator("c", 6, 7)]
    ops += [operator("a", 8, 9), operator("b", 9, 10), operator("c", 10, 11)]
    context = sampled([MAIN, CROP, BLUR, MAIN] * 3, steps=3, ops=ops)
    assert of_function(context, BLUR[-1])[0] == (2, 3)
    assert all(high > low for low, high in of_function(context, CROP[-1]))


def test_operators_of_other_threads_are_no_slots() -> None:
    ops = [operator("a", 0, 4), operator("x", 1, 2, thread=2)]
    found = sampled([MAIN] * 4, ops=ops).get(function_slots)
    assert len(found.start) == 2  # the operator, and the time before it


def test_inner_operators_are_no_slots() -> None:
    found = sampled([MAIN] * 4, ops=[operator("a", 0, 4), operator("b", 1, 2)]).get(function_slots)
    assert len(found.start) == 2


def test_without_operators_a_function_has_no_slots() -> None:
    context = sampled([MAIN, CROP, MAIN, MAIN])
    assert of_function(context, CROP[-1]) == []


def test_without_samples_there_are_slots_but_nobody_has_them() -> None:
    trace = sampled_trace([MAIN] * 4, ops=[operator("a", 0, 4)])
    tables = {kind: table for kind, table in trace.tables.items() if kind != "python_function"}
    found = Context(replace(trace, tables=tables)).get(function_slots)
    assert (len(found.start), len(found.sampled)) == (2, 0)
    assert spans(found.of(np.ones(0, np.bool_))) == []


def slots(sampled_places: Sequence[int], nodes: Sequence[int], count: int = 8) -> FunctionSlots:
    """Slots of one unit each, with these samples."""
    start = np.arange(count, dtype=np.int64)
    places, node = (np.array(values, np.int64) for values in (sampled_places, nodes))
    return FunctionSlots(start, start + 1, start, places, node, start.astype(float))


def chosen(found: FunctionSlots, node: int) -> list[tuple[int, int]]:
    part = found.of(np.arange(4) == node)
    return list(zip(part.start.tolist(), part.end.tolist(), strict=True))


def test_a_slot_without_a_sample_is_like_the_nearest_one_that_has_some() -> None:
    found = slots([1, 5], [0, 1])
    assert chosen(found, 0) == [(0, 3)]
    assert chosen(found, 1) == [(3, 8)]  # of two that are as near the later one


def test_operators_of_one_name_in_a_row_go_together() -> None:
    """A sample in the middle of a loop over `mm` tells about its ends, too, though other samples are nearer to them."""
    loop = [operator("mm", begin, begin + 0.1) for begin in (0.6, 0.75, 0.95, 1.2, 1.4)]
    context = sampled([MAIN, CROP, MAIN], ops=[operator("index", 0, 0.2), *loop, operator("norm", 1.9, 2.1)])
    assert of_function(context, CROP[-1]) == [pytest.approx((0.6, 1.5))]


def test_a_function_does_not_reach_into_an_optimizers_step() -> None:
    step = operator("Optimizer.step#SGD.step", 0.85, 2)
    ops = [operator("a", 0, 0.2), operator("b", 0.6, 0.7), operator("c", 0.9, 1.1)]
    context = sampled([CROP, MAIN, MAIN], ops=ops, annotations=[step])
    assert of_function(context, CROP[-1]) == [pytest.approx((0, 0.7))]


def test_the_majority_of_the_samples_of_a_slot_decides() -> None:
    found = slots([3, 3, 3, 6], [0, 0, 1, 2])
    assert (chosen(found, 0), chosen(found, 1), chosen(found, 2)) == ([(0, 5)], [], [(5, 8)])


def test_half_of_the_samples_of_a_slot_are_no_majority() -> None:
    found = slots([3, 3], [0, 1])
    assert (chosen(found, 0), chosen(found, 1)) == ([], [])


def test_slots_without_any_sample_belong_to_nobody() -> None:
    assert chosen(slots([], []), 0) == []


def test_there_may_be_no_slots() -> None:
    assert chosen(slots([], [], count=0), 0) == []
