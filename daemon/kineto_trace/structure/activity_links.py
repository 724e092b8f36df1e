"""Parts of a trace that many analyses use: GPU activities, calls, their ops, training steps, forward and backward.

Theory of operation
    A GPU activity belongs to the call with its correlation id, and to the op that is the innermost one around that
    call's start on its thread (nesting.py has the reasons). External ids are of use only where a trace has no
    record of the call, and only if they are consistent: in some traces they are copies of the correlation ids.

    Work of a CUDA graph belongs to the operator that added its node when the graph was captured, where that is known
    (captured_graphs.py). That operator has no row in the trace, only a name: Gpu.op remains the one that launched the
    graph.

Which training steps were recorded from their beginning to their end.
    A step that the recording cut off does not show how long a step takes, so no mean may count it.

    Captures of kinetod state it: a step that had begun before the window, or had not ended in it, has the argument
    "complete": false (decode/iterations.py), and steps running at the end are not `finished`. Stored traces of earlier
    versions state when each step began, in `TargetInfo.iterations`.

    torch.profiler writes a step when it ends, and ends the last one itself when it stops. If the program leaves its
    loop before the schedule's last step, that one is a remainder: it contains little more than the end of the loop. The
    file does not mark it, but its work shows it: it is taken to be incomplete if it contains far fewer operators and
    calls than any other step. If the others contain little themselves, nothing is concluded.

The GPUs of a trace: their properties and vendor.
    Kineto numbers the devices in its deviceProperties as the program sees them, from 0 on, but AMD's kernels carry the
    number of a node of the host. If none of the devices that did work has properties, and those in the trace are alike
    except for their numbers, these are theirs: the program saw no other GPUs.

    The vendor follows from the properties, otherwise from the calls: some drivers leave the names of AMD's GPUs empty.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kineto_trace.arrays.id_sets import lookup, unique_values
from kineto_trace.arrays.intervals import containing
from kineto_trace.arrays.row_groups import below_equals, in_subtrees, sums
from kineto_trace.base.array_types import NOTHING, AnyArray, Flags, Ints, Ints32, UInts8, UInts32
from kineto_trace.decode.iterations import COMPLETE
from kineto_trace.kernel_traits.gpu_vendors import WORDS, GpuVendor, VendorWords, vendor_of_calls, vendor_of_properties
from kineto_trace.kernel_traits.kernel_types import communication_names, matches
from kineto_trace.model.activity_tables import STEP_PREFIX
from kineto_trace.model.context import Context
from kineto_trace.model.trace import API_TABLES, GPU_TABLES, NO_SEQUENCE, NO_STRING, OP_TABLES, Table, Trace
from kineto_trace.structure.captured_graphs import captured_operators
from kineto_trace.structure.event_arguments import parse
from kineto_trace.structure.nesting import Nested, nest_tables
from kineto_trace.structure.python_frames import python_tree

KERNEL, MEMCPY, MEMSET = range(3)  # Gpu.kind, numbers into GPU_TABLES
COLLECTIVE = '"Collective name"'  # an argument of kernels that NCCL launched for torch.distributed
_CONSISTENT = 0.9
_STEP = re.compile("^" + re.escape(STEP_PREFIX) + r"(\d{1,18})$")
_LITTLE = 0.5  # of the work of the step with the least work, for the last of at least three steps
_ALMOST_NOTHING = 0.02  # the same for the last of two: the first may have compiled
_ENOUGH_WORK = 50  # operators and calls in each of the other steps, needed for such a conclusion
_OWN = ("id", "uuid")  # keys that differ between devices
Properties = Mapping[int, Mapping[str, Any]]
FUNCTION, BACKWARD_FUNCTION = 0, 1  # at::RecordScope
EVALUATE_FUNCTION = "autograd::engine::evaluate_function: "
NO_THREAD = 0
Weighted = tuple[UInts32, Ints]  # threads, any number of times, and what counts for each


@dataclass(frozen=True, slots=True)
class Gpu:
    """All kernels, copies and fills in the order of their starts (Unix ns).

    kind: number into GPU_TABLES.
    row: in that table.
    track: dense number of (device, stream).
    call: place in Calls, or NOTHING.
    op: row of cpu_op, or NOTHING.
    communication: a kernel that is a collective or a transfer between GPUs.
    """

    kind: UInts8
    row: Ints
    start: Ints
    end: Ints
    name: Ints32
    device: Ints
    stream: Ints
    track: Ints
    correlation: UInts32
    call: Ints
    op: Ints
    communication: Flags

    def __len__(self) -> int:
        return len(self.kind)


@dataclass(frozen=True, slots=True)
class Calls:
    """All runtime and driver calls, not sorted.

    kind: number into API_TABLES.
    row: in that table.
    op: row of cpu_op.
    """

    kind: UInts8
    row: Ints
    start: Ints
    end: Ints
    name: Ints32
    thread: UInts32
    correlation: UInts32
    op: Ints

    def __len__(self) -> int:
        return len(self.kind)


@dataclass(frozen=True, slots=True)
class Steps:
    """Training steps ("ProfilerStep#N") in the order of their starts (Unix ns); may be empty.

    complete: recorded from beginning to end.
    """

    number: Ints
    start: Ints
    end: Ints
    thread: UInts32
    complete: Flags

    def __len__(self) -> int:
        return len(self.number)

    def at(self, moment: Ints) -> Ints:
        """Returns for each moment (Unix ns) the place of the step that runs then, or NOTHING."""
        return containing(self.start, self.end, moment)

    def number_at(self, moment: Ints) -> Ints:
        """Returns for each moment (Unix ns) the number of the step that runs then, or NOTHING."""
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


def inside_equals(context: Context, key: AnyArray) -> Flags:
    """Returns for each row of cpu_op whether it is nested in one of the same key, whose totals include its time."""
    tree = context.get(ops)
    return below_equals(key[tree.row], tree.nested.tree.stop)[tree.place]


def calls(context: Context) -> Calls:
    """Returns runtime and driver calls, each with the op around it."""
    tables = [context.trace.table(kind) for kind in reversed(API_TABLES)]  # of equal correlations the runtime's counts

    def joined(name: str) -> AnyArray:
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
    """Returns GPU activities, each with its call and op."""
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


def _communicates(context: Context, kind: UInts8, row: Ints) -> Flags:
    found = np.zeros(len(row), np.bool_)
    kernels = np.flatnonzero(kind == KERNEL)
    found[kernels] = context.get(communication_kernels)[row[kernels]]
    return found


def communication_kernels(context: Context) -> Flags:
    """Returns for each kernel whether it communicates, by its name or by a collective described in the file."""
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
    """Returns for each of Calls the name (string number) of its op, else of the innermost annotation around it.

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
    """Returns for each of Gpu the row of graph_op that added it to its CUDA graph, or NOTHING."""
    activity, found = context.get(gpu), context.get(captured_operators)
    result = np.full(len(activity), NOTHING, np.int64)
    for kind, name in enumerate(GPU_TABLES):
        own = activity.kind == kind
        result[own] = found[name][activity.row[own]]
    return result


def owners(context: Context) -> Ints:
    """Returns for each of Gpu the name (string number) of the op or annotation that it belongs to, or NOTHING."""
    operator = context.get(captured_ops)
    names = np.append(context.trace.table("graph_op")["name"].astype(np.int64), NOTHING)
    return np.where(operator >= 0, names[operator], context.get(launch_owners))


def launch_owners(context: Context) -> Ints:
    """Returns for each of Gpu the name (string number) of the op or annotation that launched it, or NOTHING.

    It differs from `owners` for work of CUDA graphs only.
    """
    activity = context.get(gpu)
    names = np.append(context.trace.table("cpu_op")["name"].astype(np.int64), NOTHING)
    called: Ints = np.append(context.get(call_owners), NOTHING)
    return np.where(activity.op >= 0, names[activity.op], called[activity.call])


def _by_external_id(context: Context, external: Ints, correlation: UInts32, call: Ints, op: Ints) -> Ints:
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
    """Returns for each string of the trace whether an annotation of that name is a training step."""
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
    if is_remainder(context, result.start, result.end):
        result.complete[-1] = False
    return result


def whole_steps(context: Context) -> Steps:
    """Returns the steps that were recorded from beginning to end; may be empty although there are steps."""
    found = context.get(steps)
    whole = found.complete
    return Steps(found.number[whole], found.start[whole], found.end[whole], found.thread[whole], whole[whole])


def is_marked_incomplete(trace: Trace, texts: Ints32) -> Flags:
    """Tells for each text of arguments (number into Trace.strings) whether it has the argument "complete": false."""
    used = [number for number in unique_values(texts).tolist() if number != NO_STRING]
    found: Flags = np.isin(texts, [n for n in used if parse(trace.strings[n]).get(COMPLETE) is False])
    return found


def began_before(trace: Trace, number: Ints) -> Flags:
    """Returns which steps of a capture began before its window, for traces that were stored without the argument."""
    early = [each[0] for each in trace.target.iterations if each[1] < trace.window_start_ns]
    found: Flags = np.isin(number, early)
    return found


def is_remainder(context: Context, start: Ints, end: Ints) -> bool:
    """Returns whether the last of these steps of another profiler has far less work than any other step."""
    head = context.trace.head
    if head is None or "kinetod" in head or len(start) < 2:
        return False
    little = _LITTLE if len(start) > 2 else _ALMOST_NOTHING
    times = [context.trace.table(kind)["start"] for kind in (*OP_TABLES, *API_TABLES)]
    last = sum(int(np.count_nonzero((time >= start[-1]) & (time < end[-1]))) for time in times)
    if last * (len(start) - 1) >= little * sum(map(len, times)):
        return False  # not less than the mean of the others
    work = np.zeros(len(start), np.int64)
    for time in times:
        at = containing(start, end, time)
        work += np.bincount(at[at >= 0], minlength=len(start))
    least = int(np.min(work[:-1]))
    return least >= _ENOUGH_WORK and last < little * least


def device_properties(context: Context) -> Properties:
    """Returns the properties of each GPU, by its number."""
    trace = context.trace
    found: dict[int, Mapping[str, Any]] = {
        item["id"]: item for item in trace.devices if isinstance(item.get("id"), int)
    }
    used = {device for kind in GPU_TABLES for device in unique_values(trace.table(kind)["device"]).tolist()}
    alike = {
        tuple(sorted((key, str(value)) for key, value in item.items() if key not in _OWN)) for item in found.values()
    }
    if len(alike) == 1 and used.isdisjoint(found):
        common = {key: value for key, value in next(iter(found.values())).items() if key not in _OWN}
        found |= {device: {**common, "id": device} for device in used}
    return found


def gpu_vendor(context: Context) -> GpuVendor:
    """Returns the vendor of the GPUs that worked in the trace."""
    vendors = {vendor_of_properties(item) for item in context.get(device_properties).values()}
    named = vendors - {GpuVendor.UNKNOWN}
    if len(named) == 1:
        return named.pop()
    trace = context.trace
    numbers = {number for kind in API_TABLES for number in unique_values(trace.table(kind)["name"]).tolist()}
    return vendor_of_calls(trace.strings[number] for number in sorted(numbers))


def vendor_words(context: Context) -> VendorWords:
    """Returns the terms of the vendor of the trace's GPUs."""
    return WORDS[context.get(gpu_vendor)]


# Matches backward operators to forward operators, and finds the training thread.
#
# Theory of operation
# Autograd numbers its graph nodes per thread. Every op shows the number that the next node of its thread will get, so
# several ops have the same one: the op that makes the node is the last of them to begin. A backward op has the number
# of its node and torch's number of the thread that made the node.
#
# The rule is that of PyTorch's own links. Ops are visited in the order of their ends. A forward op replaces the one
# remembered for its thread and number if it did not start before it. A backward op is linked to the remembered one,
# which is then forgotten, so that every number gives one link, unless later forward ops reuse it. (The op
# "autograd::engine::evaluate_function: X" around a backward op ends after it and finds no forward op any more.)
#
# As array work: with the ops sorted by thread, number and end, every backward op ends a segment; its forward op is
# the last to start in its segment.
#
# The rule for the training thread, shared by all analyses of the host:
#
# The thread with most steps trains; completely recorded steps take precedence. In a trace without steps, it is the
# thread with most time in operators, without those that autograd runs backward on threads of its own. Without
# operators it is the thread that launches most GPU work, otherwise the one on which Python was busy longest (in
# samples that were not idle, or in recorded calls).


class ForwardBackward(NamedTuple):
    """Rows of cpu_op: forward_rows[n] made the node that backward_rows[n] ran; in order of the backward's ends."""

    forward_rows: Ints
    backward_rows: Ints


@dataclass(frozen=True, slots=True)
class OpRoles:
    """Per row of cpu_op: whether its outermost operator has a backward; whether it is, or is inside, a backward."""

    linked: Flags
    backward: Flags


def forward_backward(tables: Mapping[str, Table]) -> ForwardBackward:
    """Returns the pairs of a trace. Ops without a sequence number, or of threads with an unknown number, have none."""
    ops = tables.get("cpu_op")
    if ops is None or not (ops["forward_thread"] > 0).any():
        return ForwardBackward(np.empty(0, np.int64), np.empty(0, np.int64))
    backward = ops["forward_thread"] > 0
    thread = np.where(backward, ops["forward_thread"], ops["torch_thread"])
    usable = (ops["sequence"] >= 0) & (thread > 0) & (backward | (ops["scope"] != BACKWARD_FUNCTION))
    rows = np.flatnonzero(usable)
    thread, sequence, start, end = (column[rows] for column in (thread, ops["sequence"], ops["start"], ops.end()))
    order = np.lexsort((end, sequence, thread))
    rows, thread, sequence, start = (column[order] for column in (rows, thread, sequence, start))
    closes = backward[rows]
    opens = np.ones(len(rows), np.bool_)
    opens[1:] = (thread[1:] != thread[:-1]) | (sequence[1:] != sequence[:-1]) | closes[:-1]
    segment = np.cumsum(opens) - 1
    return _pairs(rows, start, end[order], segment, closes)


def _pairs(rows: Ints, start: Ints, end: Ints, segment: Ints, closes: Flags) -> ForwardBackward:
    """Returns each closing op with the op of its segment that started last (of equal starts: that ended last)."""
    forward = np.flatnonzero(~closes)
    forward = forward[np.lexsort((start[forward], segment[forward]))]  # stable: the order of ends remains
    last = np.ones(len(forward), np.bool_)
    last[:-1] = segment[forward][1:] != segment[forward][:-1]
    chosen = np.full(int(segment[-1]) + 1 if len(segment) else 0, -1, np.int64)
    chosen[segment[forward[last]]] = forward[last]
    closing = np.flatnonzero(closes)
    closing = closing[chosen[segment[closing]] >= 0]
    closing = closing[np.lexsort((rows[closing], end[closing]))]
    return ForwardBackward(rows[chosen[segment[closing]]], rows[closing])


def with_evaluated_sequences(ops: Table, strings: Sequence[str]) -> Table:
    """Returns cpu_op with the numbers of backward ops copied to the "evaluate_function" ops right before them.

    PyTorch does this before it writes a trace; an observer of the ops sees no numbers on them.
    """
    evaluate = np.array([text.startswith(EVALUATE_FUNCTION) for text in strings], np.bool_)
    if not len(ops) or not evaluate.any():
        return ops
    order = np.lexsort((ops["start"], ops["thread"]))
    first, second = order[:-1], order[1:]
    follows = (ops["thread"][first] == ops["thread"][second]) & (ops["scope"][second] == BACKWARD_FUNCTION)
    follows &= (
        (ops["scope"][first] == FUNCTION) & evaluate[ops["name"][first]] & (ops["sequence"][first] == NO_SEQUENCE)
    )
    target, source = first[follows], second[follows]
    columns = {name: ops[name].copy() for name in ("sequence", "forward_thread")}
    for name, column in columns.items():
        column[target] = ops[name][source]
    return ops.with_columns(columns)


def op_roles(context: Context) -> OpRoles:
    """Returns the roles of all operators."""
    trace, tree = context.trace, context.get(ops)
    table = trace.table("cpu_op")
    outermost = np.cumsum(tree.nested.tree.parent < 0)[tree.place]  # a number that all nested operators share
    linked = np.isin(outermost, unique_values(outermost[forward_backward(trace.tables).forward_rows]))
    evaluates = np.array([text.startswith(EVALUATE_FUNCTION) for text in trace.strings], np.bool_)
    backward = (evaluates[table["name"]] if len(table) else linked) | (table["forward_thread"] > 0)
    return OpRoles(linked, in_subtrees(backward[tree.row], tree.nested.tree.stop)[tree.place])


def training_thread(context: Context) -> int:
    """Returns the training thread; NO_THREAD if no row of the trace has a thread."""
    for rule in _RULES:
        thread, weight = rule(context)
        if weight.any():
            threads, place = np.unique(thread, return_inverse=True)
            return int(threads[np.argmax(sums(place.reshape(-1), weight, len(threads)))])
    return NO_THREAD


def _of_steps(context: Context) -> Weighted:
    found = context.get(whole_steps)
    found = found if len(found) else context.get(steps)
    return found.thread, np.ones(len(found), np.int64)


def _of_operators(context: Context) -> Weighted:
    table, tree = context.trace.table("cpu_op"), context.get(ops)
    evaluates = np.array([text.startswith(EVALUATE_FUNCTION) for text in context.trace.strings], np.bool_)
    forward = (tree.nested.tree.parent[tree.place] < 0) & (table["forward_thread"] == 0)
    rows = np.flatnonzero(forward)
    rows = rows[~evaluates[table["name"][rows]]]
    return table["thread"][rows], table["duration"][rows]


def _of_launches(context: Context) -> Weighted:
    call = context.get(gpu).call
    thread = context.get(calls).thread[call[call >= 0]]
    return thread, np.ones(len(thread), np.int64)


def _of_python(context: Context) -> Weighted:
    table = context.trace.table("python_function")
    if table["self_samples"].any():
        return table["thread"], table["self_samples"].astype(np.int64) - table["idle"]
    nested = context.get(python_tree)
    rows = nested.order[nested.tree.parent < 0]
    return table["thread"][rows], table["duration"][rows]


_RULES: tuple[Callable[[Context], Weighted], ...] = (_of_steps, _of_operators, _of_launches, _of_python)
