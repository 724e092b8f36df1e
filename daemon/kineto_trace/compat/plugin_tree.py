"""The operator tree of the TensorBoard plug-in and its figures, by its exact rules (its last version).

Theory of operation
    Per thread, in the order of start and then of the latest end, a node is a child of the innermost node that has
    not ended when it starts. A node that outlives that one is dropped; what is inside it is not.

    A node whose only child has the same name, both being operators, replaces that child: it has the child's children
    and calls, its own calls are lost. In preorder such a child comes right after its parent, so that chains of them are
    contiguous. The tree here (`Tree`) is the result, in preorder.

    A call belongs to the node with its external id: the first of several, in the order of threads' first nodes and then
    of starts, even if that was dropped or replaced, and the call is lost. A call without an external id belongs to no
    node. GPU activities belong to the call with their correlation id.

    host self is the total less the children and less the own calls; device total is the plain sum of all GPU
    activities below. A node of the type operator is eligible for tensor cores by its name, by a kernel of its own
    calls, or if a child is.

    Backward operators: plugin_backward.py moves them; `visits` counts how often the plug-in visits each node when it
    collects the operators.

The parts of the TensorBoard plug-in's operator tree: nodes, calls and GPU activities, by the plug-in's rules.
    The plug-in computes with the microseconds of the file as doubles: the end of an event is start + duration, rounded.
    Adjacent events may then overlap by a fraction of a nanosecond, and an operator that overlaps another one in part is
    dropped from the tree. So the same doubles are computed here: integers that a double holds, divided by 1000; larger
    ones from the whole microseconds and the rest.

    Nodes are operators, steps ("ProfilerStep#N", also those that gpu_user_annotation shows), calls of nn.Module,
    and of the annotations only data loading, optimizer steps and the ten collectives that the plug-in knows. Their
    thread is the number in the file; that of a gpu_user_annotation is its stream. Events of the old category "python"
    are nodes, but not operators.

    Of traces of PyTorch Lightning (`Framework`) the modules are operators called "[pl][module]…", Python calls do
    not count, and operators called "[pl][profile]…" are not part of this tree.

Which kernels use tensor cores and which operators could, by the TensorBoard plug-in's lists of names of 2021.

It searches for parts of the kernels' names only: it misses Hopper's kernels and counts the ffma kernels of xmma_gemm as
kernels with tensor cores.
"""

import json
import re
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from kineto_trace.arrays.codec import OVERLAPS, Events, Interner
from kineto_trace.arrays.id_sets import distinct, lookup, unique_values
from kineto_trace.base.array_types import NOTHING, AnyArray, Flags, Floats, Ints, Ints32, UInts8, UInts32
from kineto_trace.formats.chrome.chrome_tables import whole_number
from kineto_trace.kernel_traits.precisions import AUTOCAST_OPS
from kineto_trace.model.activity_tables import DUR_REAL, FIRST_ARG_BIT, KINDS, STEP_PREFIX, TS_REAL
from kineto_trace.model.context import Context
from kineto_trace.model.trace import GPU_TABLES, NO_MODULE, OP_TABLES, TEXT_ID, Table, Trace
from kineto_trace.structure.module_calls import LIGHTNING_MODULE, is_lightning
from kineto_trace.structure.trace_forms import in_categories, runtime_calls

EXACT_IN_DOUBLE = 1 << 53
COLLECTIVES = frozenset(
    f"{library}:{name}"
    for library in ("nccl", "gloo")
    for name in ("broadcast", "reduce", "all_reduce", "all_gather", "reduce_scatter")
)
NO_OPERATORS = frozenset({"DataParallel.forward", "DistributedDataParallel.forward"})
LIGHTNING_PROFILE = "[pl][profile]"
TABLES = ("python_function", "user_annotation", "cpu_op", "gpu_user_annotation", "other")  # by number
PYTHON_FUNCTION, CPU_OP, OTHER = 0, 2, 4
_DATA_LOADER = re.compile(r"enumerate\(DataLoader\)#.*\.__next__$|enumerate\(DataPipe\)#", re.DOTALL)
TRIMONTH_NS = 7_889_238 * 10**9  # of Kineto's baseTimeNanoseconds, as in formats/chrome/chrome_writer.py
PLUGIN_KERNELS = (
    "h884", "s884", "h1688", "s1688", "hmma", "i8816", "16816", "dgrad_1x1_stride_2x2", "first_layer_wgrad_kernel",
    "conv1x1", "conv2d_c1_k1", "direct_group", "xmma_implicit_gemm", "xmma_sparse_conv",
    "xmma_warp_specialized_implicit_gemm", "xmma_gemm", "xmma_sparse_gemm", "c1688",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tree:
    """One value per node, in preorder, thread by thread. Times are doubles in µs.

    kind: Node.
    table, row: its origin, as in Nodes.
    track: number of the thread, in the order of the threads' first nodes.
    parent: node; NOTHING for the root of the thread.
    stop: the node after the last one below it.
    typed: its event is of the type Operator.
    operator: it counts as an operator.
    dropped: nodes that had no place.
    activity: per GPU activity in the order of `launches` the node that it belongs to, or NOTHING.
    """

    kind: UInts8
    table: UInts8
    row: Ints
    name: Ints32
    thread: Ints
    track: Ints
    start: Floats
    end: Floats
    parent: Ints
    stop: Ints
    typed: Flags
    operator: Flags
    host_self: Floats
    device_self: Floats
    device_total: Floats
    tensor_self: Floats
    tensor_total: Floats
    eligible: Flags
    activity: Ints
    dropped: int

    def __len__(self) -> int:
        return len(self.kind)

    def below(self, values: AnyArray) -> Floats:
        """Returns for each node the sum over it and all below it."""
        return _below(values, self.stop)


@dataclass(frozen=True, slots=True)
class _Shape:
    """The remaining nodes (places in Nodes) and their structure; owner: the node of each call."""

    left: Ints
    track: UInts32
    parent: Ints
    stop: Ints
    owner: Ints


class Node(IntEnum):
    """Kinds of nodes."""

    OPERATOR = 0
    STEP = 1
    MODULE = 2
    LIGHTNING_MODULE = 3
    DATA_LOADER = 4
    OPTIMIZER = 5
    NONE = 6  # not a node


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes in the order of the file, which decides between equal intervals, else table by table. Times in µs.

    table: number into TABLES.
    row: in that table.
    typed: its event is of the type Operator.
    external: its external id, or NOTHING.
    """

    kind: UInts8
    table: UInts8
    row: Ints
    name: Ints32
    thread: Ints
    start: Floats
    end: Floats
    typed: Flags
    external: Ints


@dataclass(frozen=True, slots=True)
class PluginLaunches:
    """Runtime calls and GPU activities. Times in µs as doubles.

    external: of each call, or NOTHING.
    duration: of each call.
    call: of each GPU activity the place of its call, or NOTHING.
    kind: of each activity, number into GPU_TABLES.
    row: in that table.
    """

    external: Ints
    thread: Ints
    duration: Floats
    call: Ints
    kind: UInts8
    row: Ints
    name: Ints32
    device_duration: Floats


def subtrees(tree: Tree, roots: Ints) -> tuple[Ints, Ints]:
    """Returns these roots and all nodes inside them, and for each the place of its root in `roots`."""
    sizes = tree.stop[roots] - roots
    which = np.repeat(np.arange(len(roots)), sizes)
    offset = np.arange(len(which)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return roots[which] + offset, which


def _below(values: AnyArray, stop: Ints) -> Floats:
    running = np.zeros(len(values) + 1)
    np.cumsum(values, out=running[1:])
    found: Floats = running[stop] - running[:-1]
    return found


def plugin_tree(context: Context) -> Tree:
    """Returns the tree of all threads, without its backward part."""
    found = nodes(context)
    launched = context.get(launches)
    track, order = _sorted(found)
    events = Events(track[order], orderable(found.start[order]), orderable(found.end[order]))
    kept = events.contain() != OVERLAPS
    order = order[kept]
    tree = events.take(np.flatnonzero(kept)).nest(0)
    merged, top = _chains(tree.parent, tree.children, found.name[order], found.typed[order])
    place = np.flatnonzero(~merged)  # of the remaining nodes
    left_before = np.concatenate([[0], np.cumsum(~merged)])
    number = left_before[1:] - 1
    bottom = np.append(place, len(order))[1:] - 1
    call_node = _owners(found, launched, track)
    # of each given node among the remaining ones; NOTHING: its calls are lost
    position = np.full(len(found.kind) + 1, NOTHING)
    position[order[bottom]] = np.arange(len(place))
    owner = position[call_node]
    left = order[place]
    above = tree.parent[place]
    parent = np.where(above >= 0, number[top[above]], NOTHING)
    stop = left_before[tree.stop[place]]
    return _figures(context, found, launched, _Shape(left, track[left], parent, stop, owner), kept)


def _sorted(found: Nodes) -> tuple[UInts32, Ints]:
    """Returns each node's track (its thread's number, by the first node), and the order of the nodes."""
    by_time = np.argsort(found.start, kind="stable")
    track = np.empty(len(by_time), np.uint32)
    track[by_time] = Interner().intern(found.thread[by_time].view(np.uint64))
    order = by_time[Events(track[by_time], orderable(found.start[by_time]), orderable(found.end[by_time])).order()]
    return track, order


def _chains(parent: Ints32, children: Ints32, name: Ints32, typed: Flags) -> tuple[Flags, Ints]:
    """Tells which nodes are replaced by their parents, and returns for each node the first one of its chain."""
    inside = parent >= 0
    merged = (
        inside & (children[parent] == 1) & (name[parent] == name) & typed & typed[parent] if len(parent) else inside
    )
    top: Ints = np.maximum.accumulate(np.where(merged, 0, np.arange(len(parent))))
    return merged, top


def _owners(found: Nodes, launched: PluginLaunches, track: UInts32) -> Ints:
    """Returns for each call the node (of those given) with its external id, or NOTHING."""
    rows = np.argsort(found.start, kind="stable")
    small = track.astype(np.uint16) if int(track.max(initial=0)) < 1 << 16 else track  # sorts by radix
    rows = rows[np.argsort(small[rows], kind="stable")][::-1]  # of equal ids the last one counts in lookup()
    keys, wanted = ((ids + 1).astype(np.uint64) for ids in (found.external[rows], launched.external))
    owner: Ints = lookup(wanted, keys, rows, NOTHING)
    return owner


def _figures(context: Context, found: Nodes, launched: PluginLaunches, shape: _Shape, kept: Flags) -> Tree:
    count, left = len(shape.left), shape.left
    start, end, name, typed = found.start[left], found.end[left], found.name[left], found.typed[left]
    total = end - start
    called = np.flatnonzero(shape.owner >= 0)
    in_calls = _sums(shape.owner[called], launched.duration[called], count)
    inside = np.flatnonzero(shape.parent >= 0)
    in_children = _sums(shape.parent[inside], total[inside], count)
    activity = np.where(launched.call >= 0, np.append(shape.owner, NOTHING)[launched.call], NOTHING)
    own = activity >= 0
    tensor = own & context.get(plugin_tensor_names)[launched.name]  # by the name alone, also of copies and fills
    device = _sums(activity[own], launched.device_duration[own], count)
    tensor_self = _sums(activity[tensor], launched.device_duration[tensor], count)
    eligible = context.get(plugin_eligible_names)[name] | (typed & (tensor_self > 0))
    return Tree(
        kind=found.kind[left],
        table=found.table[left],
        row=found.row[left],
        name=name,
        thread=found.thread[left],
        track=shape.track.astype(np.int64),
        start=start,
        end=end,
        parent=shape.parent,
        stop=shape.stop,
        typed=typed,
        operator=(found.kind[left] == Node.OPERATOR) & typed & ~_excluded(context)[name],
        host_self=total - in_children - in_calls,
        device_self=device,
        device_total=_below(device, shape.stop),
        tensor_self=tensor_self,
        tensor_total=_below(tensor_self, shape.stop),
        eligible=_passed_up(eligible, shape.parent, typed),
        activity=activity,
        dropped=int(np.count_nonzero(~kept)),
    )


def _sums(node: Ints, values: Floats, count: int) -> Floats:
    """Returns the sum of the values of each node."""
    return np.bincount(node, weights=values, minlength=count).astype(np.float64)


def _excluded(context: Context) -> Flags:
    """Returns for each string whether an operator of that name does not count as one."""
    texts = context.trace.strings
    return np.array([text in NO_OPERATORS or text.startswith("Optimizer.") for text in texts], np.bool_)


def _passed_up(eligible: Flags, parent: Ints, typed: Flags) -> Flags:
    """Makes nodes of the type operator eligible if a child is, level by level upwards, until nothing changes."""
    eligible = eligible.copy()
    waiting = np.flatnonzero(eligible & (parent >= 0))
    while len(waiting):
        above = unique_values(parent[waiting])
        fresh = above[typed[above] & ~eligible[above]]
        eligible[fresh] = True
        waiting = fresh[parent[fresh] >= 0]
    return eligible


def base_ns(trace: Trace) -> int:
    """Returns the origin (Unix ns) of the file's times as the file or, of our own captures, the exporter states it."""
    if trace.head is None:
        return trace.window_start_ns // TRIMONTH_NS * TRIMONTH_NS
    try:
        return int(json.loads(trace.head.get("baseTimeNanoseconds", "0")))
    except (ValueError, TypeError):
        return 0


def microseconds(ns: Ints, base: int = 0) -> Floats:
    """Returns the doubles that reading the file gives for these times (the nearest ones)."""
    relative = np.asarray(ns - base)
    found: Floats = relative / 1000.0
    large = np.abs(relative) >= EXACT_IN_DOUBLE
    if large.any():
        whole, rest = np.divmod(relative[large], 1000)
        found[large] = whole + rest / 1000.0
    return found


def orderable(times: Floats) -> Ints:
    """Returns integers in the same order as these doubles (of equal sign)."""
    bits = (times + 0.0).view(np.int64)
    return np.where(bits >= 0, bits, np.int64(-(2**63)) - bits)


def nodes(context: Context) -> Nodes:
    """Returns all nodes of all threads."""
    trace = context.trace
    base, kinds = base_ns(trace), _kinds_of_names(trace)
    parts = [_nodes_of(trace, number, base, kinds) for number in range(len(TABLES))]
    found = Nodes(*(np.concatenate([getattr(part, name) for part in parts]) for name in Nodes.__slots__))
    tables = [trace.table(name) for name in TABLES]
    if not all("place" in table.origin for table in tables if len(table)):
        return found
    own = [table.origin["place"][part.row] for table, part in zip(tables, parts, strict=True) if len(part.row)]
    order = np.argsort(np.concatenate([np.empty(0, np.int64), *own]), kind="stable")
    return Nodes(*(getattr(found, name)[order] for name in Nodes.__slots__))


def _kinds_of_names(trace: Trace) -> UInts8:
    """Returns for each string the kinds that an operator and an annotation of that name have."""
    lightning = is_lightning(trace)
    found = np.empty((2, len(trace.strings)), np.uint8)
    for number, text in enumerate(trace.strings):
        if text.startswith(STEP_PREFIX):
            found[:, number] = Node.STEP
        elif lightning and text.startswith(LIGHTNING_MODULE):
            found[:, number] = Node.LIGHTNING_MODULE, Node.NONE
        elif lightning and text.startswith(LIGHTNING_PROFILE):
            found[:, number] = Node.NONE
        elif _DATA_LOADER.match(text):
            found[:, number] = Node.DATA_LOADER
        elif text.startswith("Optimizer.step"):
            found[:, number] = Node.OPTIMIZER
        else:
            found[:, number] = Node.OPERATOR, Node.OPERATOR if text in COLLECTIVES else Node.NONE
    return found


def _nodes_of(trace: Trace, number: int, base: int, kinds: UInts8) -> Nodes:
    table = trace.table(TABLES[number])
    of_name = kinds[0 if number in (CPU_OP, OTHER) else 1]
    if number == OTHER:  # events of the category "python" are neither steps nor Lightning's
        lightning = (Node.STEP, Node.LIGHTNING_MODULE, Node.NONE)
        of_name = np.where(np.isin(of_name, lightning), Node.OPERATOR, of_name).astype(np.uint8)
    if number == PYTHON_FUNCTION:
        of_name = np.full(len(trace.strings) + 1, Node.NONE if is_lightning(trace) else Node.MODULE, np.uint8)
    wanted = of_name[table["name"]] != Node.NONE
    if number == PYTHON_FUNCTION:
        wanted &= table["module"] != NO_MODULE
    elif number == OTHER:
        wanted &= in_categories(trace, table, ("python",))
    rows = np.flatnonzero(wanted)
    kind = of_name[table["name"][rows]]
    start, duration = file_times(table, base)
    return Nodes(
        kind=kind,
        table=np.full(len(rows), number, np.uint8),
        row=rows,
        name=table["name"][rows],
        thread=_as_numbers(trace, file_threads(table)[rows]),
        start=start[rows],
        end=(start + duration)[rows],
        typed=np.isin(kind, (Node.OPERATOR, Node.DATA_LOADER, Node.OPTIMIZER)) & (number == CPU_OP),
        external=external_ids(table)[rows] if number != PYTHON_FUNCTION else np.full(len(rows), NOTHING, np.int64),
    )


def file_times(table: Table, base: int) -> tuple[Floats, Floats]:
    """Returns starts and durations in microseconds, as the file has them."""
    times = []
    for column, real, bit in (("start", "ts_real", TS_REAL), ("duration", "dur_real", DUR_REAL)):
        time = microseconds(table[column], base if column == "start" else 0)
        if real in table.origin:  # not whole nanoseconds
            time = np.where(table.origin["present"] & np.uint64(bit) != 0, table.origin[real], time)
        times.append(time)
    return times[0], times[1]


def external_ids(table: Table) -> Ints:
    """Returns the external id of each row as in the file, or NOTHING."""
    column = table.columns.get("id" if table.kind in OP_TABLES else "external_id")
    column = table.origin.get("external_id", column)
    if column is None:
        return np.full(len(table), NOTHING, np.int64)
    known = column != 0
    if "present" in table.origin:
        bits = sum(1 << (FIRST_ARG_BIT + n) for n, arg in enumerate(KINDS[table.kind]) if arg.column == "external_id")
        known = table.origin["present"] & np.uint64(bits) != 0
    return np.where(known, column, NOTHING).astype(np.int64)


def file_threads(table: Table) -> Ints:
    """Returns the thread of each row as numbered in the file; for a gpu_user_annotation, this is the stream."""
    if "tid" in table.origin:
        found: Ints = table.origin["tid"]
        return found
    return table["thread" if "thread" in table.columns else "stream"].astype(np.int64)


def _as_numbers(trace: Trace, threads: Ints) -> Ints:
    """Replaces texts that are numbers by these numbers, as the plug-in does for nodes only."""
    texts = unique_values(threads[threads <= TEXT_ID])
    if not len(texts):
        return threads
    wholes = [whole_number(text, trace.strings) for text in texts.tolist()]
    numbers = np.array(
        [one if isinstance(one, int) else text for one, text in zip(wholes, texts.tolist(), strict=True)]
    )
    found: Ints = np.where(
        threads <= TEXT_ID, numbers[np.searchsorted(texts, threads).clip(0, len(texts) - 1)], threads
    )
    return found


def launches(context: Context) -> PluginLaunches:
    """Returns the calls that the plug-in counts as runtime calls (not those to the driver), and the GPU activities."""
    trace = context.trace
    base, calls = base_ns(trace), runtime_calls(trace)
    tables = [trace.table(kind) for kind in GPU_TABLES]
    times = [file_times(table, base) for table in tables]
    start, duration = (np.concatenate([each[n] for each in times]) for n in range(2))
    correlation = np.concatenate([table["correlation"] for table in tables])
    call_start, call_duration = file_times(calls, base)
    return PluginLaunches(
        external=external_ids(calls),
        thread=file_threads(calls),
        duration=call_start + call_duration - call_start,
        call=_calls_of(correlation, start, calls["correlation"], call_start),
        kind=np.repeat(np.arange(len(tables), dtype=np.uint8), [len(table) for table in tables]),
        row=np.concatenate([np.arange(len(table), dtype=np.int64) for table in tables]),
        name=np.concatenate([table["name"] for table in tables]),
        device_duration=start + duration - start,
    )


def _calls_of(correlation: UInts32, start: Floats, called: UInts32, call_start: Floats) -> Ints:
    """Returns each activity's call by correlation id: of several the last one before it, else the first one."""
    places = np.arange(len(called))
    if len(distinct(called)) == len(called):
        found: Ints = lookup(correlation, called, places, NOTHING)
        return found
    order = np.lexsort((call_start, called))
    first = np.searchsorted(called[order], correlation, side="left")
    stop = np.searchsorted(called[order], correlation, side="right")
    # Of each activity's calls (they are sorted by time): how many begin before it.
    merged = np.lexsort(
        (
            np.repeat([0, 1], [len(order), len(start)]),
            np.concatenate([call_start[order], start]),
            np.concatenate([called[order], correlation]),
        )
    )
    before = np.cumsum(merged < len(order))
    rank = np.empty(len(merged), np.int64)
    rank[merged] = before
    last = rank[len(order) :] - 1
    chosen = np.clip(last, first, np.maximum(stop - 1, 0))
    return np.where(stop > first, order[np.minimum(chosen, len(order) - 1)], NOTHING)


def plugin_uses_tensor_cores(name: str) -> bool:
    """Returns whether the plug-in counts a kernel of this name as using tensor cores."""
    return any(part in name for part in PLUGIN_KERNELS)


def plugin_tensor_names(context: Context) -> Flags:
    """Returns the same for each string of the trace."""
    texts = context.trace.strings
    return np.fromiter((plugin_uses_tensor_cores(text) for text in texts), np.bool_, len(texts))


def plugin_eligible_names(context: Context) -> Flags:
    """Returns for each string of the trace whether an operator of that name is in the plug-in's list."""
    texts = context.trace.strings
    return np.fromiter((text in AUTOCAST_OPS for text in texts), np.bool_, len(texts))
