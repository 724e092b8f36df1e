"""A view without rows says what the trace lacks, or that there was nothing to find."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from kineto_trace import run_view
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from support.trace_files.traces import trace

Rows = Mapping[str, Sequence[Mapping[str, Any]]]

OPERATOR = {"name": "aten::mm", "start": 0, "duration": 100_000, "thread": 1, "finished": 1}
KERNEL = {"name": "k", "start": 0, "duration": 1_000_000, "device": 0, "stream": 7, "correlation": 1}
CALL = {"name": "a.py(1): f", "start": 0, "duration": 100_000, "thread": 1}
SAMPLES = {**CALL, "samples": 1, "self_samples": 1}
NOTHING: Rows = {}
GPU: Rows = {"kernel": [KERNEL]}
HALF: Rows = {"kernel": [{**KERNEL, "duration": 500_000}]}

NO_COLLECTIVES = (
    "the traces have no collectives: neither NCCL or RCCL kernels (activity type kernel) nor operators such as "
    "gloo:all_reduce (activity type cpu_op)"
)
NO_CALL_TREE = "the trace has no operators and no annotations: record the activity types cpu_op and user_annotation"
NO_MODULES = "the trace has no module calls: record it with with_modules=True or with_stack=True"
NO_OPERATORS = "the trace has no operators: record the activity type cpu_op (torch.profiler: ProfilerActivity.CPU)"
NO_GPU = "the trace has no GPU activity"
NEVER_IDLE = "no GPU was idle in the complete steps (or, if there are none, in the whole trace)"
NO_FINDING = "no finding would save 0.5 % or more of the steps' time"


@pytest.mark.parametrize(
    ("view", "tables", "options", "notes"),
    [
        ("collectives", GPU, {}, [NO_COLLECTIVES]),
        ("collective_summary", GPU, {}, [NO_COLLECTIVES]),
        ("distributed_ops", GPU, {}, [NO_COLLECTIVES]),
        ("operators", GPU, {}, [NO_OPERATORS]),
        ("operators", NOTHING, {"group_by": "name+shape", "stacks": True}, [NO_OPERATORS, NO_GPU]),
        ("modules", GPU, {}, [NO_MODULES]),
        ("modules", {"cpu_op": [OPERATOR]}, {}, [NO_MODULES]),
        ("call_tree", GPU, {}, [NO_CALL_TREE]),
        (
            "call_tree",
            {**GPU, "python_function": [CALL]},
            {},
            [NO_CALL_TREE, "the trace's Python functions are shown with python=True"],
        ),
        (
            "call_tree",
            {**GPU, "python_function": [SAMPLES]},
            {"python": True},
            [NO_CALL_TREE, "the trace's Python functions are samples, not calls: see the view python_samples"],
        ),
        ("idle_breakdown", NOTHING, {}, [NO_GPU]),
        (
            "idle_breakdown",
            {"kernel": [KERNEL, {**KERNEL, "stream": 20}]},
            {"streams": (9,)},
            ["no GPU activity ran on these streams; the trace has 7, 20"],
        ),
        ("idle_causes", NOTHING, {}, [NO_GPU]),
        ("idle_causes", GPU, {}, [NEVER_IDLE]),
        ("idle_gaps", NOTHING, {"cause": "memory"}, [NO_GPU]),
        ("idle_gaps", GPU, {"cause": "memory"}, [NEVER_IDLE]),
        ("idle_gaps", HALF, {"cause": "memory"}, ["no gap has the cause memory; the causes in this trace are host"]),
        ("idle_gaps", HALF, {"limit": 0}, ["1 gap is not shown, since limit is 0; use 1 or more"]),
        (
            "findings",
            {**GPU, "cpu_op": [OPERATOR]},
            {},
            [
                NO_FINDING,
                "the trace has no Python functions, so the causes that they would show cannot be found: record "
                "python_function",
            ],
        ),
        ("findings", {**GPU, "cpu_op": [OPERATOR], "python_function": [CALL]}, {}, [NO_FINDING]),
    ],
)
def test_the_notes_say_why(view: str, tables: Rows, options: Mapping[str, Any], notes: Sequence[str]) -> None:
    result = run_view(view, Context(trace(tables)), **options)
    assert (len(result), list(result.notes)) == (0, notes)


def test_a_cause_that_there_is_not_is_refused() -> None:
    with pytest.raises(ViewError, match="cause='tea' is not valid; use one of host, synchronisation"):
        run_view("idle_gaps", Context(trace(HALF)), cause="tea")
