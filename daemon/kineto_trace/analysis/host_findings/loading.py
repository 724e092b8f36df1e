"""Time that the step waits for the next batch: by what the DataLoader does meanwhile.

Theory of operation
    All moments below the DataLoader's iterator, or inside its annotation, count. Steps in which it starts worker
    processes belong to that, with the wait for their first batches, if they are several: once is the program's start.
    The rest is work in the training process, or waiting for workers. The finding names the user's function that has
    most of it, if one has.
"""

import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.host_findings import remedies
from kineto_trace.analysis.host_findings.host_figures import idleness, is_enough, margin, per_step
from kineto_trace.analysis.host_findings.user_code import main_kind
from kineto_trace.analysis.host_time.call_tree import inclusive
from kineto_trace.analysis.host_time.host_moments import NOTHING, below, moments, thread_slices
from kineto_trace.analysis.host_time.moment_classes import Class, moment_classes
from kineto_trace.analysis.host_time.user_calls import UserCalls, user_calls
from kineto_trace.analysis.host_time.user_lines import own_lines
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.model.context import Context
from kineto_trace.structure.python.code_places import code_place, functions_named
from kineto_trace.structure.python.library_calls import CallKind, function_kinds

MOST = 0.5  # of the time of loading in one function: then it is named
LEAST_STARTS = 2
_MORE = {
    CallKind.COLLATE: "Make batches of whole tensors in the data set, or collate in workers.",
    CallKind.NONE: "Make this function faster: vectorised, or done once and kept; a collate function works on whole "
    "tensors; a sampler draws all numbers at once.",
}

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


def loading(context: Context) -> Iterator[Finding]:
    """Yields findings about the DataLoader."""
    classes, found = context.get(moment_classes), context.get(moments)
    rows = np.flatnonzero((classes.kind == Class.LOADING) & (classes.weight > 0))
    if not len(rows):
        return
    starting = context.get(below_worker_start)[found.place[rows]]
    steps = unique_values(found.step[rows[starting]])
    if len(steps) >= LEAST_STARTS or (len(steps) and _ends_workers(context, rows[starting])):
        inside = np.isin(found.step[rows], steps)
        yield from _starts(context, rows[inside], len(steps))
        rows = rows[~inside]
    waits = context.get(user_calls).kind[found.place[rows]] == CallKind.WORKER_WAIT
    yield from _waits(context, rows[waits])
    yield from _works(context, rows[~waits])


def below_worker_start(context: Context) -> Flags:
    """Tells for each slice of the training thread whether it starts or ends workers, or runs below what does."""
    return below(context, context.get(function_kinds).call == CallKind.WORKER_START)


def _ends_workers(context: Context, rows: Ints) -> bool:
    """Tells whether workers are ended at these moments as well as started, which is no program's start."""
    found = context.get(moments)
    ends, starts = (
        bool(below(context, functions_named(context, re.compile(text)))[found.place[rows]].any())
        for text in (r"_shutdown_workers$", r"_MultiProcessingDataLoaderIter\.__init__$")
    )
    return ends and starts


def _starts(context: Context, rows: Ints, steps: int) -> Iterator[Finding]:
    weight = float(context.get(moment_classes).weight[rows].sum())
    if is_enough(context, weight, len(rows)):
        yield Finding(
            name="worker_start",
            title="The DataLoader starts its worker processes again and again",
            saving_ns=int(weight),
            advice="Keep the workers: DataLoader(persistent_workers=True), and make longer epochs.",
            evidence=f"{per_step(context, weight)}, {margin(context, weight)}, in {steps} steps in which workers are "
            "started or ended, the wait for their first batches included",
        )


def _waits(context: Context, rows: Ints) -> Iterator[Finding]:
    weight = float(context.get(moment_classes).weight[rows].sum())
    if is_enough(context, weight, len(rows)):
        yield Finding(
            name="loader_waits_for_workers",
            title="The step waits for the next batch from the DataLoader's workers",
            saving_ns=int(weight),
            advice="The workers are too slow or too few: raise num_workers (up to the number of processors; more, if "
            "they wait for storage) and prefetch_factor, or make the data set's __getitem__ and collate_fn faster.",
            evidence=f"{per_step(context, weight)}, {margin(context, weight)}; the workers are processes of their own "
            "and not in this trace: trace one by its pid to see what it does",
        )


def _works(context: Context, rows: Ints) -> Iterator[Finding]:
    calls, found, classes = context.get(user_calls), context.get(moments), context.get(moment_classes)
    weight = float(classes.weight[rows].sum())
    if not is_enough(context, weight, len(rows)):
        return
    own = np.bincount(calls.node[found.place[rows]], classes.weight[rows], len(calls))
    loaded = np.zeros(len(calls), np.bool_)
    loaded[calls.node[calls.loading]] = True
    named, part = _dominating(calls, loaded, inclusive(calls, own), weight)
    place, what = "", "The DataLoader makes the next batch in the training process"
    if named != NOTHING:
        line = _line(context, named, rows)
        found_at = code_place(context.trace.strings[int(calls.name[named])], line)
        place, what = str(found_at), f"Loading takes a part of each step, most of it {found_at.short}"
    share = classes.weight[rows] / max(weight, 1.0)
    kind = main_kind(calls.kind[found.place[rows]], share)
    more = _MORE.get(kind) or remedies.REMEDIES.get(kind) or _MORE[CallKind.NONE]
    idle = float((found.idle[rows] * share).sum())
    yield Finding(
        name="loading_in_the_step",
        title=what,
        saving_ns=int(weight),
        advice=remedies.LOADING.format(more=more),
        evidence=f"{per_step(context, weight)}, {margin(context, weight)}{idleness(context, idle)}"
        + (f"; {100 * part / weight:.0f} % of it in this function" if place else ""),
        where=place,
    )


def _dominating(calls: UserCalls, loaded: Flags, weight: Floats, total: float) -> tuple[int, float]:
    """Returns the innermost user's function with most of the time of loading, and its time; NOTHING: none."""
    found = NOTHING
    for node in np.flatnonzero(calls.user & loaded & (weight >= MOST * total)).tolist():
        found = node  # inner ones have larger numbers
    return found, float(weight[found]) if found != NOTHING else 0.0


def _line(context: Context, node: int, rows: Ints) -> int:
    """The line at which the function itself was most often; 0: it was not seen itself."""
    calls, found, slices = context.get(user_calls), context.get(moments), context.get(thread_slices)
    mine = rows[calls.node[found.place[rows]] == node]
    lines = context.get(own_lines)[slices.row[found.place[mine]]]
    lines = lines[lines > 0]
    if not len(lines):
        return 0
    values, counts = np.unique(lines, return_counts=True)
    return int(values[np.argmax(counts)])
