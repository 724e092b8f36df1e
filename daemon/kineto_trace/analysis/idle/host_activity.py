"""What a thread of the host did at any moment, by its operators, annotations and calls, and what these are called."""

import re
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.idle.gil_waits import gil_waits
from kineto_trace.analysis.idle.idle_gaps import ALLOCATING, BLOCKING, BLOCKING_COPY
from kineto_trace.arrays.active_sets import ActiveSets, active_sets, ascending
from kineto_trace.arrays.intervals import Union, union
from kineto_trace.kernel_traits.kernel_types import communication_op_names, data_loading_names, matches
from kineto_trace.model.context import Context
from kineto_trace.model.trace import API_TABLES, OP_TABLES
from kineto_trace.structure.activity_links import NOTHING, calls, ops, step_names
from kineto_trace.structure.nesting import Nested, nest_tables
from kineto_trace.structure.python.library_calls import FrameKind
from kineto_trace.structure.python.python_frames import python_frames
from kineto_trace.structure.training_thread import training_thread

# Bits of what a thread does: data loading, a collective, CUDA's allocation, a call that waits for the GPU, any operator
# or call, an annotation, a wait for the GIL in an operator.
LOADS, COMMUNICATES, ALLOCATES, WAITS, WORKS, ANNOTATED, WANTS_GIL = (1 << number for number in range(7))

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
_LAUNCHED = re.compile(r"^(?:nccl|rccl|xccl|hccl):")  # collectives that the host launches and does not run itself


def host_activity(context: Context, thread: int) -> ActiveSets:
    """Returns what a thread did when (the bits above); outermost operators begin and end where something changes."""
    trace, called = context.trace, context.get(calls)
    strings, step = trace.strings, context.get(step_names)
    loading = context.get(data_loading_names)
    communicating = context.get(communication_op_names) & ~matches(strings, _LAUNCHED)
    tables = [table.take(table["thread"] == thread) for table in map(trace.table, OP_TABLES)]

    def ranges(*flags: Flags) -> Union:
        """The union of the rows of each table whose names are flagged."""
        rows = [mask[table["name"]] for mask, table in zip(flags, tables, strict=True)]
        start = [table["start"][row] for table, row in zip(tables, rows, strict=True)]
        end = [table.end()[row] for table, row in zip(tables, rows, strict=True)]
        return union(np.concatenate(start), np.concatenate(end))

    own = called.thread == thread
    name = called.name[own]

    def made(names: Flags) -> Union:
        return union(called.start[own][names[name]], called.end[own][names[name]])

    nothing = np.zeros(len(strings), np.bool_)
    operators, every = ranges(~step, nothing), made(~nothing)
    loads = ranges(loading, loading)
    frames = context.get(python_frames)
    if len(frames.row) and not frames.samples:
        events = frames.nested.events
        mine = (events.track == thread) & (frames.kind == FrameKind.DATA)
        loads = union(np.append(loads.start, events.start[mine]), np.append(loads.end, frames.nested.tree.end[mine]))
    found = active_sets(
        [
            loads,
            ranges(communicating, communicating),
            made(matches(strings, ALLOCATING)),
            made(matches(strings, BLOCKING) | matches(strings, BLOCKING_COPY)),
            union(np.append(operators.start, every.start), np.append(operators.end, every.end)),
            ranges(nothing, ~(step | loading | communicating)),
            context.get(gil_waits).get(thread, union(called.start[:0], called.end[:0])),
        ]
    )
    time = ascending(np.concatenate([found.time, _borders(context, thread)]))
    return ActiveSets(time, found.at(time))


def _borders(context: Context, thread: int) -> Ints:
    """Returns when the outermost operators of a thread begin and end: each is to have pieces of its own."""
    tree = context.get(ops)
    events, parent = tree.nested.events, tree.nested.tree.parent
    step = np.append(context.get(step_names)[context.trace.table("cpu_op")["name"][tree.row]], True)
    outermost = (events.track == thread) & step[parent]
    return np.concatenate([events.start[outermost], tree.nested.tree.end[outermost]])


class _Named(NamedTuple):
    """Nested events and their names (numbers into Trace.strings) by place."""

    nested: Nested
    name: npt.NDArray[np.int32]


def _annotations(context: Context) -> _Named:
    """All annotations but steps."""
    table = context.trace.table("user_annotation")
    table = table.take(~context.get(step_names)[table["name"]])
    nested = nest_tables([table], context.trace.window_end_ns)
    return _Named(nested, table["name"][nested.order])


def _loaders(context: Context) -> _Named:
    """What waits for the next batch."""
    tables = [context.trace.table(kind) for kind in OP_TABLES]
    tables = [table.take(context.get(data_loading_names)[table["name"]]) for table in tables]
    nested = nest_tables(tables, context.trace.window_end_ns)
    return _Named(nested, np.concatenate([table["name"] for table in tables])[nested.order])


def _made_calls(context: Context) -> _Named:
    tables = [context.trace.table(kind) for kind in API_TABLES]
    nested = nest_tables(tables, context.trace.window_end_ns)
    return _Named(nested, np.concatenate([table["name"] for table in tables])[nested.order])


def names_at(context: Context, thread: Ints, moment: Ints, *, loads: Flags, in_call: Flags) -> Ints:
    """Returns the name (number of a string) of what a thread, otherwise that of the steps, was in; NOTHING: nothing.

    That is the operator, otherwise the annotation, otherwise the call. loads: what loads data comes first. in_call: it
    is no annotation.
    """
    main = np.full(len(moment), context.get(training_thread))

    def of(named: _Named) -> Ints:
        found = np.full(len(moment), NOTHING)
        for each in (thread, main):
            missing = np.flatnonzero(found == NOTHING)
            if len(named.name) and len(missing):
                place = named.nested.innermost(each[missing].astype(np.uint32), moment[missing])
                found[missing] = np.where(place >= 0, named.name[place], NOTHING)
        return found

    tree = context.get(ops)
    annotated = of(context.get(_annotations))
    op = of(_Named(tree.nested, context.trace.table("cpu_op")["name"][tree.row]))
    found = np.where(op >= 0, op, np.where(in_call, NOTHING, annotated))
    if loads.any():
        loader = of(context.get(_loaders))
        found = np.where(loads, np.where(loader >= 0, loader, np.where(annotated >= 0, annotated, op)), found)
    return np.where(found == NOTHING, of(context.get(_made_calls)), found) if (found == NOTHING).any() else found
