"""The TensorBoard plug-in's memory records: which node of its operator tree each one belongs to, and its figures.

Theory of operation
    The plug-in descends the tree of the record's thread to the deepest node around its time. The record counts only if
    that is an operator. Backward operators that moved below a module's backward node are found in the main thread's
    tree by the times of these nodes, which may hide other nodes; those without a place are not found.

    Calls of an operator count only if something was allocated or released inside the node around it: the plug-in does
    not enter nodes without a record.

Memory records in the TensorBoard plug-in's tree with backward operators below modules' backward nodes.
    The plug-in goes through a thread's records and through its tree at once. It stays in a node until a record is not
    before the node's end; then it returns to the enclosing node, after that child. In a node it enters the next child
    that has not ended if that has begun, else the record is the node's. Backward nodes need not lie inside their
    parent: they may begin before it, and records after its end belong to them as long as they last.

    Only nodes with backward nodes inside need that walk. Between these, all records up to the next one are assigned at
    once, to the deepest nodes without backward nodes. In the same way a backward operator, or its deepest nodes, gets
    all records until its end.

    Statistics are summed up while the plug-in descends the tree. Nodes that it visits several times (an operator and
    its child that start together bring a backward operator twice) keep their previous sums: the second time all sums
    inside are added once more.
"""

from dataclasses import dataclass

import numpy as np

from kineto_trace.analysis.memory_views import (
    blocks,
    by_operator,
    curve_columns,
    event_columns,
    is_between,
    memory_curve,
    memory_events,
    memory_statistics,
    metrics,
    missing_records_note,
    operator_texts,
    point_limit,
    statistics_columns,
)
from kineto_trace.arrays.codec import Events
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.row_groups import group, sums
from kineto_trace.base.array_types import NOTHING, AnyArray, Flags, Floats, Ints, UInts32
from kineto_trace.compat.plugin_backward import Backward, entries_in_order, outermost, plugin_backward
from kineto_trace.compat.plugin_diff_tree import TreeSide
from kineto_trace.compat.plugin_tree import Tree, base_ns, file_threads, microseconds, orderable, plugin_tree, subtrees
from kineto_trace.model.context import Context
from kineto_trace.model.trace import GPU_TABLES
from kineto_trace.structure.allocations import CPU, CUDA, Records, largest_triangles, memory_records
from kineto_trace.structure.event_arguments import has_column
from kineto_trace.structure.module_calls import is_lightning
from kineto_trace.structure.trace_forms import in_categories
from kineto_trace.view_api.view import Answer, Compat

NO_TRACK = np.uint32(2**32 - 1)
_STARTING = ("cpu_op", "user_annotation", "gpu_user_annotation", "python_function", "cuda_runtime", *GPU_TABLES)
POINTS = 10240
UNKNOWN, ROOT = "<unknown>", "CallTreeRoot"  # the plug-in's names


@dataclass(frozen=True, slots=True)
class PluginMemory:
    """The nodes of all memory records.

    node: of each record (by time) the deepest node, or NOTHING.
    operator: that node if it is an operator, else NOTHING.
    held: nodes that the plug-in enters because of records inside.
    entered: the same for backward nodes.
    known: the records of CPU and GPUs.
    """

    node: Ints
    operator: Ints
    held: Flags
    entered: Flags
    known: Flags


@dataclass(slots=True)
class _Frame:
    """A node on the path of the walk. backward: whether it is a backward node. at: the next child."""

    children: Ints
    starts: Floats
    ends: Floats
    end: float
    backward: bool
    at: int = 0


class MemorySweep:
    """The walk over the records of the main thread.

    time: µs, ascending.
    node: their deepest nodes without backward.
    deepest: by track, at each of these times the deepest node.
    After the walk:
    node: the node of each record (NOTHING if none in the tree).
    entered: per backward node.
    visited: nodes of the tree on the walk.
    """

    def __init__(self, side: TreeSide, time: Floats, node: Ints, deepest: dict[int, Ints]) -> None:
        self.node = node.copy()
        self.entered = np.zeros(len(side.moved.module), np.bool_)
        self.visited: list[int] = []
        self._side, self._time, self._deepest = side, time, deepest
        self._special = self._around_hosts()
        self._taken: list[tuple[int, int, int]] = []  # backward operator, first record, record after the last
        self._walk()
        self._give_to_roots()

    def _around_hosts(self) -> Flags:
        """Returns which nodes have a backward node somewhere inside."""
        tree, found = self._side.tree, np.zeros(len(self._side.tree), np.bool_)
        node = unique_values(self._side.moved.host[self._side.moved.host >= 0])
        while len(node):
            found[node] = True
            node = unique_values(tree.parent[node])
            node = node[node >= 0]
            node = node[~found[node]]
        return found

    def _walk(self) -> None:
        time = self._time
        low, high = self._side.thread_span()
        place = int(np.searchsorted(time, low))
        frames = [self._frame(self._side.children_of_host(NOTHING), high, backward=False)]
        while frames and place < len(time):
            frame, now = frames[-1], time[place]
            if now >= frame.end:
                frames.pop()
                if frames:
                    frames[-1].at += 1
                continue
            lasting = frame.ends[frame.at :] > now
            frame.at += int(np.argmax(lasting)) if lasting.any() else len(lasting)
            until = frame.end
            if frame.at < len(frame.children):
                item, end = int(frame.children[frame.at]), float(frame.ends[frame.at])
                if frame.starts[frame.at] > now:
                    until = min(until, float(frame.starts[frame.at]))
                elif frame.backward and item >= 0:
                    stop = int(np.searchsorted(time, end))
                    self._taken.append((item, place, stop))
                    place = stop
                    frame.at += 1
                    continue
                elif item < 0:
                    self.entered[-1 - item] = True
                    frames.append(self._frame(self._side.children(item), end, backward=True))
                    continue
                else:
                    self.visited.append(item)
                    frames.append(self._frame(self._side.children_of_host(item), end, backward=False))
                    continue
            stop = int(np.searchsorted(time, until))
            if frame.backward:
                self.node[place:stop] = NOTHING
            place = stop

    def _frame(self, children: Ints, end: float, *, backward: bool) -> _Frame:
        if not backward:
            children = children[(children < 0) | self._special[np.maximum(children, 0)]]
        starts, ends = self._side.spans(children)
        return _Frame(children, starts, ends, end, backward)

    def _give_to_roots(self) -> None:
        """Assigns records to the backward operators that took them, or to their deepest nodes."""
        tree = self._side.tree
        root, place, stop = np.array(self._taken, np.int64).reshape(-1, 3).T
        sizes = stop - place
        root = np.repeat(root, sizes)
        rows = np.repeat(place - np.cumsum(sizes) + sizes, sizes) + np.arange(len(root))
        for track, deepest in self._deepest.items():
            own = tree.track[root] == track
            found = deepest[rows[own]]
            inside = (found >= root[own]) & (found < tree.stop[root[own]])
            self.node[rows[own]] = np.where(inside, found, root[own])


def plugin_memory(context: Context) -> PluginMemory:
    """Returns the nodes of all memory records."""
    tree, moved, records = context.get(plugin_tree), context.get(plugin_backward), context.get(memory_records)
    time = microseconds(records.time, base_ns(context.trace))
    track = _tracks(context, tree, records)
    node = _deepest(tree, track, time)
    entered, gone, visited = np.zeros(len(moved.module), np.bool_), np.zeros(len(tree), np.bool_), []
    if len(moved.removed):
        gone[subtrees(tree, moved.removed)[0]] = True
        node = _up_to(tree, node, ~gone)
        rows = np.flatnonzero(track == moved.main)
        tracks = unique_values(tree.track[moved.roots]).tolist()
        deepest = {each: _deepest(tree, np.full(len(rows), each, np.uint32), time[rows]) for each in tracks}
        swept = MemorySweep(TreeSide(context, tree.device_self), time[rows], node[rows], deepest)
        node[rows], entered, visited = swept.node, swept.entered, swept.visited
    counts = np.bincount(np.append(node[node >= 0], visited).astype(np.int64), minlength=len(tree))
    held = np.where(gone, tree.below(counts * gone), tree.below(counts * ~gone)) > 0
    types = np.array([*records.device_types, 0])[records.device]
    told = has_column(context.trace.table("cpu_instant_event"), "Device Type")[records.row]
    return PluginMemory(
        node=node,
        operator=np.where((node >= 0) & np.append(tree.operator, False)[node], node, NOTHING),
        held=held,
        entered=entered,
        known=told & np.isin(types, (CPU, CUDA)),
    )


def calls_counted(context: Context, turn: Ints) -> Ints:
    """Returns how often the plug-in counts a call of each node: only if it enters the node around it.

    turn: of each entry of Backward.roots, as plugin_sweep.traversals() gives it.
    """
    tree, moved, held = context.get(plugin_tree), context.get(plugin_backward), context.get(plugin_memory).held
    if not len(tree):
        return np.zeros(0, np.int64)
    visits = visits_of(tree, moved, turn)
    found: Ints = visits * ((tree.parent < 0) | held[tree.parent])
    found[moved.removed] = visits[moved.removed]
    return found


def _tracks(context: Context, tree: Tree, records: Records) -> UInts32:
    """Returns the track of each record's thread, or NO_TRACK if the thread has no nodes."""
    if not len(tree) or not len(records):
        return np.full(len(records), NO_TRACK)
    thread = file_threads(context.trace.table("cpu_instant_event"))[records.row]
    threads, first = np.unique(tree.thread, return_index=True)
    place = np.minimum(np.searchsorted(threads, thread), len(threads) - 1)
    return np.where(threads[place] == thread, tree.track[first[place]].astype(np.uint32), NO_TRACK)


def _deepest(tree: Tree, track: UInts32, time: Floats) -> Ints:
    """Returns for each moment (µs) of a track the deepest node around it, or NOTHING."""
    if not len(tree) or not len(time):
        return np.full(len(time), NOTHING, np.int64)
    events = Events(tree.track, orderable(tree.start), orderable(tree.end))
    return events.enclosing(tree.parent.astype(np.int32), Events(track, orderable(time))).astype(np.int64)


def _up_to(tree: Tree, node: Ints, wanted: Flags) -> Ints:
    """Returns each node if it is wanted, else the innermost wanted one around it, or NOTHING."""
    node = node.copy()
    while True:
        further = np.flatnonzero((node >= 0) & ~np.append(wanted, True)[node])
        if not len(further):
            return node
        node[further] = tree.parent[node[further]]


def plugin_levels(context: Context, device: int) -> tuple[Ints, Ints, Ints]:
    """Returns times (Unix ns), allocated and reserved bytes of a device's records with an address and both totals."""
    records, table = context.get(memory_records), context.trace.table("cpu_instant_event")
    told = records.addressed & context.get(plugin_memory).known
    for key, level in (("Total Allocated", records.allocated), ("Total Reserved", records.reserved)):
        told &= has_column(table, key)[records.row] if "present" in table.origin else level >= 0
    mine = np.flatnonzero(told & (records.device == device))
    return records.time[mine], records.allocated[mine], records.reserved[mine]


def plugin_events(records: Records) -> tuple[Ints, Ints]:
    """Returns the places of allocations and of their releases (or NOTHING), in the plug-in's order.

    It matches by addresses alone, whatever the device. Pairs come first, by their releases. Then come allocations that
    were not released: the last one of each address, in the order of the first ones since a release. Then releases
    without an allocation: the last one of each address, in the order of the first ones.
    """
    places = np.flatnonzero(records.addressed)
    size = records.bytes[places]
    by_address = np.argsort(records.address[places], kind="stable")
    own, positive = records.address[places][by_address], size[by_address] > 0
    same = own[1:] == own[:-1]
    paired = same & positive[:-1] & ~positive[1:]
    first, second = by_address[:-1][paired], by_address[1:][paired]
    order = np.argsort(second)
    first, second = first[order], second[order]
    open_ = positive & ~np.append(same & ~positive[1:], False)  # the next one is not a release
    last = open_ & ~np.append(same, False)
    since = np.empty(len(places), np.int64)  # runs of allocations without a release between them
    since[by_address] = np.cumsum(~positive)
    left = _by_first(np.flatnonzero(size > 0), np.sort(by_address[last]), [records.address[places], since])
    alone = by_address[~positive & ~np.append(False, same & positive[:-1])] if len(places) else by_address
    alone = np.sort(alone)
    lost = _by_first(alone, alone, [records.address[places]])
    nothing = np.full(max(len(left), len(lost)), NOTHING)
    return (
        np.concatenate([places[first], places[left], nothing[: len(lost)]]),
        np.concatenate([places[second], nothing[: len(left)], places[lost]]),
    )


def _by_first(rows: Ints, wanted: Ints, keys: list[AnyArray]) -> Ints:
    """Returns the wanted rows in the order of the first row with the same keys."""
    groups = group([key[rows] for key in keys])
    last = np.empty(len(groups), np.int64)
    last[groups.number] = rows
    return last[np.isin(last, wanted)]


def profiler_start(context: Context) -> float:
    """Returns the start (µs in the file) of the first event that the plug-in knows."""
    trace = context.trace
    kinds = [kind for kind in _STARTING if not (kind == "python_function" and is_lightning(trace))]
    starts = [int(trace.table(kind)["start"].min()) for kind in kinds if len(trace.table(kind))]
    memory = context.get(memory_records)
    starts += [int(memory.time[0])] if len(memory) else []
    other = trace.table("other")
    spans = in_categories(trace, other, ("trace", "python"))
    starts += [int(other["start"][spans].min())] if spans.any() else []
    return float(microseconds(np.array([min(starts, default=0)]), base_ns(trace))[0])


def traversals(tree: Tree, moved: Backward, entered: Flags, low: float | None, high: float | None) -> Ints:
    """Numbers the visits of each root from 1: one number per entry of moved.roots; 0 if the plug-in does not visit it.

    low, high: µs; the plug-in does not enter nodes outside of these.
    """
    open_ = entered & moved.placed
    if low is not None:
        open_ &= moved.end >= low
        open_[moved.hung] &= (moved.host < 0) | (tree.end[moved.host] >= low)
    if high is not None:
        open_ &= moved.start <= high
        open_[moved.hung] &= (moved.host < 0) | (tree.start[moved.host] <= high)
    while True:
        still = open_ & ((moved.parent < 0) | open_[moved.parent])
        if np.array_equal(still, open_):
            break
        open_ = still
    found = np.zeros(len(moved.roots), np.int64)
    entries = entries_in_order(tree, moved)
    entries = entries[open_[moved.below[entries]]]
    order = np.argsort(moved.roots[entries], kind="stable")
    root = moved.roots[entries][order]
    begins = np.concatenate([[True], root[1:] != root[:-1]]) if len(root) else np.zeros(0, np.bool_)
    first = np.maximum.accumulate(np.where(begins, np.arange(len(root)), 0))
    found[entries[order]] = np.arange(len(root)) - first + 1
    return found


def visits_of(tree: Tree, moved: Backward, turn: Ints) -> Ints:
    """Returns how often the plug-in visits each node. turn: as traversals() gives it."""
    found, roots = np.ones(len(tree), np.int64), np.zeros(len(tree), np.int64)
    np.maximum.at(roots, moved.roots, turn)
    inside, of_root = subtrees(tree, moved.removed)
    found[inside] = roots[moved.removed][of_root]
    return found


def plugin_sums(tree: Tree, moved: Backward, turn: Ints, own: Ints) -> Ints:
    """Returns the plug-in's sum of `own` values at each node. turn: as traversals() gives it."""
    times = visits_of(tree, moved, turn)
    found = np.where(times > 0, tree.below(own), 0).astype(np.int64)
    host = np.full(len(moved.module), NOTHING)
    host[moved.hung] = moved.host
    host_of = host[outermost(moved.parent)][moved.below]
    hosted = np.zeros(len(tree), np.int64)
    for number in range(1, int(turn.max(initial=0)) + 1):
        if number > 1:
            again = times >= number
            found = np.where(again, tree.below(np.where(again, found + own, 0)), found).astype(np.int64)
        chosen = np.flatnonzero((turn == number) & (host_of >= 0))
        np.add.at(hosted, host_of[chosen], found[moved.roots[chosen]])
    return found + tree.below(hosted).astype(np.int64)


@memory_statistics.variant(Compat.PLUGIN)
def plugin_statistics(context: Context, *, start_ns: int | None = None, end_ns: int | None = None) -> Answer:
    """compat=plugin: the memory view of the TensorBoard profiler plug-in.

    It uses the plug-in's operator tree, counts calls only of operators that the plug-in visits (it does not enter a
    node without any record), and has CPU and GPUs only. Rows are sorted by name.
    """
    records = context.get(memory_records)
    chosen, notes = is_between(records, start_ns, end_ns), missing_records_note(records)
    tree, found, moved = context.get(plugin_tree), context.get(plugin_memory), context.get(plugin_backward)
    base = base_ns(context.trace)
    low, high = (None if ns is None else float(microseconds(np.array([ns]), base)[0]) for ns in (start_ns, end_ns))
    inside = tree.operator.copy()
    if low is not None:
        inside &= tree.end >= low
    if high is not None:
        inside &= tree.start <= high
    turn = traversals(tree, moved, found.entered, low, high)
    counted = np.where(inside, calls_counted(context, turn), 0)
    calls = sums(tree.name.astype(np.int64), counted, len(context.trace.strings))
    parts = []
    for device in range(len(records.devices)):
        usable = chosen & found.known & (found.operator >= 0) & (records.device == device)
        own = metrics(records, usable, found.operator, len(tree))
        total = {name: plugin_sums(tree, moved, turn, values) for name, values in own.items()}
        parts.append(by_operator(tree.name, total, own, (counted > 0).astype(np.int64)))
    return statistics_columns(context, records, parts, calls, notes, by_name=True)


@memory_curve.variant(Compat.PLUGIN)
def plugin_curve(context: Context, *, max_points: int = 0) -> Answer:
    """compat=plugin: the curve of the TensorBoard profiler plug-in.

    Every change is two points at the same time, the level before it and the level after it, and a device has at most
    10240 points unless max_points is given.
    """
    limit = point_limit(max_points) or POINTS
    records = context.get(memory_records)
    start = profiler_start(context)
    parts = []
    for device, name in enumerate(records.devices):
        time, allocated, reserved = plugin_levels(context, device)
        if len(time):
            points = _steps(microseconds(time, base_ns(context.trace)) - start, allocated, reserved)
            parts.append((name, points[largest_triangles(points, limit)]))
    return curve_columns(parts, None, missing_records_note(records))


def _steps(time: Floats, allocated: Ints, reserved: Ints) -> Floats:
    """Precedes every point but the first one by the level before it."""
    points = np.stack([time, allocated, reserved], axis=1).astype(np.float64)
    twice = np.repeat(points, 2, axis=0)[1:]
    twice[1::2, 1:] = points[:-1, 1:]
    return twice


@memory_events.variant(Compat.PLUGIN)
def plugin_event_rows(
    context: Context,
    *,
    start_ns: int | None = None,
    end_ns: int | None = None,
    min_bytes: int = 0,
    max_bytes: int | None = None,
) -> Answer:
    """compat=plugin: the events of the TensorBoard profiler plug-in.

    Pairs come first, by release, then blocks that were not released, then blocks that were not allocated. An address
    that was allocated twice without a release shows only the second allocation.
    """
    records = context.get(memory_records)
    tree, found = context.get(plugin_tree), context.get(plugin_memory)
    first, second = plugin_events(records)
    known = np.append(found.known, False)[np.where(first >= 0, first, second)]
    chosen = is_between(records, start_ns, end_ns)
    first, second = blocks(records, first[known], second[known], chosen, min_bytes=min_bytes, max_bytes=max_bytes)
    node = np.append(found.operator, NOTHING)[first]
    node = np.where(first >= 0, node, NOTHING)
    name = np.append(tree.name, NOTHING)
    names = operator_texts(context, name[node], name[np.append(tree.parent, NOTHING)[node]], UNKNOWN, ROOT)
    time = microseconds(records.time, base_ns(context.trace)) - profiler_start(context)
    return event_columns(records, first, second, time, names.texts[names.number], missing_records_note(records))
