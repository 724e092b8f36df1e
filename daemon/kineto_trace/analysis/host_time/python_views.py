"""The view of sampled Python: functions and lines that ran."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from kineto_trace.arrays.row_groups import Groups, group
from kineto_trace.model.context import Context
from kineto_trace.model.line_counts import STATES, WAITS, LineCount, format_lines
from kineto_trace.model.trace import NO_STRING, Table, Trace
from kineto_trace.structure.python_frames import (
    IDLE,
    RUNNING,
    UNKNOWN,
    WAITING,
    LineSamples,
    idle_reasons,
    line_samples,
    sample_period_ns,
)
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

SamplesBy = Literal["function", "line"]


@view(
    "python_samples",
    columns(
        ("function", "text", "", "file (first line of the function): its name"),
        ("line", "int", "", "executing line; with by=function, the line with the most samples"),
        (
            "running",
            "int",
            "",
            "samples in which it was the innermost frame and its thread ran, or its state is unknown",
        ),
        ("running_pct", "float", "%", "share of all such samples"),
        ("running_us", "float", "us", "these samples times the sampling interval"),
        ("waiting", "int", "", "samples in which it was the innermost frame and its thread waited for the GIL"),
        (
            "idle",
            "int",
            "",
            "samples in which it was the innermost frame and its thread slept or waited",
        ),
        ("gil_holder", "text", "", "thread that held the GIL in most samples in which it waited for it"),
        (
            "idle_for",
            "text",
            "",
            "what idle samples waited for, where known: lock, sleep, poll, io, child, driver, memory",
        ),
        ("caller", "text", "", "function and line that called it in most of its samples"),
        ("threads", "int", "", "number of threads seen in it"),
        ("lines", "text", "", "with by=function: its samples by line, the line with the most samples first"),
    ),
)
def python_samples(context: Context, *, by: SamplesBy = "line", thread: str = "", idle: bool = True) -> Answer:
    """Where sampled Python code ran, by function and line: most running samples first, idle code last.

    Only the innermost Python frame of a sample counts, including all C code that it called. Samples of unknown state
    (from older captures) count as running.

    Options:
    - by: "line", or "function" for one row per function.
    - thread: only threads whose name contains this text.
    - idle: false leaves out code that was only ever seen idle.
    """
    trace, found = context.trace, line_samples(context.trace)
    found = _of_threads(context, found, thread)
    table = trace.table("python_function")
    name = table["name"][found.row].astype(np.int64)
    groups = group([name, found.line] if by == "line" else [name])
    counts = np.stack([groups.sums(found.counts[:, state]) for state in range(len(STATES))], axis=1)
    busy = counts[:, RUNNING] + counts[:, UNKNOWN]
    lines = _lines(found, groups.number) if by == "function" else {}
    pairs = group([groups.number, table["thread"][found.row]])
    threads = np.bincount(groups.number[pairs.first], minlength=len(groups))
    order = np.lexsort((groups.first, -counts[:, IDLE], -counts[:, WAITING], -busy))
    order = order if idle else order[busy[order] + counts[order, WAITING] > 0]
    shown = [lines[place][0].line if lines else int(found.line[groups.first[place]]) for place in order.tolist()]
    period_us = sample_period_ns(trace) / 1000
    waits, callers = _waits(table, found, groups), _callers(trace, found, groups)
    holders = _gil_holders(trace, found, groups)
    values: dict[str, Any] = {
        "function": [trace.strings[number] for number in name[groups.first[order]].tolist()],
        "line": [line or None for line in shown],
        "running": busy[order],
        "running_pct": 100 * busy[order] / max(int(busy.sum()), 1),
        "running_us": busy[order] * period_us if period_us else [None] * len(order),
        "waiting": counts[order, WAITING],
        "idle": counts[order, IDLE],
        "gil_holder": [holders.get(place) for place in order.tolist()],
        "idle_for": [waits[place] for place in order.tolist()],
        "caller": [callers.get(place) for place in order.tolist()],
        "threads": threads[order],
        "lines": [format_lines(entry for entry in lines[place] if entry.line) if lines else None for place in order],
    }
    notes = [] if len(order) else ["the trace has no samples of Python stacks"]
    if len(order) and not counts[:, [RUNNING, WAITING, IDLE]].any():
        notes.append("these samples do not say whether their threads ran, so idle threads are among them")
    return Answer(values, notes)


def _waits(table: Table, found: LineSamples, groups: Groups) -> list[str | None]:
    """Returns for each group what its idle samples waited for.

    Only whole slices have this information: by line, slices that were idle at several lines are left out.
    """
    idle = found.counts[:, IDLE] > 0
    lowest, highest = np.full(len(table), len(groups)), np.full(len(table), -1)
    np.minimum.at(lowest, found.row[idle], groups.number[idle])
    np.maximum.at(highest, found.row[idle], groups.number[idle])
    rows = np.flatnonzero(lowest == highest)
    counts = [np.bincount(lowest[rows], table[wait][rows], len(groups)) for wait in WAITS[1:]]
    return [idle_reasons([0, *map(int, row)]) for row in zip(*counts, strict=True)]


def _callers(trace: Trace, found: LineSamples, groups: Groups) -> dict[int, str]:
    """Returns for each group the caller in most of its samples, with the line."""
    table = trace.table("python_function")
    line, parent = table["call_line"][found.row].astype(np.int64), table["parent"][found.row].astype(np.int64)
    caller = np.where(parent >= 0, table["name"][parent].astype(np.int64), NO_STRING)
    commonest = _commonest(groups.number, [caller, line], found.counts.sum(axis=1))
    return {
        number: trace.strings[caller[entry]] + (f", line {line[entry]}" if line[entry] else "")
        for number, entry in commonest.items()
        if caller[entry] != NO_STRING
    }


def _gil_holders(trace: Trace, found: LineSamples, groups: Groups) -> dict[int, str]:
    """Returns for each group the thread that held the GIL in most of the samples in which it waited."""
    holder = trace.table("python_function")["gil_holder"][found.row].astype(np.int64)
    names = trace.target.threads
    commonest = _commonest(groups.number, [holder], np.where(holder > 0, found.counts[:, WAITING], 0))
    return {
        number: names.get(int(holder[entry]), str(holder[entry]))
        for number, entry in commonest.items()
        if holder[entry] and found.counts[entry, WAITING]
    }


def _commonest(number: Any, keys: Sequence[Any], samples: Any) -> dict[int, int]:
    """Returns for each group an entry of those that are equal in all keys and have the most samples together."""
    parts = group([number, *keys])
    sums = parts.sums(samples)
    found: dict[int, int] = {}
    for entry in parts.first[np.lexsort((parts.first, -sums))].tolist():
        found.setdefault(int(number[entry]), entry)
    return found


def _of_threads(context: Context, found: LineSamples, text: str) -> LineSamples:
    if not text:
        return found
    names = context.trace.target.threads
    wanted = [tid for tid, name in names.items() if text in name]
    own = np.isin(context.trace.table("python_function")["thread"][found.row], wanted)
    return LineSamples(found.row[own], found.line[own], found.counts[own])


def _lines(found: LineSamples, number: Any) -> dict[int, list[LineCount]]:
    """Returns for each group its lines, the one with the most busy samples first."""
    lines = group([number, found.line])
    counts = np.stack([lines.sums(found.counts[:, state]) for state in range(len(STATES))], axis=1)
    result: dict[int, list[LineCount]] = {}
    for owner, line, by_state in zip(
        number[lines.first].tolist(), found.line[lines.first].tolist(), counts.tolist(), strict=True
    ):
        result.setdefault(owner, []).append(LineCount(line, tuple(by_state)))
    for entries in result.values():
        entries.sort(key=lambda entry: (-entry.counts[RUNNING] - entry.counts[UNKNOWN], -entry.total, entry.line))
    return result
