"""Where GPU work comes from, in traces of training threads whose samples come every 10 ms."""

from typing import Any

import pytest
from kineto_trace.analysis.findings.idle_findings import host_bound
from kineto_trace.analysis.findings.launch_origins import launch_origins
from kineto_trace.model.context import Context
from support.trace_files.sampled_stacks import MAIN, OPTIMIZER, PERIOD_NS, stack_rows
from support.trace_files.traces import target, trace

Row = dict[str, Any]
PENALTY = (*MAIN, "/job/train.py(50): penalty")


def span(name: str, start: float, end: float, **more: Any) -> Row:
    """An event from one sample to another."""
    return {"name": name, "start": int(start * PERIOD_NS), "duration": int((end - start) * PERIOD_NS), **more}


def launched(*operators: Row, annotations: tuple[Row, ...] = ()) -> Context:
    """A short kernel at the end of each operator, which is launched by it; stacks of four samples around them."""
    kernels, calls, ops = [], [], []
    for number, row in enumerate(operators, 1):
        end = row["start"] + row["duration"]
        calls.append({"name": "cudaLaunchKernel", "start": end - 2_000, "duration": 1_000, "correlation": number})
        calls[-1]["thread"] = row["thread"]
        kernels.append({"name": "k", "start": end, "duration": 1_000, "correlation": number})
        ops.append({"finished": 1, "inputs": -1, "id": number, "scope": 0, "sequence": -1, **row})
    rows = {
        "python_function": stack_rows([MAIN, PENALTY, (*MAIN, OPTIMIZER), MAIN]),
        "cpu_op": ops,
        "cuda_runtime": calls,
        "kernel": kernels,
        "user_annotation": [{"thread": 1, "id": 9, "finished": 1, **row} for row in annotations],
    }
    return Context(trace(rows, length_ns=4 * PERIOD_NS, sample_period_ns=PERIOD_NS, target=target()))


def forward(start: float, end: float) -> Row:
    return span("aten::abs", start, end, thread=1, torch_thread=1, sequence=3)


def backward(start: float, end: float) -> Row:
    return span("AbsBackward0", start, end, thread=2, torch_thread=2, sequence=3, forward_thread=1, scope=1)


def names(context: Context) -> list[str]:
    return [context.trace.strings[number] if number >= 0 else "" for number in context.get(launch_origins).function]


def test_work_of_the_backward_comes_from_the_function_of_its_forward() -> None:
    context = launched(forward(1.1, 1.2), backward(3.1, 3.3))
    assert names(context) == [PENALTY[-1], PENALTY[-1]]


def test_a_backward_whose_forward_is_not_in_the_trace_comes_from_nowhere() -> None:
    assert names(launched(backward(3.1, 3.3))) == [""]


def test_what_the_optimizer_launches_is_its_own() -> None:
    step = span("Optimizer.step#AdamW.step", 2, 3)
    context = launched(forward(1.1, 1.2), span("aten::mul", 2.1, 2.2, thread=1), annotations=(step,))
    assert context.get(launch_origins).optimizer.tolist() == [False, True]


@pytest.mark.parametrize(
    ("operators", "shown"),
    [
        ((forward(1.0, 1.9), backward(3.0, 3.9)), ", most of it for penalty (train.py:50)"),
        ((span("aten::mul", 1.9, 2.9, thread=1),), ", most of it for penalty (train.py:50)"),
        ((span("aten::mul", 2.1, 2.9, thread=1),), ", most of it for the optimizer (AdamW.step)"),
        ((backward(3.0, 3.9),), ""),
    ],
)
def test_a_gpu_that_waits_for_launches_is_told_for_what(operators: tuple[Row, ...], shown: str) -> None:
    step = span("Optimizer.step#AdamW.step", 2, 3)
    (finding,) = host_bound(launched(*operators, annotations=(step,)))
    assert finding.title == "The GPU waits for the host to launch work" + shown
    assert (not finding.where) is (not shown)
