"""Tables of ops, calls and GPU work made by hand or at random. Times are plain small ns."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from kineto_trace.model.trace import NO_SEQUENCE, Table, make_table

DEFAULTS: dict[str, dict[str, int]] = {
    "cpu_op": {"finished": 1, "thread": 1, "sequence": NO_SEQUENCE},
    "user_annotation": {"finished": 1, "thread": 1, "sequence": NO_SEQUENCE, "scope": 7},
    "python_function": {"thread": 1, "module": -1},
    "cuda_runtime": {"thread": 1, "duration": 1},
    "cuda_driver": {"thread": 1, "duration": 1},
    "cpu_instant_event": {"thread": 1},
    "kernel": {"stream": 7},
}


def table(kind: str, *rows: dict[str, int]) -> Table:
    """One row per dictionary; "end" stands for the duration; ops have ids 1, 2, … unless they say otherwise."""
    full = []
    for number, given in enumerate(rows):
        row = {
            **DEFAULTS.get(kind, {}),
            **({"id": number + 1} if "finished" in DEFAULTS.get(kind, {}) else {}),
            **given,
        }
        if "end" in row:
            row["duration"] = row.pop("end") - row["start"]
        full.append(row)
    names = dict.fromkeys(name for row in full for name in row)
    return make_table(kind, len(full), {name: np.array([row.get(name, 0) for row in full]) for name in names})


def spans(kind: str, *intervals: tuple[int, int], **columns: Sequence[int]) -> Table:
    """A table of rows with these starts and ends."""
    rows = [{"start": start, "end": end} for start, end in intervals]
    for name, values in columns.items():
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    return table(kind, *rows)


def random_intervals(seed: int, count: int, threads: int = 3, length: int = 60) -> dict[str, Any]:
    """Short random intervals that nest, overlap, touch and coincide: columns thread, start, duration, finished."""
    random = np.random.default_rng(seed)
    return {
        "thread": random.integers(1, threads + 1, count),
        "start": random.integers(0, length, count),
        "duration": random.integers(0, length // 3, count),
        "finished": (random.random(count) > 0.1).astype(int),
        "id": np.arange(1, count + 1),
    }
