"""What the time of a step went through: the critical path, edge by edge and in sum."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kineto_trace.analysis.gpu_time.gpu_events import NO_GPU
from kineto_trace.model.context import Context
from kineto_trace.model.trace import NO_STRING
from kineto_trace.structure.activity_links import NOTHING, gpu
from kineto_trace.structure.annotation_window import Instance, Window, find_window
from kineto_trace.structure.dependency_graph import (
    DATA_LOADING,
    EDGE_TYPES,
    HOST_KINDS,
    KERNEL_DELAY,
    KINDS,
    LAUNCH_DELAY,
    SYNC,
    DependencyGraph,
    Path,
    build,
    critical_path,
)
from kineto_trace.structure.nesting import nest_tables
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.text_columns import texts
from kineto_trace.view_api.view import Answer, view

Ints = npt.NDArray[np.int64]
STEP = "ProfilerStep"
BOUNDS = (
    "cpu_bound",
    "data_loading",
    "gpu_compute_bound",
    "gpu_memory_bound",
    "gpu_communication_bound",
    "gpu_kernel_kernel_overhead",
    "gpu_kernel_launch_overhead",
)
CPU, LOADING, COMPUTE, MEMORY, COMMUNICATION, BETWEEN_KERNELS, LAUNCHING = range(7)


class FoundPath(NamedTuple):
    """A path, the graph that it is in and the window that it explains."""

    graph: DependencyGraph
    path: Path
    window: Window
    notes: Sequence[str]


def _default_graph(context: Context) -> DependencyGraph:
    return build(context)


def find_path(
    context: Context,
    *,
    annotation: str = STEP,
    instance: Instance = None,
    data_loading: Sequence[str] = DATA_LOADING,
    infer: bool = True,
) -> FoundPath:
    """The path that both views tell of. Raises ViewError."""
    window = find_window(context, annotation, instance, optional=annotation == STEP and instance is None)
    usual = tuple(data_loading) == DATA_LOADING and infer
    graph = context.get(_default_graph) if usual else build(context, data_loading=data_loading, infer=infer)
    path = critical_path(graph, window.start_ns, window.end_ns)
    return FoundPath(graph, path, window, [*window.notes, *_notes(context, graph, path)])


def _notes(context: Context, graph: DependencyGraph, path: Path) -> list[str]:
    notes = []
    if not len(context.trace.table("cuda_sync")):
        inferred = int(path.inferred.sum())
        notes.append(
            "the trace has no CUDA synchronisation records (cuda_sync): what synchronising calls and streams waited "
            f"for is inferred from times, {inferred} of {len(path)} edges of the path so"
        )
    if not len(path):
        notes.append("no operator, call or GPU activity lies in the window, so nothing is known of its time")
    if len(path) and path.first[0] < 0 and path.last[0] >> 1 >= graph.events.host:
        before = _us(path.end[0] - path.start[0])
        notes.append(
            f"the call that launched the path's first GPU activity is not in the trace: {before:.3f} us before it"
        )
    return notes


def _us(ns: Any) -> npt.NDArray[np.float64]:
    found: npt.NDArray[np.float64] = np.asarray(ns) / 1000.0
    return found


def bounds(found: FoundPath) -> npt.NDArray[np.int64]:
    """For each edge of the path its number in BOUNDS."""
    graph, path = found.graph, found.path
    events = graph.events
    on_gpu = path.on_gpu(events.host)
    activity = (path.last >> 1) - events.host
    communication = np.zeros(len(path), np.bool_)
    communication[on_gpu] = graph.activities.communication[activity[on_gpu]]
    copies = on_gpu & (events.kind[path.last >> 1] > len(HOST_KINDS))
    work = np.select([communication, copies, on_gpu], [COMMUNICATION, MEMORY, COMPUTE], CPU)
    loading = ~on_gpu & (path.event >= 0) & events.data_loading[path.event]
    work[loading] = LOADING
    waits = [path.edge == LAUNCH_DELAY, (path.edge == KERNEL_DELAY) | (on_gpu & (path.edge == SYNC))]
    bound: npt.NDArray[np.int64] = np.select(waits, [LAUNCHING, BETWEEN_KERNELS], work)
    return bound


def _ops(graph: DependencyGraph, event: Ints) -> Ints:
    """The innermost operator of each event (row of cpu_op): itself, the one around it, or the one that launched it."""
    events = graph.events
    op = np.full(len(event), NOTHING)
    gpu = event >= events.host
    op[gpu] = graph.activities.op[event[gpu] - events.host]
    above, rows = event.copy(), np.flatnonzero((event >= 0) & ~gpu)
    while len(rows):
        is_op = events.kind[above[rows]] == HOST_KINDS.index("cpu_op")
        op[rows[is_op]] = events.row[above[rows[is_op]]]
        rows = rows[~is_op]
        above[rows] = events.owner[above[rows]]
        rows = rows[above[rows] >= 0]
    return op


def _annotations(context: Context, found: FoundPath, gaps: Ints) -> Ints:
    """For edges outside of all operators: the name (number) of the innermost annotation around the middle of each."""
    table = context.trace.table("user_annotation")
    if not len(table) or not len(gaps):
        return np.full(len(gaps), NO_STRING)
    threads = _threads(found)[gaps]
    middle = (found.path.start[gaps] + found.path.end[gaps]) // 2
    nested = nest_tables([table], context.trace.window_end_ns)
    place = nested.innermost(threads, middle)
    return np.where(place >= 0, table["name"][nested.order[place]], NO_STRING).astype(np.int64)


def _threads(found: FoundPath) -> Ints:
    """Returns the thread of each edge; after the last GPU activity that of the steps; 0: on the GPU."""
    graph, path = found.graph, found.path
    threads: Ints = graph.events.thread[path.last >> 1].astype(np.int64)
    after_gpu = (path.last >> 1 >= graph.events.host) & (path.first == path.last)
    threads[after_gpu] = graph.main[0] if graph.main else 0
    return threads


def _rows(context: Context, found: FoundPath) -> dict[str, Any]:
    graph, path, window = found.graph, found.path, found.window
    events, strings = graph.events, context.trace.strings
    owned = path.event >= 0
    name = np.where(owned, events.name[path.event], NO_STRING).astype(np.int64) if len(path) else path.event
    gaps = np.flatnonzero(~owned)
    name[gaps] = _annotations(context, found, gaps)
    last = path.last >> 1
    on_gpu = path.on_gpu(events.host)
    device, stream = np.zeros(len(path), np.int64), np.zeros(len(path), np.int64)
    device[on_gpu] = graph.activities.device[last[on_gpu] - events.host]
    stream[on_gpu] = graph.activities.stream[last[on_gpu] - events.host]
    op = _ops(graph, path.event)
    of_op = np.full(len(path), NO_STRING, np.int64)
    of_op[op >= 0] = context.trace.table("cpu_op")["name"][op[op >= 0]]
    category = np.full(len(path), NOTHING)
    category[owned] = events.kind[path.event[owned]]
    return {
        "position": np.arange(len(path)),
        "start_us": _us(path.start - window.start_ns),
        "duration_us": _us(path.end - path.start),
        "edge": texts(EDGE_TYPES, path.edge.astype(np.int64)),
        "bound_by": texts(BOUNDS, bounds(found)),
        "name": texts(strings, name),
        "category": texts(KINDS, category),
        "op": texts(strings, of_op),
        "thread": pa.array(_threads(found), mask=on_gpu),
        "device": pa.array(device, mask=~on_gpu),
        "stream": pa.array(stream, mask=~on_gpu),
        "inferred": path.inferred,
    }


@view(
    "critical_path",
    columns(
        ("position", "int", "", "position of the edge on the path"),
        ("start_us", "float", "us", "start of the edge, relative to the start of the window"),
        ("duration_us", "float", "us", "length of the edge"),
        ("edge", "text", "", "operator, dependency, kernel_launch_delay, kernel_kernel_delay or sync_dependency"),
        ("bound_by", "text", "", "what bounds this time: see critical_path_breakdown"),
        (
            "name",
            "text",
            "",
            "operator, call or GPU activity that this time belongs to; between operators, the annotation",
        ),
        ("category", "text", "", "kind of that activity"),
        (
            "op",
            "text",
            "",
            "innermost operator: the event itself, the one around the call, or the one that launched the activity",
        ),
        ("thread", "int", "", "system thread id; missing on the GPU"),
        ("device", "int", "", "GPU; missing on the host"),
        ("stream", "int", "", "CUDA stream; missing on the host"),
        ("inferred", "bool", "", "whether this dependency was inferred from times, because no record shows it"),
    ),
)
def critical_path_edges(
    context: Context,
    *,
    annotation: str = STEP,
    instance: Instance = None,
    data_loading: Sequence[str] = DATA_LOADING,
    infer: bool = True,
) -> Answer:
    """The chain of events that determined the length of a window, edge by edge in order of time.

    The path is found backwards from its end: of everything that an event had to wait for (the event before it on its
    thread or stream, its launch, a synchronisation, the thread of the backward pass, the runtime's lock), the last to
    happen is the one that held it up. The durations therefore add up to the length of the window. Shortening an event
    that is not on the path does not shorten the window.

    Options:
    - annotation: the window spans all annotations whose names contain this text; "" takes the whole trace. It ends with
      the annotation, or with the last GPU activity launched in it if that is later.
    - instance: only the n-th of these annotations, counted from 0, or a range such as "2:4" (both ends included).
    - data_loading: patterns (regular expressions) of annotations and operators that load data.
    - infer: without cuda_sync records, infer from the times what each call waited for.
    """
    found = find_path(
        context, annotation=annotation, instance=instance, data_loading=patterns_of(data_loading), infer=infer
    )
    return Answer(_rows(context, found), found.notes)


def patterns_of(given: Sequence[str]) -> Sequence[str]:
    """The option data_loading: one pattern or several."""
    return (given,) if isinstance(given, str) else tuple(given)


@view(
    "critical_path_breakdown",
    columns(
        (
            "bound_by",
            "text",
            "",
            "cpu_bound, data_loading, gpu_compute_bound, gpu_memory_bound (copies and fills), "
            "gpu_communication_bound, gpu_kernel_kernel_overhead (gaps and waits between GPU activities) or "
            "gpu_kernel_launch_overhead (from launch to start)",
        ),
        ("time_us", "float", "us", "time of the critical path"),
        ("share_pct", "float", "%", "share of the whole path"),
        ("edges", "int", "", "number of edges"),
    ),
)
def critical_path_breakdown(
    context: Context,
    *,
    annotation: str = STEP,
    instance: Instance = None,
    data_loading: Sequence[str] = DATA_LOADING,
    infer: bool = True,
) -> Answer:
    """The time of the critical path by what bounds it. Options and rules are those of the view critical_path.

    Without any GPU activity in the trace, what GPUs contributed is missing, not zero.
    """
    found = find_path(
        context, annotation=annotation, instance=instance, data_loading=patterns_of(data_loading), infer=infer
    )
    bound = bounds(found)
    time = np.bincount(bound, found.path.end - found.path.start, minlength=len(BOUNDS))
    edges = np.bincount(bound, minlength=len(BOUNDS))
    order = np.argsort(-time, kind="stable")
    total = float(time.sum()) or 1.0
    values: Mapping[str, Any] = {
        "bound_by": texts(BOUNDS, order),
        "time_us": _us(time[order]),
        "share_pct": 100 * time[order] / total,
        "edges": edges[order],
    }
    if len(context.get(gpu)):
        return Answer(values, found.notes)
    on_host = order <= LOADING
    known = {name: _only(values[name], on_host) for name in ("time_us", "share_pct", "edges")}
    return Answer({**values, **known}, [*found.notes, NO_GPU])


def _only(values: npt.NDArray[Any], known: npt.NDArray[np.bool_]) -> list[Any]:
    """The values that are known; None for the others."""
    return [value if told else None for value, told in zip(values.tolist(), known.tolist(), strict=True)]
