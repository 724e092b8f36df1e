"""Forests of what files may claim."""

import numpy as np
from kineto_trace.model.context import Context
from kineto_trace.structure.call_forests import levels, merged, sampled_lines
from support.trace_files.traces import trace

FRAME = {"thread": 70, "start": 0, "duration": 5, "samples": 1, "self_samples": 1}


def test_callers_in_a_circle_are_outermost() -> None:
    rows = [
        {**FRAME, "name": "a", "parent": 1},
        {**FRAME, "name": "b", "parent": 0},
        {**FRAME, "name": "c", "parent": 0},
    ]
    found = merged(sampled_lines(Context(trace({"python_function": rows}))))
    assert [(found.frames[frame], depth) for frame, depth in zip(found.frame, found.depth, strict=True)] == [
        ("thread 70", 0),
        ("a", 1),
        ("b", 1),
        ("c", 1),
    ]
    assert found.weight.tolist() == [0, 1, 1, 1]


def test_levels_go_from_the_outside_in() -> None:
    assert [at.tolist() for at in levels(np.array([1, 0, 2, 1]))] == [[1], [0, 3], [2]]
    assert list(levels(np.empty(0, np.int64))) == []
