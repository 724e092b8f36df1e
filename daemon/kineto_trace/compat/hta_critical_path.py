"""The critical path as HTA 0.6.1 (traceinsight) finds it, for compat=HTA.

Theory of operation
    HTA's graph has two nodes per event that begins in the window: CPU operators, runtime and driver calls, data
    loading, and their GPU work. Its edges, in the order in which it adds them (which decides between paths of equal
    weight):

    1. Lock: cudaHostAlloc, cudaLaunchKernel and cudaMemcpyAsync. Each end gets an edge from every start since the
       last end (its own: the duration; others: 0), and, if there was none, an edge of 0 from the last end.
    2. Call stacks, thread by thread: from each start or end to the next one, with the time between; 0 between
       outermost events, and into the end of a blocking call. Not between two nodes of the lock. If the forward pass
       has one thread and the backward pass another, they are one thread.
    3. GPU rows in the order of their starts (synchronisations: ends). An activity: its duration; 0 from the activity
       that its stream waits for; the launch delay, if the queue was empty at the launch and the stream's last
       activity had ended by then; else the delay since that one, if below 1500 us. A synchronisation: 0 from the
       last activity (of all streams: Context Sync; of the event's stream before its record: Event Sync) to the call.

    An edge that is added again keeps its place, but takes the new type and weight. The critical path is the path
    with the largest sum of weights (below 0: 0). Everything is found here with arrays; HTA visits events one by one.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from kineto_trace.analysis.critical_path_views import STEP, critical_path_breakdown, critical_path_edges, patterns_of
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.longest_paths import Edges, longest
from kineto_trace.arrays.row_groups import group
from kineto_trace.base.array_types import NOTHING, Flags, Ints
from kineto_trace.compat.hta_critical_path_gpu import Clipped, gpu_edges, launches
from kineto_trace.compat.hta_frame import KIND, KINDS, HtaError, HtaFrame, hta_frame
from kineto_trace.errors import ViewError
from kineto_trace.kernel_traits.kernel_types import short_name
from kineto_trace.model.context import Context
from kineto_trace.model.trace import GPU_TABLES
from kineto_trace.structure.dependency_graph import (
    DATA_LOADING,
    DEPENDENCY,
    EDGE_TYPES,
    KERNEL_DELAY,
    LAUNCH_DELAY,
    OPERATOR,
    SYNC,
    Instance,
    instance_range,
)
from kineto_trace.view_api.text_columns import texts
from kineto_trace.view_api.view import Answer, Compat, View

LOCKED = ("cudaHostAlloc", "cudaLaunchKernel", "cudaMemcpyAsync")
BLOCKING = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventQuery",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cudaMemcpyAsync",
)
_COMMUNICATION = re.compile(r"(^nccl.*)|(^hip)|(^hccl)|(.*ncclKernel.*)")
# Tables in the order of our own files; for equal times, the order in the file decides.
_FILE_ORDER = (
    *("python_function", "user_annotation", "cpu_op", "cuda_runtime", "cuda_driver", "gpu_user_annotation"),
    *(*GPU_TABLES, "cuda_sync", "overhead", "other"),
)
_RANKS = np.array([_FILE_ORDER.index(kind) for kind in KINDS])
BOUNDS = (
    "cpu_bound",
    "data_loading",
    "gpu_compute_bound",
    "gpu_communication_bound",
    "gpu_kernel_kernel_overhead",
    "gpu_kernel_launch_overhead",
)
_CPU, _LOADING, _COMPUTE, _COMMUNICATES, _BETWEEN_KERNELS, _LAUNCHING = range(6)
Hta = Callable[[Context, str, Instance, Sequence[str]], Answer]


class AddedEdges(NamedTuple):
    """Edges in the order in which they are added: nodes, type, weight (ns), and whose time it is (row or NOTHING)."""

    first: Ints
    last: Ints
    type: Ints
    weight: Ints
    event: Ints


class HtaPath(NamedTuple):
    """The edges of HTA's critical path in its order, in the clipped frame."""

    clipped: Clipped
    edges: AddedEdges


def name_numbers(strings: Sequence[str], names: Sequence[str]) -> Ints:
    """Returns the numbers of these names in the trace."""
    return np.array([number for number, text in enumerate(strings) if text in names], np.int64)


def file_order(context: Context) -> HtaFrame:
    """Returns HTA's rows in the order of the file, as far as it is known, with links in this order."""
    frame = context.get(hta_frame)
    tables = [context.trace.table(kind) for kind in KINDS]
    if all("place" in table.origin for table in tables if len(table)):
        at = np.empty(len(frame), np.int64)
        for number, table in enumerate(tables):
            own = frame.kind == number
            at[own] = table.origin["place"][frame.row[own]] if len(table) else 0
        order = np.argsort(at, kind="stable")
    else:
        order = np.lexsort((frame.row, _RANKS[frame.kind]))
    place = np.empty(len(frame) + 1, np.int64)
    place[order], place[-1] = np.arange(len(order)), NOTHING
    ordered = frame.take(order)
    return replace(ordered, link=place[ordered.link])


def clip(context: Context, annotation: str, instance: Instance, patterns: Sequence[str]) -> Clipped:
    """Returns the events of the window, and their nodes. Raises ViewError."""
    strings = context.trace.strings
    loaded = context.get(hta_frame)
    low, high = _window(strings, loaded, annotation, instance)
    frame = context.get(file_order)
    on_host = frame.stream == NOTHING
    launched = on_host & (frame.start >= low) & (frame.start <= high) & (frame.duration > 0)
    inside = launched.copy()
    links = frame.link[launched & (frame.link != NOTHING)]
    inside[links[~on_host[links]]] = True
    inside |= ~on_host & np.isin(frame.name, name_numbers(strings, ["Stream Wait Event"]))
    loading = np.array([n for n, text in enumerate(strings) if any(part in text for part in patterns)], np.int64)
    has_nodes = frame.exact & np.isin(frame.kind, [KIND[kind] for kind in ("cpu_op", "cuda_runtime", "cuda_driver")])
    has_nodes |= np.isin(frame.name, loading)
    has_nodes |= ~on_host & ((frame.correlation >= 0) | (frame.link != NOTHING))
    rows = np.flatnonzero(inside & has_nodes)
    time = np.concatenate([frame.start[rows], frame.end[rows]])
    ends = np.repeat([False, True], len(rows))
    order = np.lexsort((ends, np.tile(rows, 2), time))
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    start_node, end_node = np.full(len(frame), NOTHING), np.full(len(frame), NOTHING)
    start_node[rows], end_node[rows] = number[: len(rows)], number[len(rows) :]
    return Clipped(frame, inside, start_node, end_node, time[order], np.tile(rows, 2)[order], ~ends[order])


def _window(strings: Sequence[str], frame: HtaFrame, annotation: str, instance: Instance) -> tuple[int, int]:
    """Returns HTA's window: from the earliest start to the latest end of the instances, taken in file order."""
    if not len(frame):
        raise ViewError("the trace has no events that HTA would analyse")
    rows = np.arange(len(frame))
    if annotation:
        numbers = [number for number, text in enumerate(strings) if annotation in text]
        rows = np.flatnonzero(np.isin(frame.name, numbers))
        first, last = instance_range(instance) or (0, 0)
        rows = rows[first : last + 1]
    if not len(rows):
        raise ViewError(f"HTA finds no instance {instance or 0} of {annotation!r} among the steps that it keeps")
    return int(frame.start[rows].min()), int(frame.end[rows].max())


def _lock_edges(strings: Sequence[str], clipped: Clipped) -> AddedEdges:
    name = clipped.frame.name[clipped.node_event]
    nodes = np.flatnonzero(np.isin(name, name_numbers(strings, LOCKED)))
    starts = clipped.node_starts[nodes]
    places = np.arange(len(nodes))
    ends = np.flatnonzero(~starts)
    at = np.searchsorted(ends, places[starts], side="right")
    begun, target = places[starts][at < len(ends)], ends[at[at < len(ends)]]
    after_end = ends[(ends > 0) & ~starts[np.maximum(ends - 1, 0)]]
    first = np.concatenate([begun, after_end - 1])
    last = np.concatenate([target, after_end])
    order = np.lexsort((-first, last))
    first, last = nodes[first[order]], nodes[last[order]]
    own = clipped.node_event[first] == clipped.node_event[last]
    weight = np.where(own, clipped.node_time[last] - clipped.node_time[first], 0)
    event = np.where(own, clipped.node_event[first], NOTHING)
    return AddedEdges(first, last, np.where(own, OPERATOR, DEPENDENCY), weight, event)


def _thread_of(strings: Sequence[str], clipped: Clipped, part: str) -> int:
    """Returns the only thread with operators or annotations whose names contain this part; 0 for none or several."""
    frame = clipped.frame
    rows = clipped.inside & frame.exact & np.isin(frame.kind, [KIND["cpu_op"], KIND["user_annotation"]])
    rows &= np.isin(frame.name, [number for number, text in enumerate(strings) if part in text])
    threads = unique_values(frame.tid[rows])
    return int(threads[0]) if len(threads) == 1 else 0


def _stack_edges(strings: Sequence[str], clipped: Clipped) -> AddedEdges:
    frame = clipped.frame
    rows = np.flatnonzero(clipped.inside & (frame.stream == NOTHING))
    thread = frame.tid[rows].copy()
    forward, backward = (_thread_of(strings, clipped, part) for part in ("forward", "autograd"))
    if forward and backward:
        thread[thread == backward] = forward
    pid = frame.pid[rows]
    count = len(rows)
    ends = np.repeat([False, True], count)
    event = np.tile(rows, 2)
    duration = frame.duration[event]
    time = np.where(ends, frame.end[event], frame.start[event])
    # equal times: ends before starts; the inner one's end and the outer one's start first
    order = np.lexsort(
        (
            np.where(ends, -event, event),
            np.where(ends, duration, -duration),
            ~ends,
            time,
            np.tile(thread, 2),
            np.tile(pid, 2),
        )
    )
    event, ends = event[order], ends[order]
    group = np.tile(thread, 2)[order], np.tile(pid, 2)[order]
    parent, event = _closed_by_stack(event, ends)
    return _walk(strings, clipped, event, ends, parent, group)


def _closed_by_stack(event: Ints, ends: Flags) -> tuple[Ints, Ints]:
    """Closes at each end the node opened last, its own or not: (parent of each place's event, event of each place)."""
    depth = np.cumsum(np.where(ends, -1, 1)) + ends  # of a start and of the end that closes it
    by_depth = np.argsort(depth, kind="stable")
    closed = event.copy()
    closed[by_depth[1::2]] = event[by_depth[0::2]]
    above = np.full(len(event), NOTHING)
    if len(event):
        # the last start of each depth before a place: sort by (depth, place), look up (depth - 1, place)
        starts = np.flatnonzero(~ends)
        keys = depth[starts] * (len(event) + 1) + starts
        order = np.argsort(keys)
        wanted = (depth - 1) * (len(event) + 1) + np.arange(len(event))
        at = np.searchsorted(keys[order], wanted) - 1
        found = starts[order[np.maximum(at, 0)]]
        above = np.where((depth > 1) & (at >= 0), event[found], NOTHING)
    return above, closed


def _walk(
    strings: Sequence[str], clipped: Clipped, event: Ints, ends: Flags, parent: Ints, group: tuple[Ints, Ints]
) -> AddedEdges:
    frame = clipped.frame
    kept = clipped.start_node[event] != NOTHING
    event, ends, parent = event[kept], ends[kept], parent[kept]
    thread, pid = (column[kept] for column in group)
    node = np.where(ends, clipped.end_node[event], clipped.start_node[event])
    same = (thread[1:] == thread[:-1]) & (pid[1:] == pid[:-1])
    locked = np.isin(frame.name[event], name_numbers(strings, LOCKED))
    shares = locked[1:] & locked[:-1] & (~ends[:-1] | ends[1:])
    depth = np.cumsum(np.where(ends, -1, 1))
    first, last = node[:-1], node[1:]
    outermost = ~ends[1:] & (depth[:-1] == 0)
    blocking = ends[1:] & np.isin(frame.name[event[1:]], name_numbers(strings, BLOCKING))
    weight = np.where(outermost | blocking, 0, clipped.node_time[last] - clipped.node_time[first])
    owner = np.where(~ends[:-1], event[:-1], np.where(ends[1:], event[1:], parent[:-1]))
    kept = same & ~shares
    return AddedEdges(
        first[kept],
        last[kept],
        np.where(outermost, DEPENDENCY, OPERATOR)[kept],
        weight[kept],
        np.where(outermost, NOTHING, owner)[kept],
    )


def find(context: Context, annotation: str, instance: Instance, patterns: Sequence[str]) -> HtaPath:
    """Returns HTA's critical path. Raises HtaError where HTA fails, ViewError where it finds no window."""
    strings = context.trace.strings
    clipped = clip(context, annotation, instance, patterns)
    if not launches(strings, clipped.frame).any():
        raise HtaError("no call launches anything")
    same = group([clipped.frame.kind.astype(np.int64), clipped.frame.row])
    if (same.sizes()[same.number[clipped.start_node != NOTHING]] > 1).any():
        raise HtaError("a kernel launched by several calls appears several times")
    added = [_lock_edges(strings, clipped), _stack_edges(strings, clipped), AddedEdges(*gpu_edges(context, clipped))]
    edges = _replaced(
        AddedEdges(*(np.concatenate(column) for column in zip(*added, strict=True))), len(clipped.node_time)
    )
    stream = clipped.frame.stream[clipped.node_event]
    sync = edges.type == SYNC
    first, last = stream[edges.first[sync]], stream[edges.last[sync]]
    if ((first == last) & (first != NOTHING)).any():
        raise HtaError("it sees a stream that waits for itself")
    weight = np.maximum(edges.weight, 0)
    path = longest(len(clipped.node_time), Edges(edges.first, edges.last, weight))
    if not len(path):
        raise HtaError("no event in the window is in its graph")
    return HtaPath(clipped, AddedEdges(*(column[path] for column in edges)))


def _replaced(edges: AddedEdges, nodes: int) -> AddedEdges:
    """Returns one edge per pair of nodes: at the first one's place, with the last one's type and weight."""
    keys = edges.first * nodes + edges.last
    _, place, inverse = np.unique(keys, return_index=True, return_inverse=True)
    latest = np.empty(len(place), np.int64)
    latest[inverse] = np.arange(len(keys))
    owned = np.full(len(place), NOTHING, np.int64)
    typed = np.isin(edges.type, [OPERATOR, KERNEL_DELAY])
    owned[inverse[typed]] = edges.event[typed]
    order = np.argsort(place)
    chosen = latest[order]
    first, last, type_, weight, _ = (column[chosen] for column in edges)
    return AddedEdges(first, last, type_, weight, owned[order])


def _bounds(context: Context, found: HtaPath, patterns: Sequence[str]) -> Ints:
    """Returns for each edge its number in BOUNDS, or NOTHING. Each name is judged once."""
    frame, edges, strings = found.clipped.frame, found.edges, context.trace.strings
    event = edges.event
    keys = frame.name[event].astype(np.int64) << 1 | (frame.stream[event] < 0)
    distinct, number = np.unique(keys, return_inverse=True)

    def judge(key: int) -> int:
        text = short_name(strings[key >> 1])
        if key & 1:
            return _LOADING if any(re.search(pattern, text) for pattern in patterns) else _CPU
        return _COMMUNICATES if _COMMUNICATION.match(text) else _COMPUTE

    judged = np.array([judge(key) for key in distinct.tolist()], np.int64)
    work = judged[number] if len(judged) else event
    fixed = [edges.type == KERNEL_DELAY, edges.type == LAUNCH_DELAY, np.isin(edges.type, [DEPENDENCY, SYNC])]
    bound: Ints = np.select(fixed, [_BETWEEN_KERNELS, _LAUNCHING, NOTHING], work)
    return bound


def _notes(context: Context) -> list[str]:
    notes = ["HTA's rules: times are rounded to whole microseconds, and the last of several steps is left out"]
    if not len(context.trace.table("cuda_sync")):
        notes.append("the trace has no CUDA synchronisation records (cuda_sync): HTA's path may be wrong")
    return notes


def edges(context: Context, annotation: str, instance: Instance, patterns: Sequence[str]) -> Answer:
    """Returns the columns of the view critical_path. Raises HtaError, ViewError."""
    found = find(context, annotation, instance, patterns)
    frame, path, strings = found.clipped.frame, found.edges, context.trace.strings
    times = found.clipped.node_time
    origin = int(frame.start[found.clipped.inside].min())
    event = path.event
    owned = event != NOTHING
    at = found.clipped.node_event[path.last]
    gpu = frame.stream[at] != NOTHING
    values = {
        "position": np.arange(len(event)),
        "start_us": (times[path.first] - origin) / 1000.0,
        "duration_us": path.weight / 1000.0,
        "edge": texts(EDGE_TYPES, path.type),
        "bound_by": texts(BOUNDS, _bounds(context, found, patterns)),
        "name": texts(strings, np.where(owned, frame.name[event], NOTHING)),
        "category": texts(KINDS, np.where(owned, frame.kind[event].astype(np.int64), NOTHING)),
        "op": texts(strings, np.full(len(event), NOTHING)),
        "thread": pa.array(frame.tid[at], mask=gpu),
        "device": pa.array(frame.pid[at], mask=~gpu),
        "stream": pa.array(frame.stream[at], mask=~gpu),
        "inferred": np.zeros(len(event), np.bool_),
    }
    return Answer(values, _notes(context))


def breakdown(context: Context, annotation: str, instance: Instance, patterns: Sequence[str]) -> Answer:
    """Returns the columns of the view critical_path_breakdown. Raises HtaError, ViewError."""
    found = find(context, annotation, instance, patterns)
    bound, weight = _bounds(context, found, patterns), found.edges.weight
    known = bound != NOTHING
    time = np.bincount(bound[known], weight[known], len(BOUNDS)) / 1000.0
    count = np.bincount(bound[known], minlength=len(BOUNDS))
    order = np.argsort(-time, kind="stable")
    order = order[count[order] > 0]
    total = float(weight.sum()) / 1000.0 or 1.0
    values = {
        "bound_by": texts(BOUNDS, order),
        "time_us": time[order],
        "share_pct": 100 * time[order] / total,
        "edges": count[order],
    }
    return Answer(values, _notes(context))


@critical_path_edges.variant(Compat.HTA)
def hta_edges(
    context: Context,
    *,
    annotation: str = STEP,
    instance: Instance = None,
    data_loading: Sequence[str] = DATA_LOADING,
    infer: bool = True,
) -> Answer:
    """compat=hta: the graph and the longest path of HTA's critical_path_analysis (version 0.6.1).

    Times are rounded to whole microseconds. The time between outermost operators and inside synchronising calls has
    no weight, launch delays count only where the queue was empty, and kernel-kernel delays only below 1500 us. As in
    HTA, `instance` defaults to the first one, and `data_loading` has no effect unless it is given. Where HTA fails on
    a trace, a note says so and the path is the exact one.
    """
    return _or_exact(edges, critical_path_edges, context, (annotation, instance, data_loading, infer))


@critical_path_breakdown.variant(Compat.HTA)
def hta_breakdown(
    context: Context,
    *,
    annotation: str = STEP,
    instance: Instance = None,
    data_loading: Sequence[str] = DATA_LOADING,
    infer: bool = True,
) -> Answer:
    """compat=hta: the figures of CPGraph.summary().

    Copies and fills count as gpu_compute_bound, and edges without a weight (dependency, sync_dependency) are left out.
    """
    options = (annotation, instance, data_loading, infer)
    return _or_exact(breakdown, critical_path_breakdown, context, options)


def _or_exact(hta: Hta, view: View, context: Context, options: tuple[str, Instance, Sequence[str], bool]) -> Answer:
    """Returns HTA's figures, or if HTA fails the exact ones of the instance that HTA means."""
    annotation, instance, data_loading, infer = options
    given = patterns_of(data_loading)
    try:
        return hta(context, annotation, instance, () if given == DATA_LOADING else given)
    except HtaError as exc:
        first = 0 if annotation and instance is None else instance
        exact = view.function(context, annotation=annotation, instance=first, data_loading=given, infer=infer)
        return Answer(exact.values, [exc.note, *exact.notes])
