"""Views of sampled Python: which functions and lines ran, and what each thread did."""

from typing import Any

import numpy as np

from kineto_trace.arrays.row_groups import group
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from kineto_trace.model.line_counts import STATES, LineCount, format_lines
from kineto_trace.structure.python_samples import (
    IDLE,
    RUNNING,
    UNKNOWN,
    WAITING,
    LineSamples,
    line_samples,
    sample_period_ns,
)
from kineto_trace.structure.thread_use import is_native, thread_use, window_ns
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

BY = ("function", "line")


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
        ("threads", "int", "", "number of threads seen in it"),
        ("lines", "text", "", "with by=function: its samples by line, the line with the most samples first"),
    ),
)
def python_samples(context: Context, *, by: str = "line", thread: str = "", idle: bool = True) -> Answer:
    """Where sampled Python code ran, by function and line: most running samples first, idle code last.

    Only the innermost Python frame of a sample counts, including all C code that it called. Samples of unknown state
    (from older captures) count as running.

    Options:
    - by: "line", or "function" for one row per function.
    - thread: only threads whose name contains this text.
    - idle: false leaves out code that was only ever seen idle.
    """
    if by not in BY:
        raise ViewError(f"view python_samples: by={by!r} is not valid; use {' or '.join(BY)}")
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
    values: dict[str, Any] = {
        "function": [trace.strings[number] for number in name[groups.first[order]].tolist()],
        "line": [line or None for line in shown],
        "running": busy[order],
        "running_pct": 100 * busy[order] / max(int(busy.sum()), 1),
        "running_us": busy[order] * period_us if period_us else [None] * len(order),
        "waiting": counts[order, WAITING],
        "idle": counts[order, IDLE],
        "threads": threads[order],
        "lines": [format_lines(entry for entry in lines[place] if entry.line) if lines else None for place in order],
    }
    notes = [] if len(order) else ["the trace has no samples of Python stacks"]
    if len(order) and not counts[:, [RUNNING, WAITING, IDLE]].any():
        notes.append("these samples do not say whether their threads ran, so idle threads are among them")
    return Answer(values, notes)


def _of_threads(context: Context, found: LineSamples, text: str) -> LineSamples:
    if not text:
        return found
    names = context.trace.target.threads
    wanted = [tid for tid, name in names.items() if text in name]
    own = np.isin(context.trace.table("python_function")["thread"][found.row], wanted)
    return LineSamples(found.row[own], found.line[own], found.counts[own])


def _lines(found: LineSamples, number: Any) -> dict[int, list[LineCount]]:
    """For each group its lines, the one with the most busy samples first."""
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


@view(
    "threads",
    columns(
        ("thread", "int", "", "system thread id"),
        ("name", "text", "", "name in Python, otherwise the kernel's"),
        ("python", "bool", "", "whether Python was seen running in it"),
        ("cpu_us", "float", "us", "CPU time"),
        ("cpu_pct", "float", "%", "CPU time as a share of the trace; 100 is one core all the time"),
        (
            "samples",
            "int",
            "",
            "number of samples; threads without Python are sampled only when they have used CPU time",
        ),
        ("running", "int", "", "samples in which it had run most of the time since the previous sample"),
        ("waiting", "int", "", "samples in which it waited for the GIL"),
        ("idle", "int", "", "samples in which it was off the CPU for another reason"),
        ("has_gil", "int", "", "samples in which it held the GIL"),
    ),
)
def threads(context: Context) -> Answer:
    """What each sampled thread did, including threads without Python; those with the most CPU time first."""
    trace = context.trace
    uses = thread_use(trace.target)
    names = trace.target.threads
    values = {
        "thread": [use.thread for use in uses],
        "name": [names.get(use.thread) for use in uses],
        "python": [not is_native(use) for use in uses],
        "cpu_us": [use.cpu_ns / 1000 for use in uses],
        "cpu_pct": [100 * use.cpu_ns / window_ns(trace) for use in uses],
        "samples": [use.samples for use in uses],
        "running": [use.running for use in uses],
        "waiting": [use.waiting for use in uses],
        "idle": [use.idle for use in uses],
        "has_gil": [use.has_gil for use in uses],
    }
    return Answer(values, [] if uses else ["the trace has no samples of threads, so what they did is unknown"])
