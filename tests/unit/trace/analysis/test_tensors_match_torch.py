"""The numbers of tensors beside PyTorch's own, on a real profile of a training loop."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kineto_trace.analysis.tensor_views import tensor_ids
from kineto_trace.model.trace import Table, make_table
from support.targets import torch_forks

pytestmark = [pytest.mark.slow, pytest.mark.torch]


def profiled(folder: Path, *options: str) -> dict[str, Any]:
    path = folder / "tensors.json"
    done = torch_forks.run("-m", "support.targets.torch_tensors", str(path), *options, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    profile: dict[str, Any] = json.loads(path.read_text())
    return profile


def tables_of(profile: dict[str, Any]) -> dict[str, Table]:
    """The operators, their inputs and the allocations as tables."""
    ops, events = profile["ops"], profile["allocations"]
    inputs = [
        (op + 1, position, *each[:2]) for op, row in enumerate(ops) for position, each in enumerate(row["inputs"])
    ]
    start = np.array([op["start"] for op in ops])
    duration = np.array([op["end"] for op in ops]) - start
    return {
        "cpu_op": make_table(
            "cpu_op",
            len(ops),
            {"start": start, "duration": duration, "id": np.arange(len(ops)) + 1, "finished": np.ones(len(ops))},
        ),
        "op_tensor": make_table(
            "op_tensor",
            len(inputs),
            {
                name: np.array([row[n] for row in inputs], np.uint64)
                for n, name in enumerate(("op", "position", "impl", "storage"))
            },
        ),
        "cpu_instant_event": make_table(
            "cpu_instant_event",
            len(events),
            {name: np.array([row[name] for row in events]) for name in ("start", "address", "bytes")},
        ),
    }


def partition(ours: list[int], theirs: list[int | None]) -> tuple[int, int, int, int]:
    """How many numbers there are on both sides, how many pairs of them, and how many rows only one side numbers."""
    known = [(a, b) for a, b in zip(ours, theirs, strict=True) if a >= 0 and b is not None]
    lonely = sum((a >= 0) != (b is not None) for a, b in zip(ours, theirs, strict=True))
    return len({a for a, _ in known}), len({b for _, b in known}), len(set(known)), lonely


@pytest.mark.parametrize("options", [(), ("--stacks",)], ids=["plain", "stacks"])
def test_the_same_inputs_and_allocations_are_one_tensor_as_pytorch_says(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    profile = profiled(tmp_path, *options)
    found = tensor_ids(tables_of(profile), impls_are_kept=True)
    ours = [*found.inputs.tolist(), *found.allocations.tolist()]
    theirs = [each[2] for op in profile["ops"] for each in op["inputs"]]
    theirs += [row["id"] for row in profile["allocations"]]
    assert len(ours) > 1000
    here, there, pairs, lonely = partition(ours, theirs)
    assert here == there == pairs > 100
    assert lonely == 0
