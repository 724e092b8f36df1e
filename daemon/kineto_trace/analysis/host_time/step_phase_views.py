"""Views of the host's part of training steps: phases, the program's hottest lines, loading.

When the training thread loads, computes forward and backward, and updates the parameters, by exact events.

Theory of operation
    Loading and the optimizer are annotations that torch makes. The backward is the time of the operators that
    autograd's engine runs, on any thread, since the training thread waits for them; the forward that of the outermost
    operators that have a backward. Short gaps in a phase (up to LONG_GAP_NS) are the cost of calling the operators and
    belong to it, unless another phase begins there. Where two phases overlap, the first one in the order of STEP_PHASES
    counts: an optimizer may be called with a closure that runs forward and backward. The rest is "other", so the parts
    of a step sum to its length.
"""

from typing import Any

import numpy as np

from kineto_trace.analysis.host_time.host_moments import host_steps, moments, thread_slices
from kineto_trace.analysis.host_time.moment_classes import (
    LONG_GAP_NS,
    OPTIMIZER,
    MomentClass,
    annotated_time,
    moment_classes,
)
from kineto_trace.analysis.host_time.user_calls import own_callees, user_calls, user_lines
from kineto_trace.arrays.intervals import Union, difference, union
from kineto_trace.arrays.row_groups import group
from kineto_trace.base.array_types import NOTHING, Ints
from kineto_trace.kernel_traits.kernel_types import data_loading_names, matches
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import ops
from kineto_trace.structure.fwd_bwd import op_roles
from kineto_trace.structure.library_calls import CallKind, code_place
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
    "backward": "operators that autograd runs backward",
    "forward": "operators that have a backward",
    OTHER: "all else: the program's own code",
}


@view(
    "step_phases",
    columns(
        ("step", "text", "", 'number of the step; "average": the mean of all; "all": the trace has no steps'),
        ("start_ns", "int", "ns", "start of the step, Unix time"),
        ("total_us", "float", "us", "length of the step on the host"),
        *((f"{name}_us", "float", "us", f"time in {_MEANINGS[name]}") for name in (*STEP_PHASES, OTHER)),
        *((f"{name}_pct", "float", "%", f"share of the step: {_MEANINGS[name]}") for name in (*STEP_PHASES, OTHER)),
    ),
)
def step_phase_times(context: Context) -> Answer:
    """Where the host's time of each training step goes: loading, forward, backward, optimizer, other code.

    Needs no GPU. Loading and the optimizer are the annotations that torch makes, backward and forward come from the
    operators and autograd's numbers; gaps of up to a millisecond within a phase belong to it. Each moment counts once,
    so a row sums to the length of the step. With a GPU these are the times of the launches, not of the kernels. Steps
    that the recording cut off are left out if there are others.
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
        notes.append("the trace has no operators, so forward and backward are part of other")
    return Answer(values, notes)


@view(
    "hot_lines",
    columns(
        ("function", "text", "", "function of the program's own code"),
        ("file", "text", "", "its file"),
        ("line", "int", "", "line that ran, or that called what ran; missing if it is not known"),
        ("part", "text", "", "part of the step: loading, forward, backward, optimizer, other, …"),
        ("calls", "text", "", "the library function that it called, or the C function as the line names it"),
        ("time_us", "float", "us", "time, over all steps"),
        ("per_step_us", "float", "us", "the same per training step"),
        ("share_pct", "float", "%", "share of the steps' time"),
        ("idle_pct", "float", "%", "share of that in which the thread slept or waited"),
        ("moments", "int", "", "number of samples (or of pieces of exact calls) that this comes from"),
    ),
)
def hot_lines(context: Context) -> Answer:
    """The lines of the program's own code with the most time on the training thread, including everything they call.

    A moment belongs to the innermost function that is neither of a package nor of Python itself. Other threads, and
    time outside the steps, do not count. The line of a function that calls others is known where nearly all samples of
    that call agree.
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
    counted = len(window.start) if window.told else 0
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
        ("what", "text", "", 'what the training thread does for the next batch; "all": all of it'),
        ("function", "text", "", "function of the program's own code in which it does that, if any"),
        ("file", "text", "", "its file"),
        ("time_us", "float", "us", "time, over all steps"),
        ("per_step_us", "float", "us", "the same per training step"),
        ("share_pct", "float", "%", "share of the steps' time"),
        ("idle_pct", "float", "%", "share of that in which the thread slept or waited"),
        ("moments", "int", "", "number of samples (or of pieces of exact calls) that this comes from"),
    ),
)
def data_loading(context: Context) -> Answer:
    """How long the DataLoader blocks the training thread, and why: its own work, or waiting for workers.

    Worker processes are not in the trace of the training process: each has a trace of its own pid. An iterator of the
    program's own, without torch's DataLoader, is not recognized; the view hot_lines shows it.
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
    counted = len(window.start) if window.told else 0
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
    optimizer = annotated_time(context, matches(context.trace.strings, OPTIMIZER))
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
