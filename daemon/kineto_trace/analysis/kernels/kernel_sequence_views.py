"""Sequences of kernels that the same operators launch again and again."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.equal_sequences import group_sequences
from kineto_trace.arrays.row_groups import sums
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import calls, gpu
from kineto_trace.structure.nesting import nest_tables
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

_SEPARATOR = "|"
_NAMED = ("python_function", "user_annotation", "cpu_op")

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class Launched(NamedTuple):
    """GPU activities (durations in ns) by the run of the op that they belong to, and in it by start."""

    root: Ints  # number of the run
    name: npt.NDArray[np.int32]
    duration: Ints
    root_name: npt.NDArray[np.int32]  # of each run
    root_duration: Ints


@view(
    "frequent_sequences",
    columns(
        ("pattern", "text", "", "op|first GPU activity|second|…"),
        ("length", "int", "", "number of GPU activities"),
        ("count", "int", "", "number of calls"),
        ("gpu_us", "float", "us", "sum of the durations of these activities"),
        ("cpu_us", "float", "us", "sum of the durations of the operator's runs"),
    ),
)
def frequent_sequences(
    context: Context,
    *,
    op: str = "aten::",
    min_pattern_len: int = 3,
    top_k: int = 5,
) -> Answer:
    """The most frequent sequences of GPU activities that runs of an operator launch.

    A run counts if no other matching run encloses it on its thread. Its activities are those launched on its thread
    while it runs, in the order of their starts.

    Options:
    - op: operators, annotations and Python functions whose names contain this text match.
    - min_pattern_len: the minimum number of activities in a sequence.
    - top_k: the number of sequences to list; 0 lists all.
    """
    return sequence_columns(context, exact_launched(context, op), op, min_pattern_len, top_k)


def sequence_columns(
    context: Context, found: Launched, op: str, min_pattern_len: int, top_k: int, notes: Sequence[str] = ()
) -> Answer:
    """The columns of the view."""
    runs, size = np.unique(found.root, return_counts=True)
    long = np.zeros(len(found.root_name), np.bool_)
    long[runs[size >= min_pattern_len]] = True
    chosen = long[found.root]
    root = found.root[chosen]
    name, duration = found.name[chosen].astype(np.int64), found.duration[chosen]
    first = np.flatnonzero(np.diff(root, prepend=-1))
    run = root[first]
    values = np.insert(name, first, found.root_name[run])
    sequences = group_sequences(values, first + np.arange(len(first)))
    length = np.diff(first, append=len(root))
    count = len(sequences.size)
    gpu_ns = sums(np.repeat(sequences.number, length), duration, count)
    cpu_ns = sums(sequences.number, found.root_duration[run], count)
    strings = context.trace.strings
    rows = []
    for place, example in enumerate(sequences.example.tolist()):
        start = first[example]
        texts = [strings[number] for number in (found.root_name[run[example]], *name[start : start + length[example]])]
        times = (int(gpu_ns[place]) / 1000, int(cpu_ns[place]) / 1000)
        rows.append((_SEPARATOR.join(texts), int(length[example]), int(sequences.size[place]), *times))
    rows.sort(key=lambda row: (-row[2], row[0]))
    if top_k:
        rows = rows[:top_k]
    names = [column.name for column in frequent_sequences.columns]
    nothing = [] if rows else [f"no event whose name contains {op!r} launched {min_pattern_len} GPU activities"]
    return Answer({name_: [row[place] for row in rows] for place, name_ in enumerate(names)}, [*notes, *nothing])


def fitting(context: Context, op: str) -> Flags:
    """For each string whether it contains the text."""
    return np.array([op in text for text in context.trace.strings], np.bool_)


def exact_launched(context: Context, op: str) -> Launched:
    """By the threads and times of calls."""
    fits, trace = fitting(context, op), context.trace
    tables = [trace.table(kind) for kind in _NAMED]
    tables = [table.take(np.flatnonzero(fits[table["name"]])) if len(table) else table for table in tables]
    nested = nest_tables(tables, trace.window_end_ns)
    work, called = context.get(gpu), context.get(calls)
    rows = np.flatnonzero(work.call >= 0)
    place = nested.innermost(called.thread, called.start)[work.call[rows]] if len(rows) else rows
    rows, place = rows[place >= 0], place[place >= 0]
    tops = np.flatnonzero(nested.tree.parent < 0)
    root = np.searchsorted(tops, place, side="right") - 1
    order = np.argsort(root, kind="stable")  # they are sorted by start already
    rows = rows[order]
    names = np.concatenate([table["name"] for table in tables])
    top = nested.order[tops]
    length = nested.tree.end[tops] - nested.events.start[tops]
    return Launched(root[order], work.name[rows], (work.end - work.start)[rows], names[top], length)
