"""What the calls of the training thread are for."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.host_findings.host_finding_rules import loading
from kineto_trace.analysis.host_findings.threads import compilation, optimizer, recomputation
from kineto_trace.analysis.host_findings.user_code import user_code
from kineto_trace.analysis.host_time.moment_classes import MomentClass, moment_classes
from kineto_trace.analysis.host_time.user_calls import user_lines
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Table
from support.trace_files.sampled_stacks import (
    BACKWARD,
    FORWARD,
    LINEAR,
    MAIN,
    MODULE,
    PERIOD_NS,
    SITE,
    TORCH,
    Sample,
    Stack,
    sampled,
    sampled_trace,
)

FINDS, RUNS = "<frozen importlib._bootstrap>(1349): _find_and_load", "<frozen importlib._bootstrap>(480): _call"
MAKES_OPTIMIZER = (*MAIN, TORCH + "optim/sgd.py(30): SGD.__init__", TORCH + "_compile.py(20): inner")
CONVERTS, RESETS = TORCH + "_dynamo/convert_frame.py(9): _compile", TORCH + "__init__.py(2400): compile"
COMPILERS = [
    TORCH + "_dynamo/convert_frame.py(1): <module>",
    TORCH + "_inductor/pattern_matcher.py(1): register",
    TORCH + "fx/graph.py(1): Graph",
    TORCH + "autograd/anomaly_mode.py(1): <module>",
    SITE + "triton/compiler/compiler.py(1): <module>",
    SITE + "jax/_src/compiler.py(1): <module>",
]
PHASES = [
    TORCH + "utils/data/dataloader.py(1): <module>",
    TORCH + "nn/modules/linear.py(1): Linear",
    TORCH + "optim/adam.py(1): <module>",
    TORCH + "autograd/graph.py(1): <module>",
]
CHECKPOINT = TORCH + "utils/checkpoint.py(1): "
TRAINING: list[Sample] = [*[FORWARD] * 40, *[(*MAIN, BACKWARD)] * 40]
CALLED = TORCH + "autograd/function.py(327): apply"


def classes(stack: Stack) -> list[MomentClass]:
    return [MomentClass(kind) for kind in sampled([stack] * 3).get(moment_classes).kind.tolist()]


@pytest.mark.parametrize("imported", [*COMPILERS, *PHASES])
def test_what_runs_below_an_import_is_importing_whatever_is_imported(imported: str) -> None:
    samples = [*[(*MAIN, FINDS, RUNS, imported)] * 2, *[FORWARD] * 8] * 10
    (finding,) = user_code(context := sampled(samples, steps=10))
    assert finding.title == "_find_and_load, called in main (train.py:42), imports modules"
    assert [*compilation(context), *loading(context), *optimizer(context)] == []


def test_modules_that_a_library_imports_when_it_is_called_first_are_imported_there() -> None:
    (finding,) = user_code(sampled([*[(*MAKES_OPTIMIZER, FINDS, COMPILERS[0])] * 20, *[FORWARD] * 80]))
    assert finding.name == "user_code_import"


def test_modules_that_the_call_of_torch_compile_imports_are_not_compiled() -> None:
    assert classes((*MAIN, RESETS, FINDS, COMPILERS[0])) == [MomentClass.OTHER] * 3
    assert classes((*MAIN, RESETS)) == [MomentClass.COMPILE] * 3


def test_an_import_inside_a_compilation_belongs_to_it() -> None:
    assert classes((*MAIN, CONVERTS, FINDS, RUNS, COMPILERS[1])) == [MomentClass.COMPILE] * 3


def test_the_users_module_that_is_imported_may_compile_and_train() -> None:
    runs = (*MAIN, FINDS, RUNS, "/job/experiment.py(1): <module>")
    assert classes((*runs, CONVERTS)) == [MomentClass.COMPILE] * 3
    assert classes((*runs, *FORWARD[2:])) == [MomentClass.FORWARD] * 3


def test_a_forward_that_is_computed_again_is_no_evaluation_and_its_backward_is_none_of_it() -> None:
    again = (*MAIN, BACKWARD, CHECKPOINT + "CheckpointFunction.backward")
    block = (*again, MODULE, "/job/net.py(5): Block.forward", MODULE, LINEAR)
    inner = (*again, TORCH + "autograd/__init__.py(1): backward")
    context = sampled([*[FORWARD] * 30, *[(*MAIN, BACKWARD)] * 20, *[block] * 30, *[inner] * 20])
    assert list(user_code(context)) == []
    (finding,) = recomputation(context)
    assert finding.title == "Activation checkpointing computes the forward pass again, mostly Block.forward (net.py:42)"
    assert finding.saving_ns == pytest.approx(30 * PERIOD_NS)


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


def found(callee: str, *ops: dict[str, Any]) -> list[Finding]:
    """The findings of a loop with 20 samples in this callee, at times when no operator runs."""
    return list(user_code(sampled([*TRAINING, *[(MAIN, f"running in {callee}")] * 20], ops=ops, steps=10)))


def test_samples_in_an_operator_with_a_backward_are_no_operators_that_train_nothing() -> None:
    assert found("loss.mean", *LOSS) == []


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


def lines(*, cut: bool) -> list[int]:
    """Of samples in `apply`, which backward calls at 333 and main calls that at 36. cut: backward ends too early."""
    whole = sampled_trace([(*MAIN, BACKWARD, CALLED)] * 4)
    table = whole.table("python_function")
    names = np.array([whole.strings[number] for number in table["name"]])
    call_line = np.select([names == CALLED, names == BACKWARD], [333, 36], 0).astype(table["call_line"].dtype)
    duration = np.where(cut & (names == BACKWARD), table["duration"] - 1, table["duration"])
    changed = Table(table.kind, {**table.columns, "call_line": call_line, "duration": duration})
    found: list[int] = user_lines(Context(replace(whole, tables={**whole.tables, table.kind: changed}))).tolist()
    return found


def test_the_line_is_that_at_which_the_function_called_a_library() -> None:
    assert set(lines(cut=False)) == {36}


def test_a_line_of_a_library_is_not_taken_where_the_slice_between_ended_too_early() -> None:
    assert 333 not in lines(cut=True)


LOSS = [
    op("aten::mean", 20, 35, sequence=7),
    op("MeanBackward0", 50, 60, sequence=7, forward_thread=1, scope=1),
]


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
