"""The dependencies of host events and GPU activities, and the critical path through them.

Theory of operation
    Every host event (operator, runtime or driver call, data loading) and every GPU activity has two nodes: event e
    begins at node 2e and ends at node 2e+1. A node may depend on several earlier ones:

    - host, inside a thread: on the end of the previous sibling, else on the start of the enclosing event; an end on the
      end of the last child, else on the own start.
    - host, outermost: on the event that ended last on the own thread, or on a thread with which it exchanges work: the
      thread of the steps and the threads of the backward pass take turns, one waits for the other.
    - a call that holds the runtime's lock: its end on the end of the call that had the lock before it.
    - a call that waits for the GPU: its end on the end of the activity it waited for.
    - a GPU activity: its end on its start; its start on the call that launched it, on the activity that ended
      before it on its stream, and on the activity that its stream was told to wait for.

    All dependencies of a node happened before it, so the last of them is the one that held it up. The critical path
    follows these from the end of the window (an event of the thread of the steps, unless the GPU works longer) back to
    its start. It has no holes: the edges of the path add up to the time of the window.

    cuda_sync records show which activity was waited for. If a trace has none, it is inferred: a call that synchronises
    waited for the activity that ended last before it returned; and an activity that begins long after its launch and
    its stream's last activity waited for the activity that ended last on another stream of the device. The counts of
    inferred edges on the path are part of the answer.

    HTA's graph has the same edges by other rules (hta_critical_path.py).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kineto_trace.arrays.id_sets import lookup, unique_values
from kineto_trace.arrays.longest_paths import trail
from kineto_trace.base.array_types import NOTHING, Flags, Ints, Ints32, UInts8, UInts32
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from kineto_trace.model.trace import GPU_TABLES, OP_TABLES, Trace
from kineto_trace.structure.activity_links import NO_THREAD, Gpu, calls, gpu, training_thread
from kineto_trace.structure.nesting import nest_tables

# Table of each event, Events.kind. Data loading: those annotations alone.
HOST_KINDS = ("user_annotation", "cpu_op", "cuda_runtime", "cuda_driver")
KINDS = (*HOST_KINDS, *GPU_TABLES)
OPERATOR, DEPENDENCY, LAUNCH_DELAY, KERNEL_DELAY, SYNC = range(5)
EDGE_TYPES = ("operator", "dependency", "kernel_launch_delay", "kernel_kernel_delay", "sync_dependency")
DATA_LOADING = ("^enumerate\\(Data(Loader|Pipe)\\)#",)
EVENT_SYNC, STREAM_WAIT, STREAM_SYNC, CONTEXT_SYNC = 1, 2, 3, 4  # cuda_sync.type
# Kernels of one stream follow each other within 10 us, those of a communication stream within about 1 ms; longer delays
# (HTA's threshold) have another cause.
KERNEL_DELAY_LIMIT_NS = 1_500_000
INFERRED_DELAY_NS = 10_000
_WAITS = re.compile(r"^(cuda|hip|cu)(Device|Stream|Event|Ctx)Synchronize")
_COPIES = re.compile(r"^(cuda|hip|cu)Memcpy")
_LOCKS = re.compile(r"^(cuda|hip|cu)(LaunchKernel|LaunchCooperative|GraphLaunch|Memcpy|Memset|HostAlloc|Malloc|Free)")
_BACKWARD = re.compile(r"^autograd::engine::evaluate_function")
Instance = int | str | tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class GraphEvents:
    """Host events in the order of their trees, then GPU activities by start (Unix ns).

    kind: number into KINDS.
    row: in that table.
    owner: for host events the place of the enclosing event, for GPU activities the place of the launching call; or
        NOTHING.
    stop: for host events, the place after its last descendant.
    """

    kind: UInts8
    row: Ints
    start: Ints
    end: Ints
    name: Ints32
    thread: UInts32
    owner: Ints
    stop: Ints
    host: int  # how many of them are host events
    data_loading: Flags

    def __len__(self) -> int:
        return len(self.kind)

    def times(self, nodes: Ints) -> Ints:
        """Returns when each node happens (Unix ns)."""
        found: Ints = np.where(nodes & 1, self.end[nodes >> 1], self.start[nodes >> 1])
        return found


@dataclass(frozen=True, slots=True)
class DependencyGraph:
    """For each node the one that held it up (NOTHING if unknown), the type of that edge, and whether it is inferred.

    main: the threads of the steps and of the backward pass.
    """

    events: GraphEvents
    activities: Gpu  # place n is event events.host + n
    before: Ints
    edge: UInts8
    inferred: Flags
    main: Sequence[int]


@dataclass(frozen=True, slots=True)
class Path:
    """The edges of a path in the order of time. event: whose time it is, or NOTHING. Times in Unix ns.

    first, last: the nodes that each edge joins (first is NOTHING at the beginning of the window). If both are one node,
        the edge leads from it to the end of the window, which is the host's time.
    """

    first: Ints
    last: Ints
    start: Ints
    end: Ints
    edge: UInts8
    event: Ints
    inferred: Flags

    def __len__(self) -> int:
        return len(self.edge)

    def on_gpu(self, host: int) -> Flags:
        """Returns which edges lead to GPU activities. host: number of host events."""
        found: Flags = (self.last >> 1 >= host) & (self.first != self.last)
        return found


class LatestEnds:
    """Finds which event of a group ended last before a moment."""

    def __init__(self, group: Ints, end: Ints, events: Ints) -> None:
        self._numbers = unique_values(group)
        self._low = int(end.min()) if len(end) else 0
        self._span = int(end.max()) - self._low + 2 if len(end) else 1
        keys = np.searchsorted(self._numbers, group) * self._span + (end - self._low)
        order = np.argsort(keys, kind="stable")
        self._keys, self._events = keys[order], events[order]

    def latest(self, group: Ints, time: Ints) -> Ints:
        """Returns for each moment (Unix ns) the event of the group that ended last by then."""
        if not len(self._keys):
            return np.full(len(group), NOTHING)
        at = np.minimum(np.searchsorted(self._numbers, group), len(self._numbers) - 1)
        known = (self._numbers[at] == group) & (time >= self._low)
        moment = np.minimum(time - self._low, self._span - 1)
        found = np.searchsorted(self._keys, at * self._span + moment, side="right") - 1
        known &= (found >= 0) & (self._keys[found] >= at * self._span)
        return np.where(known, self._events[found], NOTHING)


@dataclass(frozen=True, slots=True)
class Window:
    """A window in Unix ns, including its end."""

    start_ns: int
    end_ns: int
    notes: tuple[str, ...] = ()


def named(trace: Trace, name: Ints32, pattern: re.Pattern[str]) -> Flags:
    """Tells for each number of a name whether the pattern matches it. Names without rows are not checked."""
    flags = np.zeros(len(trace.strings), np.bool_)
    for number in unique_values(name).tolist():
        flags[number] = pattern.search(trace.strings[number]) is not None
    found: Flags = flags[name]
    return found


def host_events(context: Context, data_loading: Sequence[str] = DATA_LOADING) -> tuple[GraphEvents, Ints]:
    """Returns host events and GPU activities of the whole trace, and for each of Calls its event."""
    trace = context.trace
    loading = re.compile("|".join(data_loading) or "(?!)")
    annotations = trace.table(HOST_KINDS[0])
    rows = np.flatnonzero(named(trace, annotations["name"], loading))
    tables = [annotations.take(rows), *(trace.table(kind) for kind in HOST_KINDS[1:])]
    nested = nest_tables(tables, trace.window_end_ns)
    count = [len(table) for table in tables]
    order = nested.order.astype(np.int64)
    numbers = [rows, *(np.arange(n, dtype=np.int64) for n in count[1:])]
    host = len(order)
    place = np.empty(host, np.int64)
    place[order] = np.arange(host)
    called, activities = context.get(calls), context.get(gpu)
    # Calls.kind counts 0 runtime, 1 driver, as the last two tables do
    offset = np.array([sum(count[:2]), sum(count[:3])], np.int64)
    call_event = place[offset[called.kind] + called.row] if len(called) else np.empty(0, np.int64)
    launch = activities.call
    launched = np.where(launch >= 0, call_event[launch], NOTHING) if len(call_event) else launch
    names = np.concatenate([table["name"] for table in tables])[order]
    stop = nested.tree.stop.astype(np.int64)
    marks = np.zeros(host + 1, np.int64)
    found = np.flatnonzero(named(trace, names, loading))
    np.add.at(marks, found, 1)
    np.add.at(marks, stop[found], -1)
    gpus = len(activities)
    events = GraphEvents(
        kind=np.concatenate([np.repeat(np.arange(4, dtype=np.uint8), count)[order], activities.kind + np.uint8(4)]),
        row=np.concatenate([np.concatenate(numbers)[order], activities.row]),
        start=np.concatenate([nested.events.start, activities.start]),
        end=np.concatenate([nested.tree.end, activities.end]),
        name=np.concatenate([names, activities.name]),
        thread=np.concatenate([nested.events.track, np.zeros(gpus, np.uint32)]),
        owner=np.concatenate([nested.tree.parent.astype(np.int64), launched]),
        stop=np.concatenate([stop, np.full(gpus, NOTHING)]),
        host=host,
        data_loading=np.concatenate([np.cumsum(marks[:-1]) > 0, np.zeros(gpus, np.bool_)]),
    )
    return events, call_event


def build(context: Context, *, data_loading: Sequence[str] = DATA_LOADING, infer: bool = True) -> DependencyGraph:
    """Builds the dependencies of all events. data_loading: patterns of names; infer: also without records."""
    events, call_event = host_events(context, data_loading)
    activities = context.get(gpu)
    graph = DependencyGraph(
        events,
        activities,
        before=np.full(2 * len(events), NOTHING, np.int64),
        edge=np.full(2 * len(events), OPERATOR, np.uint8),
        inferred=np.zeros(2 * len(events), np.bool_),
        main=main_threads(context),
    )
    _inside_threads(graph)
    _hand_over(graph)
    _locks(context.trace, graph)
    _launches(graph)
    _streams(graph)
    synchronised = _recorded(context, graph, call_event)
    _waiting_calls(context.trace, graph, synchronised, infer)
    if infer and not len(context.trace.table("cuda_sync")):
        _other_streams(graph)
    return graph


def _offer(graph: DependencyGraph, nodes: Ints, sources: Ints, edge: int, *, inferred: bool = False) -> None:
    """Replaces the dependencies of nodes by sources that happened later (but before the nodes)."""
    use = sources >= 0
    nodes, sources = nodes[use], sources[use]
    times = graph.events.times
    when, known = times(sources), graph.before[nodes]
    later = (known < 0) | (when > times(known))
    later &= when <= times(nodes)
    # Dependencies must begin earlier than their dependents: so there are no cycles.
    later &= (graph.events.start[sources >> 1] < times(nodes)) | (sources < nodes)
    nodes, sources = nodes[later], sources[later]
    graph.before[nodes], graph.edge[nodes], graph.inferred[nodes] = sources, edge, inferred


def _inside_threads(graph: DependencyGraph) -> None:
    events, host = graph.events, graph.events.host
    place, parent = np.arange(host), events.owner[:host]
    order = np.argsort(parent, kind="stable")
    sibling = np.full(host, NOTHING)
    follows = np.zeros(host, np.bool_)
    follows[1:] = (parent[order][1:] == parent[order][:-1]) & (events.thread[order[1:]] == events.thread[order[:-1]])
    sibling[order[follows]] = order[np.flatnonzero(follows) - 1]
    last_child = np.full(host, NOTHING)
    inner = np.flatnonzero(parent >= 0)
    last_child[parent[inner]] = inner  # the last one of several wins
    graph.before[2 * place] = np.where(sibling >= 0, 2 * sibling + 1, np.where(parent >= 0, 2 * parent, NOTHING))
    graph.before[2 * place + 1] = np.where(last_child >= 0, 2 * last_child + 1, 2 * place)
    graph.edge[2 * place[parent < 0]] = DEPENDENCY


def _hand_over(graph: DependencyGraph) -> None:
    """Makes outermost events of the thread of the steps and of the threads of the backward pass depend on each
    other.
    """
    events, host, threads = graph.events, graph.events.host, graph.main
    if len(threads) < 2:
        return
    top = np.flatnonzero(events.owner[:host] < 0)
    thread = events.thread[top]
    for own in threads:
        places = top[thread == own]
        for other in threads:
            if other == own:
                continue
            others = top[thread == other]
            at = np.searchsorted(events.start[others], events.start[places], side="left") - 1
            source = np.where(at >= 0, others[at], NOTHING) if len(others) else np.full(len(places), NOTHING)
            idle = (source >= 0) & (events.end[source] < events.start[places])
            _offer(graph, 2 * places, np.where(idle, 2 * source + 1, NOTHING), DEPENDENCY)


def main_threads(context: Context) -> list[int]:
    """Returns the training thread and the threads of the backward pass."""
    main = context.get(training_thread)
    if main == NO_THREAD:
        return []
    table = context.trace.table("cpu_op")
    backward = (table["forward_thread"] > 0) | named(context.trace, table["name"], _BACKWARD)
    return [main, *(int(other) for other in unique_values(table["thread"][backward]) if other != main)]


def _locks(trace: Trace, graph: DependencyGraph) -> None:
    """Adds dependencies by the lock: overlapping calls of several threads get it in the order in which they end."""
    events, host = graph.events, graph.events.host
    called = events.kind[:host] >= HOST_KINDS.index("cuda_runtime")
    places = np.flatnonzero(called & named(trace, events.name[:host], _LOCKS))
    if len(places) < 2 or (events.thread[places] == events.thread[places[0]]).all():
        return
    places = places[np.argsort(events.end[places], kind="stable")]
    earlier, later = places[:-1], places[1:]
    contended = (events.thread[earlier] != events.thread[later]) & (events.end[earlier] > events.start[later])
    _offer(graph, 2 * later[contended] + 1, 2 * earlier[contended] + 1, DEPENDENCY)


def _launches(graph: DependencyGraph) -> None:
    events = graph.events
    activities = np.arange(events.host, len(events))
    graph.before[2 * activities + 1] = 2 * activities
    launch = events.owner[activities]
    _offer(graph, 2 * activities, np.where(launch >= 0, 2 * launch, NOTHING), LAUNCH_DELAY)


def _streams(graph: DependencyGraph) -> None:
    """Makes activities of one stream depend on each other in order."""
    host, gpus = graph.events.host, graph.activities
    activities = np.arange(len(gpus)) + host
    previous = LatestEnds(gpus.track, gpus.end, activities).latest(gpus.track, gpus.start)
    began = (previous >= 0) & (graph.events.start[previous] < gpus.start)
    _offer(graph, 2 * activities, np.where(began, 2 * previous + 1, NOTHING), KERNEL_DELAY)


def _other_streams(graph: DependencyGraph) -> None:
    """Makes activities that begin late for no recorded reason depend on the device's last activity to end."""
    host, gpus = graph.events.host, graph.activities
    activities = np.arange(len(gpus)) + host
    known = graph.before[2 * activities]
    late = (known < 0) | (gpus.start - graph.events.times(known) > INFERRED_DELAY_NS)
    late &= graph.edge[2 * activities] == KERNEL_DELAY
    if not late.any():
        return
    latest = LatestEnds(gpus.device, gpus.end, activities).latest(gpus.device[late], gpus.start[late])
    _offer(graph, 2 * activities[late], np.where(latest >= 0, 2 * latest + 1, NOTHING), SYNC, inferred=True)


def _recorded(context: Context, graph: DependencyGraph, call_event: Ints) -> Ints:
    """Adds dependencies from cuda_sync. Returns the events of the calls that have a record."""
    table, called, gpus = context.trace.table("cuda_sync"), context.get(calls), graph.activities
    if not len(table) or not len(called):
        return np.empty(0, np.int64)
    events, host = graph.events, graph.events.host
    call = lookup(table["correlation"], called.correlation, np.arange(len(called)), NOTHING)
    joined = (call >= 0) & (table["correlation"] != 0)
    event: Ints = call_event[call[joined]]
    table = table.take(joined)
    kind, end = table["type"], events.end[event]
    activities = np.arange(len(gpus)) + host
    device = _devices(table["device"].astype(np.int64), gpus)

    whole = kind == CONTEXT_SYNC
    source = LatestEnds(gpus.device, gpus.end, activities).latest(device[whole], end[whole])
    _offer(graph, 2 * event[whole] + 1, np.where(source >= 0, 2 * source + 1, NOTHING), SYNC)

    queue = device << 32 | table["stream"].astype(np.int64)
    queues = gpus.device << 32 | gpus.stream
    one = kind == STREAM_SYNC
    source = LatestEnds(queues, gpus.end, activities).latest(queue[one], end[one])
    _offer(graph, 2 * event[one] + 1, np.where(source >= 0, 2 * source + 1, NOTHING), SYNC)

    # an event: the last activity launched on its stream before it was recorded
    record = lookup(table["wait_on_correlation"].astype(np.uint32), called.correlation, np.arange(len(called)), NOTHING)
    record[table["wait_on_correlation"] < 0] = NOTHING
    launched = np.flatnonzero(gpus.call >= 0)
    launch_time = called.start[gpus.call[launched]]
    queue_of_event = device << 32 | np.maximum(table["wait_on_stream"], 0)
    launches = LatestEnds(queues[launched], launch_time, activities[launched])
    source = np.where(record >= 0, launches.latest(queue_of_event, called.start[record]), NOTHING)
    source = np.where(source >= 0, 2 * source + 1, NOTHING)
    one = kind == EVENT_SYNC
    _offer(graph, 2 * event[one] + 1, source[one], SYNC)

    waits = kind == STREAM_WAIT
    following = LatestEnds(queues[launched], -launch_time, activities[launched])  # backwards: the first one after
    nexts = following.latest(queue[waits], -events.start[event[waits]])
    several = np.argsort(np.where(source[waits] >= 0, events.times(source[waits]), 0), kind="stable")
    # if several waits precede one launch, the last to end counts: offers in that order
    nexts, sources = nexts[several], source[waits][several]
    use = nexts >= 0
    _offer(graph, 2 * nexts[use], sources[use], SYNC)
    return event


def _devices(device: Ints, gpus: Gpu) -> Ints:
    """Replaces unknown devices by the only one, if there is just one."""
    known = unique_values(gpus.device)
    found: Ints = np.where(device < 0, known[0], device) if len(known) else device
    return found


def _waiting_calls(trace: Trace, graph: DependencyGraph, recorded: Ints, infer: bool) -> None:
    """Adds dependencies of calls that return when a copy, or the GPU, has finished."""
    events, host, gpus = graph.events, graph.events.host, graph.activities
    if not len(gpus):
        return
    copied = np.flatnonzero(events.owner[host:] >= 0) + host
    copied = copied[named(trace, events.name[events.owner[copied]], _COPIES)]
    _offer(graph, 2 * events.owner[copied] + 1, 2 * copied + 1, SYNC)
    if not infer:
        return
    called = events.kind[:host] >= HOST_KINDS.index("cuda_runtime")
    waiting = called & named(trace, events.name[:host], _WAITS)
    waiting[recorded] = False
    places = np.flatnonzero(waiting)
    latest = LatestEnds(np.zeros(len(gpus), np.int64), gpus.end, np.arange(len(gpus)) + host)
    source = latest.latest(np.zeros(len(places), np.int64), events.end[places])
    _offer(graph, 2 * places + 1, np.where(source >= 0, 2 * source + 1, NOTHING), SYNC, inferred=True)


def critical_path(graph: DependencyGraph, start_ns: int, end_ns: int) -> Path:
    """Returns the path of a window (Unix ns) from its start to its end, or to the last end of its GPU work.

    The window ends with an event of the main threads. The work of other threads at that time (loading the next batch,
    saving a checkpoint) holds nothing up.
    """
    events, host = graph.events, graph.events.host
    inside = (events.start >= start_ns) & (events.start <= end_ns)
    launch = events.owner[host:]
    inside[host:] = np.where(launch >= 0, inside[launch], inside[host:]) if len(launch) else inside[host:]
    works = np.flatnonzero(inside[host:]) + host
    hosts = np.flatnonzero(inside[:host] & np.isin(events.thread[:host], graph.main) & (events.end[:host] <= end_ns))
    last_work, last_host = _last(events, works), _last(events, hosts)
    if last_work == NOTHING and last_host == NOTHING:
        last_host = _last(events, np.flatnonzero(inside))
    if last_host == NOTHING and last_work == NOTHING:
        return _path(graph, np.empty(0, np.int64), start_ns)
    on_gpu = last_host == NOTHING or (last_work != NOTHING and events.end[last_work] >= end_ns)
    last = last_work if on_gpu else last_host
    path = _path(graph, trail(graph.before, 2 * last + 1), start_ns)
    return _until(path, 2 * last + 1, int(events.end[last]), end_ns)


def _last(events: GraphEvents, chosen: Ints) -> int:
    """Returns the event that ends last."""
    return int(chosen[np.argmax(events.end[chosen])]) if len(chosen) else NOTHING


def _until(path: Path, node: int, time_ns: int, end_ns: int) -> Path:
    """Returns the path with one more edge: from the last event to the end of the window."""
    if time_ns >= end_ns or not len(path):
        return path
    return Path(
        np.append(path.first, node),
        np.append(path.last, node),
        np.append(path.start, time_ns),
        np.append(path.end, end_ns),
        np.append(path.edge, np.uint8(DEPENDENCY)),
        np.append(path.event, NOTHING),
        np.append(path.inferred, np.False_),
    )


def _path(graph: DependencyGraph, nodes: Ints, start_ns: int) -> Path:
    """Returns the edges into these nodes, which are given from the last to the first."""
    nodes = nodes[::-1]
    nodes = nodes[graph.events.times(nodes) > start_ns]
    first = graph.before[nodes]
    events = graph.events
    begin = np.where(first >= 0, np.maximum(events.times(first), start_ns), start_ns)
    edge = graph.edge[nodes].copy()
    edge[first < 0] = DEPENDENCY
    event = nodes >> 1
    starts = (nodes & 1) == 0
    # between two events: the enclosing event of both, or NOTHING
    event = np.where(starts & (event < events.host), events.owner[event], event)
    event[first < 0] = NOTHING
    return Path(first, nodes, begin, events.times(nodes), edge, event, graph.inferred[nodes])


def instance_range(instance: Instance) -> tuple[int, int] | None:
    """Returns the first and last instance, counted from 0; None for all. Raises ViewError."""
    if instance is None:
        return None
    if isinstance(instance, str):
        parts = instance.split(":")
        if len(parts) > 2 or not all(part.strip().isdecimal() for part in parts):
            raise ViewError(f"option instance: {instance!r} is neither a number nor a range such as 2:4")
        return int(parts[0]), int(parts[-1])
    return (instance, instance) if isinstance(instance, int) else (instance[0], instance[1])


def find_window(context: Context, annotation: str, instance: Instance, *, optional: bool = False) -> Window:
    """Returns the window from the start of the first wanted instance to the end of the last.

    annotation: part of a name; "" is the whole trace. optional: if there is no such annotation, take the whole trace
    and add a note; otherwise raise ViewError.
    """
    trace = context.trace
    if not annotation:
        return _whole(context)
    wanted = np.array([number for number, text in enumerate(trace.strings) if annotation in text], np.int64)
    tables = [trace.table(kind) for kind in OP_TABLES]
    chosen = [np.isin(table["name"], wanted) for table in tables]
    start = np.concatenate([table["start"][rows] for table, rows in zip(tables, chosen, strict=True)])
    end = np.concatenate([table.end()[rows] for table, rows in zip(tables, chosen, strict=True)])
    if not len(start):
        if optional:
            whole = _whole(context)
            note = f"the trace has no annotation with {annotation!r} in its name, so the path covers the whole trace"
            return Window(whole.start_ns, whole.end_ns, (note,))
        raise ViewError(
            f"the trace has no annotation with {annotation!r} in its name; use annotation='' for the whole trace"
        )
    order = np.argsort(start, kind="stable")
    first, last = instance_range(instance) or (0, len(order) - 1)
    if not 0 <= first <= last < len(order):
        raise ViewError(f"option instance: {annotation!r} has instances 0 to {len(order) - 1}, got {instance!r}")
    picked = order[first : last + 1]
    return Window(int(start[picked].min()), int(end[picked].max()))


def _whole(context: Context) -> Window:
    tables = [table for table in context.trace.tables.values() if "start" in table.columns and len(table)]
    tables = [table for table in tables if table.kind not in ("flow", "other", "overhead", "counter")]
    if not tables:
        return Window(context.trace.window_start_ns, context.trace.window_end_ns)
    start = min(int(table["start"].min()) for table in tables)
    return Window(start, max(int(table.end().max()) for table in tables))
