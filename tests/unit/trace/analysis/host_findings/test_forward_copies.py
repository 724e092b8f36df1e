"""Copies and conversions in the forward."""

from dataclasses import replace
from typing import Any

import pytest
from kineto_trace.analysis.host_findings.forward_copies import forward_copies
from kineto_trace.model.context import Context
from support.trace_files.sampled_stacks import BACKWARD, FORWARD, MAIN, MODULE, PERIOD_NS, TORCH, sampled

CAST = (*MAIN, MODULE, "/job/net.py(5): Block.cast")
ENGINE = (*MAIN, BACKWARD, TORCH + "autograd/graph.py(9): _engine_run_backward")


def copying(name: str, samples: int, after: int = 10 * PERIOD_NS) -> Context:
    """A function that runs this operator for so many of 100 samples, and its backward for the time `after`."""
    common: dict[str, Any] = {"thread": 1, "sequence": 1}
    made = [
        {**common, "name": name, "start": 0, "duration": samples * PERIOD_NS, "torch_thread": 1},
        {
            **common,
            "name": "autograd::engine::evaluate_function: ToCopyBackward0",
            "start": 50 * PERIOD_NS,
            "duration": after,
            "sequence": -1,
        },
        {
            **common,
            "name": "ToCopyBackward0",
            "start": 50 * PERIOD_NS,
            "duration": PERIOD_NS,
            "scope": 1,
            "forward_thread": 1,
        },
    ]
    engine = after // PERIOD_NS
    stacks = [*[CAST] * samples, *[FORWARD] * (50 - samples), *[ENGINE] * engine, *[FORWARD] * (50 - engine)]
    return sampled(stacks, ops=made)


@pytest.mark.parametrize(
    ("name", "title", "advice"),
    [
        ("aten::to", "converts tensors to other number types", "dtype"),
        ("aten::clone", "copies tensors", "views"),
    ],
)
def test_copies_count_with_their_backward(name: str, title: str, advice: str) -> None:
    (finding,) = forward_copies(copying(name, 20))
    assert finding.title == f"Block.cast (net.py:5) {title}, forward and backward"
    assert round(finding.saving_ns / PERIOD_NS) == 30
    assert advice in finding.advice


def test_other_operators_are_no_copies() -> None:
    assert list(forward_copies(copying("aten::mul", 20))) == []


def test_a_few_copies_are_what_models_need() -> None:
    assert list(forward_copies(copying("aten::contiguous", 4, after=PERIOD_NS))) == []


def test_without_python_stacks_nobody_is_named() -> None:
    made = copying("aten::to", 20).trace
    bare = {kind: rows for kind, rows in made.tables.items() if kind != "python_function"}
    assert list(forward_copies(Context(replace(made, tables=bare)))) == []
