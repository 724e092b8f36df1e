"""Traces of a training thread made of samples: each is a stack, and what the thread did."""

from collections.abc import Sequence
from typing import Any

from kineto_trace.model.context import Context
from kineto_trace.model.trace import Trace

from support.trace_files.traces import START_NS, target, trace

PERIOD_NS = 10_000_000
THREAD = 1
SITE = "/venv/lib/python3.11/site-packages/"
TORCH = SITE + "torch/"
MAIN = ("/job/train.py(1): <module>", "/job/train.py(10): main")
MODULE = TORCH + "nn/modules/module.py(1782): Module._call_impl"
LINEAR = TORCH + "nn/modules/linear.py(130): Linear.forward"
BACKWARD = TORCH + "_tensor.py(566): Tensor.backward"
OPTIMIZER = TORCH + "optim/optimizer.py(509): Optimizer.profile_hook_step.<locals>.wrapper"
LOADER = TORCH + "utils/data/dataloader.py(725): _BaseDataLoaderIter.__next__"
FORWARD = (*MAIN, MODULE, LINEAR)

Stack = tuple[str, ...]
# The state is "running" unless it is told; several words: columns. "in NAME": what the innermost frame calls.
Sample = Stack | tuple[Stack, str]


def stack_rows(samples: Sequence[Sample], *, thread: int = THREAD, line: int = 42) -> list[dict[str, Any]]:
    """Rows of python_function: for each sample one slice for each frame, a period long, all at the same line."""
    rows: list[dict[str, Any]] = []
    for number, sample in enumerate(samples):
        stack, told = sample if isinstance(sample[0], tuple) else (sample, "running")
        state, _, callee = str(told).partition(" in ")
        for depth, name in enumerate(stack):
            leaf = depth == len(stack) - 1
            rows.append(
                {
                    "start": number * PERIOD_NS,
                    "duration": PERIOD_NS,
                    "name": name,
                    "thread": thread,
                    "depth": depth,
                    "parent": len(rows) - 1 if depth else -1,
                    "samples": 1,
                    "self_samples": int(leaf),
                    **dict.fromkeys(state.split(), int(leaf)),
                    "line": line,
                    "lines": -1,
                    "callees": f"{line} {callee}: 1 {state}" if leaf and callee else "",
                    "module": -1,
                }
            )
    return rows


def sampled_trace(
    samples: Sequence[Sample],
    *,
    steps: int = 1,
    others: Sequence[Sample] = (),
    ops: Sequence[dict[str, Any]] = (),
    annotations: Sequence[dict[str, Any]] = (),
    **target_values: Any,
) -> Trace:
    """A trace of these samples, one each period, cut into equal steps. others: samples of a thread 2."""
    length = len(samples) * PERIOD_NS
    marks = [
        {"start": n * length // steps, "duration": length // steps, "name": f"ProfilerStep#{n}"} for n in range(steps)
    ]
    common = {"thread": THREAD, "sequence": -1, "finished": 1, "scope": 7, "inputs": -1}
    rows = {
        "user_annotation": [{**common, "id": n + 1, **row} for n, row in enumerate([*marks, *annotations])],
        "cpu_op": [{**common, "scope": 0, "id": 1000 + n, **row} for n, row in enumerate(ops)],
        "python_function": stack_rows(samples),
    }
    other_rows = stack_rows(others, thread=2)
    first = len(rows["python_function"])
    rows["python_function"] += [
        {**row, "parent": row["parent"] + first if row["parent"] >= 0 else -1} for row in other_rows
    ]
    window = {"window_start_ns": START_NS - 1, "window_end_ns": START_NS + length + 1}  # so that all steps are whole
    return trace(rows, sample_period_ns=PERIOD_NS, target=target(**target_values), **window)


def sampled(samples: Sequence[Sample], **values: Any) -> Context:
    """The context of such a trace."""
    return Context(sampled_trace(samples, **values))
