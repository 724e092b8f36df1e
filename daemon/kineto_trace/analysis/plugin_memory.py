"""The TensorBoard plug-in's memory records: which node of its operator tree each one belongs to, and its figures.

Theory of operation
    The plug-in walks down the tree of the record's thread to the deepest node around its time. Only where that is an
    operator the record counts. Backward operators that went below a module's backward node are found in the main
    thread's tree; those of other threads, and those that have no place, are not.

    Calls of an operator count only where something was allocated or released inside the node around it: the plug-in
    does not look into nodes without a record.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.context import Context
from kineto_trace.analysis.memory import CPU, CUDA, Records, memory_records
from kineto_trace.analysis.plugin_backward import Backward, plugin_backward
from kineto_trace.analysis.plugin_nodes import NOTHING, base_ns, file_threads, in_categories, microseconds, orderable
from kineto_trace.analysis.plugin_tree import Tree, plugin_tree
from kineto_trace.codec import Events
from kineto_trace.model import GPU_TABLES

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_STARTING = ("cpu_op", "user_annotation", "gpu_user_annotation", "python_function", "cuda_runtime", *GPU_TABLES)


@dataclass(frozen=True, slots=True)
class PluginMemory:
    """node: of each record (by time) the deepest node; NOTHING. operator: that node where it is an operator.

    reached: per node, how often the plug-in counts a call of it. known: the records of CPU and GPUs.
    """

    node: Ints
    operator: Ints
    reached: Ints
    known: npt.NDArray[np.bool_]


def plugin_memory(context: Context) -> PluginMemory:
    """The nodes of all memory records."""
    tree, moved, records = context.get(plugin_tree), context.get(plugin_backward), context.get(memory_records)
    node = _deepest(context, tree, records)
    inside = node >= 0
    lost = inside & (moved.visits[node] == 0) if len(tree) else inside
    if len(moved.removed):
        lost |= inside & _below_any(tree, moved.removed)[node] & (tree.track[node] != moved.main)
    node = np.where(lost, NOTHING, node)
    inside = node >= 0
    held = tree.below(np.bincount(node[inside], minlength=len(tree)))
    is_operator = inside & (tree.operator[node] if len(tree) else False)
    types = np.array([*records.device_types, 0])[records.device]
    return PluginMemory(
        node=node,
        operator=np.where(is_operator, node, NOTHING),
        reached=_reached(tree, moved, held),
        known=np.isin(types, (CPU, CUDA)),
    )


def _deepest(context: Context, tree: Tree, records: Records) -> Ints:
    if not len(tree) or not len(records):
        return np.full(len(records), NOTHING, np.int64)
    table = context.trace.table("cpu_instant_event")
    thread = file_threads(table)[records.row]
    threads, first = np.unique(tree.thread, return_index=True)
    place = np.minimum(np.searchsorted(threads, thread), len(threads) - 1)
    no_track = np.uint32(2**32 - 1)
    track = np.where(threads[place] == thread, tree.track[first[place]].astype(np.uint32), no_track)
    events = Events(tree.track, orderable(tree.start), orderable(tree.end))
    time = orderable(microseconds(records.time, base_ns(context.trace)))
    moments = Events(track, time)
    order = moments.order()
    found = np.empty(len(order), np.int64)
    found[order] = events.enclosing(tree.parent.astype(np.int32), moments.take(order))
    return found


def _below_any(tree: Tree, roots: Ints) -> npt.NDArray[np.bool_]:
    """For each node: whether it is one of these or inside one."""
    depth = np.bincount(roots, minlength=len(tree) + 1) - np.bincount(tree.stop[roots], minlength=len(tree) + 1)
    found: npt.NDArray[np.bool_] = np.cumsum(depth)[:-1] > 0
    return found


def _reached(tree: Tree, moved: Backward, held: Floats) -> Ints:
    """How often each node is come by: its parent is the root of its thread, or has records inside."""
    if not len(tree):
        return np.empty(0, np.int64)
    reached = np.where((tree.parent < 0) | (held[tree.parent] > 0), moved.visits, 0)
    if len(moved.removed):
        inside = np.bincount(moved.below, weights=held[moved.roots], minlength=len(moved.module))
        total = inside.copy()
        above = moved.parent.copy()
        while (above >= 0).any():
            outer = np.flatnonzero(above >= 0)
            np.add.at(total, above[outer], inside[outer])
            above[outer] = moved.parent[above[outer]]
        reached[moved.removed] = 0
        np.add.at(reached, moved.roots, ((total > 0) & moved.placed)[moved.below].astype(np.int64))
    return reached


def profiler_start(context: Context) -> float:
    """The start (µs in the file) of the first event that the plug-in knows."""
    trace = context.trace
    starts = [int(trace.table(kind)["start"].min()) for kind in _STARTING if len(trace.table(kind))]
    memory = context.get(memory_records)
    starts += [int(memory.time[0])] if len(memory) else []
    other = trace.table("other")
    spans = in_categories(trace, other, ("trace",))
    starts += [int(other["start"][spans].min())] if spans.any() else []
    return float(microseconds(np.array([min(starts, default=0)]), base_ns(trace))[0])
