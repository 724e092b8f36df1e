"""Views of the host's part of training steps: phases, the program's hottest lines, loading, sampled Python.

When the training thread loads, computes forward and backward, and updates the parameters, by exact events.

Theory of operation
    Loading and the optimizer are annotations that torch makes. The backward is the time of the operators that
    autograd's engine runs, on any thread, since the training thread waits for them; the forward that of the outermost
    operators that have a backward. Short gaps in a phase (up to LONG_GAP_NS) are the cost of calling the operators and
    belong to it, unless another phase begins there. Where two phases overlap, the first one in the order of STEP_PHASES
    counts. The closure that an optimizer calls is no part of it. The rest is "other", so the parts of a step sum to its
    length.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from kineto_trace.analysis.host_time.moment_classes import (
    LONG_GAP_NS,
    MomentClass,
    annotated_time,
    moment_classes,
    optimizer_time,
)
from kineto_trace.analysis.host_time.user_calls import (
    host_steps,
    moments,
    own_callees,
    thread_slices,
    user_calls,
    user_lines,
)
from kineto_trace.arrays.intervals import Union, difference, union
from kineto_trace.arrays.row_groups import Groups, group
from kineto_trace.base.array_types import NOTHING, Ints
from kineto_trace.kernel_traits.kernel_types import data_loading_names
from kineto_trace.model.context import Context
from kineto_trace.model.line_counts import STATES, WAITS, LineCount, format_lines
from kineto_trace.model.trace import NO_STRING, Table, Trace
from kineto_trace.structure.activity_links import op_roles, ops
from kineto_trace.structure.library_calls import CallKind, code_place
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

NO_STEPS = "the trace has no training steps: the whole trace counts as one"
NO_PYTHON = "the trace has no Python functions of the training thread: record with --with-stack"
_PARTS = {
    MomentClass.OTHER: "other",
    MomentClass.LOADING: "loading",
    MomentClass.FORWARD: "forward",
    MomentClass.UNLINKED: "forward without backward",
    MomentClass.BACKWARD: "backward",
    MomentClass.OPTIMIZER: "optimizer",
    MomentClass.COMPILE: "compilation",
    MomentClass.ANOMALY: "anomaly mode",
}
_DOES = {
    CallKind.WORKER_WAIT: "waiting for workers",
    CallKind.WORKER_START: "starting workers",
    CallKind.COLLATE: "collating",
}
STEP_PHASES = ("loading", "forward", "backward", "optimizer")
OTHER = "other"
_MEANINGS = {
    "loading": "waiting for the next batch",
    "optimizer": "the optimizer's step and zero_grad",
    "backward": "operators that autograd runs in the backward pass",
    "forward": "operators that have a backward pass",
    OTHER: "everything else: the program's own code",
}
SamplesBy = Literal["function", "line"]


@view(
    "step_phases",
    columns(
        ("step", "text", "", 'step number; "average": mean of all steps; "all": the trace has no steps'),
        ("start_ns", "int", "ns", "start of the step, Unix time"),
        ("total_us", "float", "us", "length of the step on the host"),
        *((f"{name}_us", "float", "us", f"time: {_MEANINGS[name]}") for name in (*STEP_PHASES, OTHER)),
        *((f"{name}_pct", "float", "%", f"share of the step: {_MEANINGS[name]}") for name in (*STEP_PHASES, OTHER)),
    ),
)
def step_phase_times(context: Context) -> Answer:
    """Where the host time of each training step goes: loading, forward, backward, optimizer, other code.

    No GPU is needed. Loading and the optimizer come from torch's annotations, forward and backward from the operators
    and autograd's sequence numbers; gaps of up to a millisecond within a phase belong to it. Each moment counts once,
    so the phases add up to the length of the step. With a GPU, these are the times of the launches, not of the kernels.
    Steps that the recording cut off are left out if there are others.
    """
    window, times = context.get(host_steps), context.get(step_phases)
    names = [str(number) for number in window.number.tolist()] if window.told else ["all"]
    shares = np.column_stack([times, times.mean(axis=1)]) / 1000
    total = shares.sum(axis=0)
    values: dict[str, Any] = {
        "step": [*names, "average"],
        "start_ns": [*window.start.tolist(), None],
        "total_us": total,
    }
    for name, share in zip((*STEP_PHASES, OTHER), shares, strict=True):
        values[f"{name}_us"] = share
        values[f"{name}_pct"] = np.divide(100 * share, total, out=np.zeros_like(total), where=total > 0)
    notes = [] if window.told else [NO_STEPS]
    if not len(context.trace.table("cpu_op")):
        notes.append("the trace has no operators, so forward and backward count as other")
    return Answer(values, notes)


@view(
    "hot_lines",
    columns(
        ("function", "text", "", "function of the program's own code"),
        ("file", "text", "", "its file"),
        ("line", "int", "", "line that ran, or that made the running call; missing if unknown"),
        ("part", "text", "", "part of the step: loading, forward, backward, optimizer, other, …"),
        ("calls", "text", "", "library function that it called; for a C function, its name as written in the line"),
        ("time_us", "float", "us", "total time over all steps"),
        ("per_step_us", "float", "us", "time per training step"),
        ("share_pct", "float", "%", "share of the steps' time"),
        ("idle_pct", "float", "%", "share of this time in which the thread slept or waited"),
        ("moments", "int", "", "number of samples (or of pieces of recorded calls) behind this row"),
    ),
)
def hot_lines(context: Context) -> Answer:
    """The lines of the program's own code with the most time on the training thread, including everything they call.

    A moment belongs to the innermost function that is part of neither a package nor Python itself. Other threads, and
    time outside the steps, do not count. The line of a function that calls others is known only if nearly all samples
    of that call agree.
    """
    found, calls, classes = context.get(moments), context.get(user_calls), context.get(moment_classes)
    window = context.get(host_steps)
    inner = calls.user_slice[found.place] if len(calls) else found.place
    rows = np.flatnonzero(inner != NOTHING)
    lines = context.get(user_lines)[rows]
    slices, table, strings = context.get(thread_slices), context.trace.table("python_function"), context.trace.strings
    name = table["name"][slices.row[inner[rows]]].astype(np.int64)
    node = calls.node[found.place[rows]] if len(calls) else rows
    entry = np.where(calls.user[node], NOTHING, calls.name[node]) if len(calls) else rows
    names, callee = context.get(own_callees)
    callees = np.where(inner[rows] == found.place[rows], callee[slices.row[found.place[rows]]], NOTHING)
    groups = group([name, lines, classes.kind[rows], entry, callees])
    weight = np.bincount(groups.number, found.weight[rows], len(groups))
    idle = np.bincount(groups.number, (found.weight * found.idle)[rows], len(groups))
    order = np.argsort(-weight, kind="stable")
    first = groups.first[order]
    places = [code_place(strings[int(number)]) for number in name[first]]
    counted = len(window.start) if window.whole else 0
    return Answer(
        {
            "function": [place.shown for place in places],
            "file": [place.file for place in places],
            "line": [int(line) or None for line in lines[first]],
            "part": [_PARTS[MomentClass(kind)] for kind in classes.kind[rows][first].tolist()],
            "calls": [
                code_place(strings[number]).shown if number >= 0 else names[in_c] if in_c >= 0 else None
                for number, in_c in zip(entry[first].tolist(), callees[first].tolist(), strict=True)
            ],
            "time_us": weight[order] / 1000,
            "per_step_us": weight[order] / 1000 / counted if counted else [None] * len(order),
            "share_pct": 100 * weight[order] / max(window.total_ns, 1),
            "idle_pct": 100 * idle[order] / np.maximum(weight[order], 1),
            "moments": groups.sizes()[order],
        },
        [] if len(found) else [NO_PYTHON],
    )


@view(
    "data_loading",
    columns(
        ("what", "text", "", 'what the training thread does for the next batch; "all": the total'),
        ("function", "text", "", "function of the program's own code that does this, if any"),
        ("file", "text", "", "its file"),
        ("time_us", "float", "us", "total time over all steps"),
        ("per_step_us", "float", "us", "time per training step"),
        ("share_pct", "float", "%", "share of the steps' time"),
        ("idle_pct", "float", "%", "share of this time in which the thread slept or waited"),
        ("moments", "int", "", "number of samples (or of pieces of recorded calls) behind this row"),
    ),
)
def data_loading(context: Context) -> Answer:
    """How long the DataLoader blocks the training thread, and why: its own work, or waiting for workers.

    Worker processes are not in the trace of the training process: each has a trace of its own. Loading that does not
    use torch's DataLoader, such as an iterator in the program's own code, is not recognized; see the view hot_lines.
    """
    found, calls, classes = context.get(moments), context.get(user_calls), context.get(moment_classes)
    rows = np.flatnonzero(classes.kind == MomentClass.LOADING)
    window, table, strings = context.get(host_steps), context.trace.table("python_function"), context.trace.strings
    slices = context.get(thread_slices)
    inner = calls.user_slice[found.place[rows]]
    own = (inner != NOTHING) & calls.loading[inner] if len(rows) else inner == 0
    name = np.where(own, table["name"][slices.row[inner]], NOTHING) if len(rows) else inner
    kinds = np.where(own, CallKind.NONE, calls.kind[found.place[rows]]).astype(np.int64)
    groups = group([name, kinds]) if len(rows) else None
    weight = np.bincount(groups.number, found.weight[rows], len(groups)) if groups else np.empty(0)
    idle = np.bincount(groups.number, (found.weight * found.idle)[rows], len(groups)) if groups else np.empty(0)
    order = np.argsort(-weight, kind="stable")
    first = groups.first[order] if groups else order
    places = [code_place(strings[number]) if number >= 0 else None for number in name[first].tolist()]
    weight, idle = np.append(weight.sum(), weight[order]), np.append(idle.sum(), idle[order])
    counted = len(window.start) if window.whole else 0
    notes = [] if len(found) else [NO_PYTHON]
    if len(found) and not len(rows):
        notes.append("torch's DataLoader was not seen in the steps")
    return Answer(
        {
            "what": ["all", *(_DOES.get(CallKind(kind), "in the training process") for kind in kinds[first].tolist())],
            "function": [None, *(place.shown if place else None for place in places)],
            "file": [None, *(place.file if place else None for place in places)],
            "time_us": weight / 1000,
            "per_step_us": weight / 1000 / counted if counted else [None] * len(weight),
            "share_pct": 100 * weight / max(window.total_ns, 1),
            "idle_pct": 100 * idle / np.maximum(weight, 1),
            "moments": [len(rows), *(groups.sizes()[order].tolist() if groups else ())],
        },
        notes,
    )


def step_phases(context: Context) -> Ints:
    """Returns the time (ns) of each of STEP_PHASES, and of OTHER, in each step of host_steps: [phase, step]."""
    window = context.get(host_steps)
    taken, shares = union(np.empty(0, np.int64), np.empty(0, np.int64)), []
    for phase in phase_times(context):
        shares.append(difference(phase, taken).within(window.start, window.end))
        taken = union(np.concatenate([taken.start, phase.start]), np.concatenate([taken.end, phase.end]))
    shares.append(window.end - window.start - taken.within(window.start, window.end))
    return np.stack(shares)


def phase_times(context: Context) -> tuple[Union, Union, Union, Union]:
    """Returns when each of STEP_PHASES runs on the host; where they overlap, the first one counts."""
    thread, table, roles = context.get(host_steps).thread, context.trace.table("cpu_op"), context.get(op_roles)
    outermost = context.get(ops).nested.tree.parent[context.get(ops).place] < 0
    start, end = table["start"], table.end()
    backward = roles.backward & outermost
    forward = roles.linked & outermost & (table["thread"] == thread) & ~backward
    loading = annotated_time(context, context.get(data_loading_names))
    optimizer = context.get(optimizer_time)
    ahead, back = (union(start[chosen], end[chosen]) for chosen in (forward, backward))
    borders = [loading.start, optimizer.start]
    return (
        loading,
        _closed(ahead, np.concatenate([*borders, back.start])),
        _closed(back, np.concatenate([*borders, ahead.start])),
        optimizer,
    )


def _closed(found: Union, borders: Ints) -> Union:
    """Closes the union's short gaps that contain no border."""
    if not len(found.start):
        return found
    low, high = found.end[:-1], found.start[1:]
    borders = np.sort(borders)
    crossed = np.searchsorted(borders, high, side="left") > np.searchsorted(borders, low, side="left")
    apart = (high - low > LONG_GAP_NS) | crossed
    return Union(found.start[np.append(True, apart)], found.end[np.append(apart, True)])


# The view of sampled Python: functions and lines that ran.


@view(
    "python_samples",
    columns(
        ("function", "text", "", "function, written as `file(first line): name`"),
        ("line", "int", "", "executing line; with by=function, the line with the most samples"),
        (
            "running",
            "int",
            "",
            "samples in which it was the innermost frame and its thread ran, or was in an unknown state",
        ),
        ("running_pct", "float", "%", "share of all such samples"),
        ("running_us", "float", "us", "number of running samples times the sampling interval"),
        ("waiting", "int", "", "samples in which it was the innermost frame and its thread waited for the GIL"),
        (
            "idle",
            "int",
            "",
            "samples in which it was the innermost frame and its thread slept or waited",
        ),
        ("gil_holder", "text", "", "thread that most often held the GIL while the sampled thread waited for it"),
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
        notes.append("these samples do not record whether their threads were running, so they include idle threads")
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
