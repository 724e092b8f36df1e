"""Samples in operators that have a backward, by what their line calls."""

from dataclasses import replace
from typing import Any

import pytest
from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.host_findings.user_code import user_code
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Table
from support.trace_files.sampled_stacks import BACKWARD, FORWARD, MAIN, PERIOD_NS, Sample, sampled, sampled_trace

TRAINING: list[Sample] = [*[FORWARD] * 40, *[(*MAIN, BACKWARD)] * 40]


def op(name: str, start: int, end: int, **values: int) -> dict[str, Any]:
    duration = (end - start) * PERIOD_NS - 2
    return {
        "name": name,
        "start": start * PERIOD_NS + 1,
        "duration": duration,
        "thread": 1,
        "torch_thread": 1,
        **values,
    }


LOSS = [
    op("aten::mean", 20, 35, sequence=7),
    op("MeanBackward0", 50, 60, sequence=7, forward_thread=1, scope=1),
]


def found(callee: str, *ops: dict[str, Any]) -> list[Finding]:
    """The findings of a loop with 20 samples in this callee, at times when no operator runs."""
    return list(user_code(sampled([*TRAINING, *[(MAIN, f"running in {callee}")] * 20], ops=ops, steps=10)))


def test_samples_in_an_operator_with_a_backward_are_no_operators_that_train_nothing() -> None:
    assert found("loss.mean", *LOSS) == []


@pytest.mark.parametrize(
    ("callee", "ops"),
    [
        ("loss.mean", []),
        ("mean", LOSS),  # of the statistics module, or the program's own
        ("loss.sum", LOSS),
        ("loss.mean", [*LOSS, op("aten::mean", 36, 39)]),
    ],
)
def test_samples_in_anything_else_are_told(callee: str, ops: list[dict[str, Any]]) -> None:
    assert [finding.where for finding in found(callee, *ops)] == ["main (/job/train.py:42)"]


def test_a_method_that_takes_longer_than_the_operators_of_its_name_is_another_one() -> None:
    short = [op("aten::mean", 20, 21, sequence=7), LOSS[1]]
    assert [finding.where for finding in found("values.mean", *short)] == ["main (/job/train.py:42)"]


def test_of_a_slice_with_many_samples_only_those_in_such_operators_belong_to_the_forward() -> None:
    made = sampled_trace([*TRAINING, (MAIN, "running in loss.mean"), *[FORWARD] * 19], ops=LOSS, steps=10)
    function, strings = made.table("python_function"), list(made.strings)
    strings[strings.index("42 loss.mean: 1 running")] = "42 loss.mean: 5 running; 42 torch.randn: 15 running"
    many = {name: function[name].copy() for name in ("samples", "self_samples")}
    for column in many.values():
        column[function["callees"] >= 0] = 20
    tables = {**made.tables, "python_function": Table(function.kind, {**function.columns, **many})}
    (finding,) = user_code(Context(replace(made, tables=tables, strings=tuple(strings))))
    assert "seen at 15 of 119 moments" in finding.evidence
    assert finding.evidence.endswith("; 100 % in torch.randn (line 42)")
