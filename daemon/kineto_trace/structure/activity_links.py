"""Parts of a trace that many analyses use: GPU activities, calls, which op launched what, training steps.

Theory of operation
    A GPU activity belongs to the call with its correlation id, and to the op that is the innermost one around that
    call's start on its thread (attribution.py has the reasons). External ids are of use only where a trace has no
    record of the call, and only if they are consistent: in some traces they are copies of the correlation ids.

    Work of a CUDA graph belongs to the operator that added its node when the graph was captured, where that is known
    (captured_graphs.py). That operator has no row in the trace, only a name: Gpu.op remains the one that launched the
    graph.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.id_sets import lookup, unique_values
from kineto_trace.arrays.intervals import containing
from kineto_trace.arrays.row_groups import below_equals
from kineto_trace.kernel_traits.kernel_types import communication_names, matches
from kineto_trace.model.activity_tables import STEP_PREFIX
from kineto_trace.model.context import Context
from kineto_trace.model.trace import API_TABLES, GPU_TABLES, NO_STRING, OP_TABLES
from kineto_trace.structure.captured_graphs import captured_operators
from kineto_trace.structure.nesting import Nested, nest_tables
from kineto_trace.structure.steps.step_completeness import began_before, is_marked_incomplete, is_rest

NOTHING = -1
KERNEL, MEMCPY, MEMSET = range(3)  # Gpu.kind, numbers into GPU_TABLES
COLLECTIVE = '"Collective name"'  # an argument of kernels that NCCL launched for torch.distributed
_CONSISTENT = 0.9
_STEP = re.compile("^" + re.escape(STEP_PREFIX) + r"(\d+)$")

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Gpu:
    """All kernels, copies and fills in the order of their starts (Unix ns).

    kind: number into GPU_TABLES; row: in that table. track: dense number of (device, stream). call: place in Calls,
    op: row of cpu_op; NOTHING: none. communication: a kernel that is a collective or a transfer between GPUs.
    """

    kind: npt.NDArray[np.uint8]
    row: Ints
    start: Ints
    end: Ints
    name: npt.NDArray[np.int32]
    device: Ints
    stream: Ints
    track: Ints
    correlation: npt.NDArray[np.uint32]
    call: Ints
    op: Ints
    communication: Flags

    def __len__(self) -> int:
        return len(self.kind)


@dataclass(frozen=True, slots=True)
class Calls:
    """All runtime and driver calls, not sorted. kind: number into API_TABLES; row: in that table. op: row of cpu_op."""

    kind: npt.NDArray[np.uint8]
    row: Ints
    start: Ints
    end: Ints
    name: npt.NDArray[np.int32]
    thread: npt.NDArray[np.uint32]
    correlation: npt.NDArray[np.uint32]
    op: Ints

    def __len__(self) -> int:
        return len(self.kind)


@dataclass(frozen=True, slots=True)
class Steps:
    """Training steps ("ProfilerStep#N") in the order of their starts (Unix ns); may be empty.

    complete: recorded from beginning to end (structure/steps/step_completeness.py).
    """

    number: Ints
    start: Ints
    end: Ints
    thread: npt.NDArray[np.uint32]
    complete: Flags

    def __len__(self) -> int:
        return len(self.number)

    def at(self, moment: Ints) -> Ints:
        """Returns for each moment (Unix ns) the place of the step that runs then; NOTHING: none."""
        return containing(self.start, self.end, moment)

    def number_at(self, moment: Ints) -> Ints:
        """Returns for each moment (Unix ns) the number of the step that runs then; NOTHING: none."""
        return np.append(self.number, NOTHING)[self.at(moment)]


@dataclass(frozen=True, slots=True)
class Ops:
    """The tree of cpu_op. place: of each row among the sorted ops; row: of each place."""

    nested: Nested
    place: Ints
    row: Ints


def ops(context: Context) -> Ops:
    """Returns the operators nested by thread."""
    nested = nest_tables([context.trace.table("cpu_op")], context.trace.window_end_ns)
    row = nested.order.astype(np.int64)
    place = np.empty(len(row), np.int64)
    place[row] = np.arange(len(row))
    return Ops(nested, place, row)


def inside_equals(context: Context, key: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Tells for each row of cpu_op whether it runs inside one of the same key, whose totals have its time already."""
    tree = context.get(ops)
    return below_equals(key[tree.row], tree.nested.tree.stop)[tree.place]


def calls(context: Context) -> Calls:
    """Returns runtime and driver calls, each with the op around it."""
    tables = [context.trace.table(kind) for kind in reversed(API_TABLES)]  # of equal correlations the runtime's counts

    def joined(name: str) -> npt.NDArray[np.generic]:
        return np.concatenate([table[name] for table in tables])

    count = [len(table) for table in tables]
    start = np.concatenate([table["start"] for table in tables])
    thread = np.concatenate([table["thread"] for table in tables])
    tree = context.get(ops)
    found = tree.nested.innermost(thread, start).astype(np.int64)
    op = np.where(found >= 0, tree.row[found], NOTHING) if len(tree.row) else np.full(len(start), NOTHING)
    return Calls(
        kind=np.repeat(np.array([1, 0], np.uint8), count),
        row=np.concatenate([np.arange(n, dtype=np.int64) for n in count]),
        start=start,
        end=np.concatenate([table.end() for table in tables]),
        name=np.concatenate([table["name"] for table in tables]),
        thread=thread,
        correlation=np.concatenate([table["correlation"] for table in tables]),
        op=op,
    )


def gpu(context: Context) -> Gpu:
    """Returns GPU activities, each with the call and the op that it came from."""
    tables = [context.trace.table(kind) for kind in GPU_TABLES]
    columns = {
        name: np.concatenate([t[name] for t in tables])
        for name in ("start", "duration", "name", "device", "stream", "correlation", "external_id")
    }
    kind = np.repeat(np.arange(len(tables), dtype=np.uint8), [len(t) for t in tables])
    row = np.concatenate([np.arange(len(t), dtype=np.int64) for t in tables])
    order = np.argsort(columns["start"], kind="stable")
    columns = {name: column[order] for name, column in columns.items()}
    kind, row = kind[order], row[order]
    called = context.get(calls)
    call = lookup(columns["correlation"], called.correlation, np.arange(len(called)), NOTHING)
    call[columns["correlation"] == 0] = NOTHING
    op = np.where(call >= 0, called.op[call], NOTHING) if len(called) else np.full(len(call), NOTHING)
    op = _by_external_id(context, columns["external_id"], columns["correlation"], call, op)
    key = columns["device"].astype(np.int64) << 32 | columns["stream"].astype(np.int64)
    return Gpu(
        kind=kind,
        row=row,
        start=columns["start"],
        end=columns["start"] + columns["duration"],
        name=columns["name"],
        device=columns["device"].astype(np.int64),
        stream=columns["stream"].astype(np.int64),
        track=np.unique(key, return_inverse=True)[1].astype(np.int64),
        correlation=columns["correlation"],
        call=call,
        op=op,
        communication=_communicates(context, kind, row),
    )


def _communicates(context: Context, kind: npt.NDArray[np.uint8], row: Ints) -> Flags:
    found = np.zeros(len(row), np.bool_)
    kernels = np.flatnonzero(kind == KERNEL)
    found[kernels] = context.get(communication_kernels)[row[kernels]]
    return found


def communication_kernels(context: Context) -> Flags:
    """Tells for each kernel whether it communicates, by its name or by a collective described in the file."""
    table = context.trace.table("kernel")
    named: Flags = context.get(communication_names)[table["name"]]
    if "args" not in table.origin:
        return named
    texts = table.origin["args"]
    described = np.zeros(len(context.trace.strings) + 1, np.bool_)  # the last one is for NO_STRING
    for number in unique_values(texts).tolist():
        described[number] = number != NO_STRING and COLLECTIVE in context.trace.strings[number]
    found: Flags = named | described[texts]
    return found


def call_owners(context: Context) -> Ints:
    """For each of Calls the name (number of a string) of its op, else of the innermost annotation around it.

    Optimizers and extensions launch kernels outside any op; captures attribute these to annotations in the same way.
    """
    called, annotations = context.get(calls), context.trace.table("user_annotation")
    names = np.append(context.trace.table("cpu_op")["name"].astype(np.int64), NOTHING)
    found: Ints = names[called.op]
    missing = np.flatnonzero(found == NOTHING)
    if len(missing) and len(annotations):
        nested = nest_tables([annotations], context.trace.window_end_ns)
        inside = nested.innermost(called.thread[missing], called.start[missing])
        known = inside >= 0
        found[missing[known]] = annotations["name"][nested.order[inside[known]]]
    return found


def captured_ops(context: Context) -> Ints:
    """For each of Gpu the row of graph_op that added it to its CUDA graph; NOTHING: it has none, or it is unknown."""
    activity, found = context.get(gpu), context.get(captured_operators)
    result = np.full(len(activity), NOTHING, np.int64)
    for kind, name in enumerate(GPU_TABLES):
        own = activity.kind == kind
        result[own] = found[name][activity.row[own]]
    return result


def owners(context: Context) -> Ints:
    """For each of Gpu the name (number of a string) of the op or annotation that it belongs to; NOTHING: none."""
    operator = context.get(captured_ops)
    names = np.append(context.trace.table("graph_op")["name"].astype(np.int64), NOTHING)
    return np.where(operator >= 0, names[operator], context.get(launch_owners))


def launch_owners(context: Context) -> Ints:
    """For each of Gpu the name (number of a string) of the op or annotation that launched it; NOTHING: none.

    It differs from `owners` for work of CUDA graphs only.
    """
    activity = context.get(gpu)
    names = np.append(context.trace.table("cpu_op")["name"].astype(np.int64), NOTHING)
    called: Ints = np.append(context.get(call_owners), NOTHING)
    return np.where(activity.op >= 0, names[activity.op], called[activity.call])


def _by_external_id(
    context: Context, external: Ints, correlation: npt.NDArray[np.uint32], call: Ints, op: Ints
) -> Ints:
    """Finds the ops of activities whose call is missing, where external ids are trustworthy."""
    wanted = (call < 0) & (external != 0)
    table = context.trace.table("cpu_op")
    if not wanted.any() or not len(table):
        return op
    found = lookup(external.astype(np.uint64), table["id"].astype(np.uint64), np.arange(len(table)), NOTHING)
    if np.mean(external[external != 0] == correlation[external != 0]) > 0.5:
        return op
    known = (op >= 0) & (external != 0)
    if known.any() and np.mean(found[known] == op[known]) < _CONSISTENT:
        return op
    return np.where(wanted, found, op)


def step_names(context: Context) -> Flags:
    """Tells for each string of the trace whether an annotation of that name is a training step."""
    return matches(context.trace.strings, _STEP)


def steps(context: Context) -> Steps:
    """Returns the training steps that the host saw (a gpu_user_annotation is not a step)."""
    trace, names = context.trace, context.trace.strings
    found = {}
    tables = [trace.table(kind) for kind in reversed(OP_TABLES)]
    for table in tables:
        for number in unique_values(table["name"]).tolist():
            match = _STEP.match(names[number])
            if match is not None:
                found[number] = int(match[1])
    chosen = [table.take(np.flatnonzero(np.isin(table["name"], list(found)))) for table in tables]
    start, duration, thread, name, finished, inputs = (
        np.concatenate([table[column] for table in chosen])
        for column in ("start", "duration", "thread", "name", "finished", "inputs")
    )
    number = np.array([found[value] for value in name.tolist()], np.int64)
    complete = (finished != 0) & ~is_marked_incomplete(trace, inputs) & ~began_before(trace, number)
    order = np.argsort(start, kind="stable")
    result = Steps(number[order], start[order], (start + duration)[order], thread[order], complete[order])
    if is_rest(context, result.start, result.end):
        result.complete[-1] = False
    return result


def whole_steps(context: Context) -> Steps:
    """Returns the steps that were recorded from beginning to end; may be empty although there are steps."""
    found = context.get(steps)
    whole = found.complete
    return Steps(found.number[whole], found.start[whole], found.end[whole], found.thread[whole], whole[whole])
