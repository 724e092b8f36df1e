"""Forests of what files may claim."""

from kineto_trace.model.context import Context
from kineto_trace.structure.call_forests import call_stacks, merged, sampled_lines
from support.trace_files.hta_events import Event, context, event, op
from support.trace_files.traces import trace

FRAME = {"thread": 70, "start": 0, "duration": 5, "samples": 1, "self_samples": 1}
MAIN, AUTOGRAD = 1, 2
FORWARD = {"Sequence number": 5, "External id": 3}
BACKWARD = {"Sequence number": 5, "Fwd thread id": 1}


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


def python(name: str, ts: float, dur: float) -> Event:
    return event("python_function", name, ts, dur, 1, MAIN)


def flow(phase: str, tid: int, ts: float) -> Event:
    return {"ph": phase, "cat": "fwdbwd", "name": "fwdbwd", "id": 1, "pid": 1, "tid": tid, "ts": ts, "bp": "e"}


TRAINING = [
    python("train.py(1): main", 0, 200),
    python("model.py(7): forward", 10, 30),
    event("cpu_op", "aten::addmm", 15, 10, 1, MAIN, **FORWARD),
    python("train.py(9): step", 50, 100),
    python("torch/autograd/__init__.py(200): backward", 60, 80),
    event("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 65, 20, 1, AUTOGRAD, **BACKWARD),
    event("cpu_op", "AddmmBackward0", 66, 18, 1, AUTOGRAD, **BACKWARD),
    op("aten::mm", 70, 10, AUTOGRAD),
    op("torch::autograd::AccumulateGrad", 100, 10, AUTOGRAD),
    op("aten::copy_", 170, 5, 3),
    flow("s", MAIN, 15),
    flow("f", AUTOGRAD, 66),
]


def stacks(found: Context) -> dict[str, str | None]:
    """The stack of each operator."""
    table, all_ = found.trace.table("cpu_op"), found.get(call_stacks)
    return {
        found.trace.strings[name]: all_.text(found.trace, number)
        for name, number in zip(table["name"].tolist(), all_.of_op.tolist(), strict=True)
    }


def test_backward_operators_have_the_stack_of_their_forward_operator() -> None:
    found = stacks(context(TRAINING))
    forward = "model.py(7): forward;train.py(1): main"
    names = ("aten::addmm", "autograd::engine::evaluate_function: AddmmBackward0", "AddmmBackward0", "aten::mm")
    assert [found[name] for name in names] == [forward] * 4


def test_others_of_the_backward_pass_have_the_stack_of_who_waits_for_it() -> None:
    waiting = "torch/autograd/__init__.py(200): backward;train.py(9): step;train.py(1): main"
    assert stacks(context(TRAINING))["torch::autograd::AccumulateGrad"] == waiting


def test_threads_outside_of_a_backward_pass_have_no_stack() -> None:
    assert stacks(context(TRAINING))["aten::copy_"] is None


def test_stacks_that_the_file_states_are_completed_too() -> None:
    events = [dict(each) for each in TRAINING if each.get("cat") != "python_function"]
    events[0] = event("cpu_op", "aten::addmm", 15, 10, 1, MAIN, **FORWARD, **{"Call stack": "a.py(1): f;b.py(2): g"})
    found = stacks(context(events))
    assert (found["aten::mm"], found["torch::autograd::AccumulateGrad"]) == ("a.py(1): f;b.py(2): g", None)
