"""The TensorBoard plug-in's memory records: which node of its operator tree each one belongs to, and its figures.

Theory of operation
    The plug-in walks down the tree of the record's thread to the deepest node around its time. Only where that is an
    operator the record counts. Backward operators that went below a module's backward node are found in the main
    thread's tree by the times of these nodes, which may hide other nodes; those that have no place are not found.

    Calls of an operator count only where something was allocated or released inside the node around it: the plug-in
    does not look into nodes without a record.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.codec import Events
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.row_groups import group
from kineto_trace.compat.tensorboard.plugin_backward import plugin_backward
from kineto_trace.compat.tensorboard.plugin_diff_tree import TreeSide
from kineto_trace.compat.tensorboard.plugin_nodes import (
    NOTHING,
    base_ns,
    file_threads,
    microseconds,
    orderable,
)
from kineto_trace.compat.tensorboard.plugin_sweep import MemorySweep, visits_of
from kineto_trace.compat.tensorboard.plugin_tree import Tree, plugin_tree, subtrees
from kineto_trace.model.context import Context
from kineto_trace.model.trace import GPU_TABLES
from kineto_trace.structure.allocations import CPU, CUDA, Records, memory_records
from kineto_trace.structure.event_arguments import has_column
from kineto_trace.structure.module_calls import is_lightning
from kineto_trace.structure.recording_span import in_categories

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

NO_TRACK = np.uint32(2**32 - 1)
_STARTING = ("cpu_op", "user_annotation", "gpu_user_annotation", "python_function", "cuda_runtime", *GPU_TABLES)


@dataclass(frozen=True, slots=True)
class PluginMemory:
    """The nodes of all memory records. node: of each record (by time) the deepest node, or NOTHING.

    operator: that node where it is an operator, else NOTHING.

    held: nodes that the plug-in looks into, since it found records inside; entered: likewise of backward nodes. known:
    the records of CPU and GPUs.
    """

    node: Ints
    operator: Ints
    held: npt.NDArray[np.bool_]
    entered: npt.NDArray[np.bool_]
    known: npt.NDArray[np.bool_]


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
    """Returns how often the plug-in counts a call of each node: only where it looks into the node around it.

    turn: of each entry of Backward.roots, as plugin_sweep.traversals() gives it.
    """
    tree, moved, held = context.get(plugin_tree), context.get(plugin_backward), context.get(plugin_memory).held
    if not len(tree):
        return np.zeros(0, np.int64)
    visits = visits_of(tree, moved, turn)
    found: Ints = visits * ((tree.parent < 0) | held[tree.parent])
    found[moved.removed] = visits[moved.removed]
    return found


def _tracks(context: Context, tree: Tree, records: Records) -> npt.NDArray[np.uint32]:
    """Returns the track of each record's thread, or NO_TRACK if the thread has no nodes."""
    if not len(tree) or not len(records):
        return np.full(len(records), NO_TRACK)
    thread = file_threads(context.trace.table("cpu_instant_event"))[records.row]
    threads, first = np.unique(tree.thread, return_index=True)
    place = np.minimum(np.searchsorted(threads, thread), len(threads) - 1)
    return np.where(threads[place] == thread, tree.track[first[place]].astype(np.uint32), NO_TRACK)


def _deepest(tree: Tree, track: npt.NDArray[np.uint32], time: Floats) -> Ints:
    """Returns for each moment (µs) of a track the deepest node around it, or NOTHING."""
    if not len(tree) or not len(time):
        return np.full(len(time), NOTHING, np.int64)
    events = Events(tree.track, orderable(tree.start), orderable(tree.end))
    moments = Events(track, orderable(time))
    order = moments.order()
    found = np.empty(len(order), np.int64)
    found[order] = events.enclosing(tree.parent.astype(np.int32), moments.take(order))
    return found


def _up_to(tree: Tree, node: Ints, wanted: npt.NDArray[np.bool_]) -> Ints:
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

    It goes by addresses alone, whatever the device. First come pairs, by their releases. Then come allocations that
    were not released: of each address the last one, in the order of the first ones since a release. Then releases
    without an allocation: of each address the last one, in the order of the first ones.
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
    open_ = positive & ~np.append(same & ~positive[1:], False)  # no release comes next
    last = open_ & ~np.append(same, False)
    since = np.empty(len(places), np.int64)  # runs of allocations without a release between them
    since[by_address] = np.cumsum(~positive)
    left = _by_first(np.flatnonzero(size > 0), np.sort(by_address[last]), [records.address[places], since])
    alone = by_address[~positive & ~np.append(False, same & positive[:-1])] if len(places) else by_address
    lost = _last_of_each(np.sort(alone), records.address[places])
    nothing = np.full(max(len(left), len(lost)), NOTHING)
    return (
        np.concatenate([places[first], places[left], nothing[: len(lost)]]),
        np.concatenate([places[second], nothing[: len(left)], places[lost]]),
    )


def _by_first(rows: Ints, wanted: Ints, keys: list[npt.NDArray[Any]]) -> Ints:
    """Returns the wanted rows in the order in which the first row with the same keys comes."""
    groups = group([key[rows] for key in keys])
    last = np.empty(len(groups), np.int64)
    last[groups.number] = rows
    return last[np.isin(last, wanted)]


def _last_of_each(rows: Ints, key: npt.NDArray[Any]) -> Ints:
    """Returns of rows with equal keys the last one, in the order of their first ones."""
    return _by_first(rows, rows, [key])


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
