"""Replays host and GPU of a process's steps with something left out, to find how long the steps would take.

Theory of operation
    The host is a chain of calls: those that launch work, wait for the GPU or allocate, of all threads in the order of
    their beginnings (a thread that trains waits while autograd's launches); one that begins while another still lasts
    follows the beginning of the previous call. The GPU is a chain of activities. Between two calls the host works for
    as long as recorded; an activity begins once the previous one is over and its launch was LAUNCH_NS ago, and covers
    as much time as recorded. A call that waited for the GPU ends once the activity that ended last in it is over. Any
    other delay of an activity (an event, another stream) stays the same.

    So the steps take as long as the longest path through this graph, which reproduces the recorded time. If a part of
    the host's time, of its calls or of the GPU's work is left out, whatever waited for it comes earlier: without a
    wait, the host runs ahead again; leaving out a function saves nothing as long as the GPU lags behind.

    Recording makes the host slower: each operator and each call costs some more time. If the agent measured how much
    longer iterations took than before (step_ratio, or least_step_ratio if the pace changed), the cost of one event is
    chosen so that the steps without it take as long as they did before; and all savings are those of the program
    without recording.

    There is no replay of a trace without calls, or of a process with several GPUs. A model that is off by more than
    MAX_ERROR predicts nothing.

Also finds the time of the training thread that belongs to a function, with the precision of the operators it calls.
    Samples are some 10 ms apart, but steps repeat: the operators of a step, each identified by its name and its count
    so far in the step, are the same in all of them. So a sample in one step shows the function of that operator in
    every step, and the samples of all steps together are close to each other. Each outermost operator is a slot, and so
    is the time since the previous one; a slot belongs to the functions with most of its samples in all steps, and one
    without a sample is like the nearest slot of the step that has some. A function seldom begins or ends between two
    operators of the same name, so these are near each other; it often does where a forward with a backward, or an
    optimizer's step, begins or ends, so those are far apart. Of exact calls the times are known.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from kineto_trace.analysis.distributed.rank_simulation import LAUNCH_NS, longest_without_wait
from kineto_trace.analysis.host_time.moment_classes import framework_calls, optimizer_steps
from kineto_trace.analysis.host_time.user_calls import ThreadSlices, host_steps, moments, thread_slices, told_by_samples
from kineto_trace.analysis.idle_gaps import ALLOCATING, MeasuredSteps, blocking_calls, blocking_copies, measured_steps
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.intervals import Union, containing, union
from kineto_trace.arrays.longest_paths import Edges, longest
from kineto_trace.arrays.row_groups import group
from kineto_trace.base.array_types import NOTHING, Flags, Floats, Ints, Ints32
from kineto_trace.kernel_traits.kernel_types import matches
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import calls, gpu, op_roles, ops

OWN_NS = 10_000  # removed host time before a launch, where the previous call stays: the rest belongs to others
WAIT_NS = 2_000  # duration of a waiting call itself
MAX_ACTIVITIES = 30_000  # limit of replayed whole steps; if the first one has more, a part of it
MAX_ERROR = 0.02
MOST_COST_NS = 5_000.0  # of recording one event
LEAST_LEFT = 0.2  # of the host's time between two calls, and in one, whatever recording cost
SEARCHES = 12
NEAR = 0.01  # to the least time that any cost gives
_NO_TIME = Union(np.empty(0, np.int64), np.empty(0, np.int64))
SAME_NAME, OTHER_NAME, OTHER_ROLE = 0.01, 1.0, 1000.0  # distance of an operator from the previous one


class ReplayChange(NamedTuple):
    """What is changed. All of it is optional.

    left_out: times of the host (Unix ns) to remove, with the calls in them and the work that these launch.
    faster: times of the host to remove, while their work stays.
    calls: flags of parts.Calls to remove.
    unwaited: flags of parts.Calls that no longer wait for the GPU.
    work: flags of parts.Gpu to remove, with the calls that launch nothing else, and the host's time since the previous
        call; if that call stays, no more than OWN_NS of it.
    pace: for each of parts.Calls the factor of the host's time in and before it.
    thread: whose time is left out; 0 for all.
    """

    left_out: Union = _NO_TIME
    faster: Union = _NO_TIME
    calls: Flags | None = None
    unwaited: Flags | None = None
    work: Flags | None = None
    pace: Floats | None = None
    thread: int = 0


@dataclass(frozen=True, slots=True)
class _Host:
    """The chain of calls.

    row: place in parts.Calls.
    own: time since `before` (ns).
    took: time in it (ns).
    holder: place of the previous call that ended last, or NOTHING if there is none or it still lasts.
    before: when that call ended, or the previous call began if it still lasts (Unix ns).
    waits: place of the activity that it waited for, or NOTHING.
    after: from the end of that activity to its own (ns).
    """

    row: Ints
    start: Ints
    end: Ints
    holder: Ints
    before: Ints
    own: Ints
    took: Ints
    waits: Ints
    after: Ints


@dataclass(frozen=True, slots=True)
class _Gpu:
    """The chain of activities.

    row: place in parts.Gpu.
    call: place in _Host; NOTHING if launched before.
    covers: time that only it fills (ns).
    launch: minimum from its launch (ns).
    delay: additional delay (ns).
    """

    row: Ints
    call: Ints
    covers: Ints
    launch: Ints
    delay: Ints


class StepReplay:
    """The steps from `low` to `high` (Unix ns).

    recorded_ns: their recorded time.
    event_cost_ns: cost of recording one event.
    base_ns: their time without that cost.
    """

    def __init__(self, context: Context, low: int, high: int) -> None:
        self.low, self.high = low, high
        self._host, self._gpu = _chains(context, low, high)
        self._thread = context.get(calls).thread[self._host.row]
        self.recorded_ns = high - low
        self.base_ns = self._run(ReplayChange(), self._host)
        self.error = abs(self.base_ns - self.recorded_ns) / self.recorded_ns
        self.event_cost_ns = 0.0
        ratio = context.trace.target.known_step_ratio
        if ratio > 1:
            self._leave_recording_out(_events(context, low, high), int(self.base_ns / ratio))

    def share(self, change: ReplayChange) -> float:
        """Returns the share (0 to 1) of the steps' time, without the cost of recording, that a change would save."""
        return max(1 - self._run(change, self._host) / self.base_ns, 0.0) if self.base_ns else 0.0

    @property
    def slowdown(self) -> float:
        """Returns the ratio of the steps' time to their time without recording."""
        return self.recorded_ns / self.base_ns if self.base_ns else 1.0

    @property
    def busy_ns(self) -> int:
        """Returns the time (ns) in which the GPU worked."""
        return int(self._gpu.covers.sum())

    def _leave_recording_out(self, events: Ints, target_ns: int) -> None:
        host = self._host
        between, inside = (
            np.searchsorted(events, high) - np.searchsorted(events, low)
            for low, high in ((host.before, host.start), (host.start, host.end))
        )

        def at(cost: float) -> tuple[_Host, int]:
            own = np.maximum(host.own - (cost * between).astype(np.int64), (LEAST_LEFT * host.own).astype(np.int64))
            took = np.maximum(host.took - (cost * inside).astype(np.int64), (LEAST_LEFT * host.took).astype(np.int64))
            cheaper = replace(host, own=own, took=took)
            return cheaper, self._run(ReplayChange(), cheaper)

        low, high = 0.0, MOST_COST_NS
        reached = max(target_ns, int(at(high)[1] * (1 + NEAR)))  # the GPU, or other things, may have been slower, too
        for _ in range(SEARCHES):
            middle = (low + high) / 2
            low, high = (middle, high) if at(middle)[1] > reached else (low, middle)
        self.event_cost_ns = high
        self._host, self.base_ns = at(high)

    def _run(self, change: ReplayChange, host: _Host) -> int:
        """Returns how long the steps take (ns) with a change."""
        work = self._gpu
        count, size = len(host.row), len(work.call)
        own, took, waits = host.own.copy(), host.took.copy(), host.waits >= 0
        rest = self.high - int(host.end.max(initial=self.low))
        mine = np.full(count, not change.thread) | (self._thread == change.thread)
        if change.pace is not None:
            own, took = ((times * change.pace[host.row]).astype(np.int64) for times in (own, took))
        both = union(*(np.concatenate(part) for part in zip(change.left_out, change.faster, strict=True)))
        gone = np.where(mine, *(each.within(host.before, host.start) for each in (both, change.faster)))
        own -= _scaled(own, gone, host.start - host.before)
        rest -= int(both.within(np.array([self.high - rest]), np.array([self.high]))[0])
        inside = mine & (2 * change.left_out.within(host.start, host.end) >= np.maximum(host.end - host.start, 1))
        if change.calls is not None:
            inside |= change.calls[host.row]
        gone_work = np.zeros(size, np.bool_)
        if change.work is not None:
            gone_work = change.work[work.row]
            launching = np.zeros(count + 1, np.bool_)
            launching[work.call[gone_work]] = True
            launching[work.call[~gone_work]] = False
            together = launching[:-1] & np.concatenate([[False], launching[: max(count - 1, 0)]])[:count]
            own -= np.where(together, own, np.where(launching[:-1], np.minimum(own, OWN_NS), 0))
            inside |= launching[:-1]
        quick = inside | (2 * change.faster.within(host.start, host.end) >= np.maximum(host.end - host.start, 1))
        took[quick] = 0
        waits &= ~inside
        if change.unwaited is not None:
            waits &= ~change.unwaited[host.row]
        covers, delay, launch = work.covers.copy(), work.delay.copy(), work.launch.copy()
        gone_work = gone_work | np.append(inside, False)[work.call]
        covers[gone_work] = delay[gone_work] = launch[gone_work] = 0
        # nodes: the source, beginnings and ends of calls, beginnings and ends of activities, the end of the steps
        begins, ends, first, last, end = 1, 1 + count, 1 + 2 * count, 1 + 2 * count + size, 1 + 2 * (count + size)
        call, activity, known = np.arange(count), np.arange(size), work.call >= 0
        follows = np.where(host.holder >= 0, ends + host.holder, begins + call - 1)
        passed = (host.holder >= 0) & (host.holder < call - 1)  # the previous call had ended, too, but earlier
        final = [ends + int(np.argmax(host.end)), ends + count - 1] if count else [0, 0]
        parts = (
            (np.where(call > 0, follows, 0), begins + call, own),
            (ends + call[passed] - 1, begins + call[passed], own[passed]),
            (begins + call, ends + call, took),
            (last + host.waits[waits], ends + call[waits], host.after[waits]),
            (np.where(activity > 0, last + activity - 1, 0), first + activity, delay),
            (begins + work.call[known], first + activity[known], (launch + delay)[known]),
            (first + activity, last + activity, covers),
            (final, [end, end], [rest, rest]),
            ([last + size - 1 if size else 0], [end], [0]),
        )
        edges = Edges(*(np.concatenate(columns).astype(np.int64) for columns in zip(*parts, strict=True)))
        return int(edges.weight[longest(end + 1, edges)].sum())


class ExactCalls(NamedTuple):
    """Calls of functions. start, end: Unix ns. node: of framework_calls."""

    start: Ints
    end: Ints
    node: Ints


@dataclass(frozen=True, slots=True)
class FunctionSlots:
    """start, end: of each slot (Unix ns), in order.

    place: among the slots of a step, in their usual order.
    sampled, node: for each sample the place of its slot, and the node of framework_calls.
    position: of each place, ascending; places without samples use the nearest one with a sample.
    exact: recorded instead of samples.
    """

    start: Ints
    end: Ints
    place: Ints
    sampled: Ints
    node: Ints
    position: Floats
    exact: ExactCalls | None = None

    def of(self, nodes: Flags) -> Union:
        """Returns the time of the slots, or of the calls, that belong to these nodes of framework_calls."""
        if self.exact is not None:
            own = nodes[self.exact.node]
            return union(self.exact.start[own], self.exact.end[own])
        if not len(self.sampled):
            return union(self.sampled, self.sampled)
        position, count = self.position, len(self.position)
        seen = np.bincount(self.sampled, minlength=count)
        mine = np.bincount(self.sampled, nodes[self.node], minlength=count)
        known = np.flatnonzero(seen)
        after = np.minimum(np.searchsorted(known, np.arange(count)), len(known) - 1)
        before = np.maximum(after - 1, 0)
        nearer = position - position[known[before]] < position[known[after]] - position
        nearest = np.where(seen > 0, np.arange(count), np.where(nearer, known[before], known[after]))
        chosen = (2 * mine > seen)[nearest][self.place]
        return union(self.start[chosen], self.end[chosen])


def step_replay(context: Context) -> StepReplay | None:
    """Returns the replay of the measured steps, or None if none is possible."""
    activity = context.get(gpu)
    if len(unique_values(activity.device)) != 1 or not (activity.call >= 0).any():
        return None
    low, high = _window(context.get(measured_steps), np.sort(activity.start))
    if high <= low:
        return None
    replay = StepReplay(context, low, high)
    return replay if replay.error <= MAX_ERROR else None


def _window(steps: MeasuredSteps, starts: Ints) -> tuple[int, int]:
    """Returns the time of as many measured steps, from the first one on, as have at most MAX_ACTIVITIES.

    starts: of all activities, ascending. If the first step has more, its time ends where the next activity begins.
    """
    low, high = steps.start[~steps.left_out], steps.end[~steps.left_out]
    if not len(low):
        return 0, 0
    first = int(np.searchsorted(starts, low[0]))
    kept = int(np.searchsorted(np.searchsorted(starts, high) - first, MAX_ACTIVITIES, side="right"))
    return int(low[0]), int(high[kept - 1] if kept else starts[first + MAX_ACTIVITIES])


def _chains(context: Context, low: int, high: int) -> tuple[_Host, _Gpu]:
    activity, called = context.get(gpu), context.get(calls)
    rows, blocks = _calls(context, low, high)
    start, end = called.start[rows], np.minimum(called.end[rows], high)
    work = np.flatnonzero((activity.start < high) & (activity.end > low))
    work = work[np.argsort(activity.start[work], kind="stable")]
    began, over = activity.start[work], np.minimum(activity.end[work], high)
    place = np.full(len(called) + 1, NOTHING)
    place[rows] = np.arange(len(rows))
    of_call = place[activity.call[work]]
    reached = np.concatenate([[low], np.maximum(np.maximum.accumulate(over), low)[:-1]]) if len(work) else over
    launched = np.where(of_call >= 0, np.append(start, 0)[of_call], low)
    launch = np.minimum(LAUNCH_NS, np.maximum(began - launched, 0))
    begins = np.maximum(began, reached)
    allowed = np.maximum(reached, np.where(of_call >= 0, launched + launch, low))
    chain = _Gpu(work, of_call, np.maximum(over - begins, 0), launch, np.maximum(begins - allowed, 0))
    holder, before = _before(start, end, low)
    usual = longest_without_wait(called.name[rows], called.end[rows] - start)
    # at the call's end: the last activity that was over, with all before it, and the last one launched
    done, latest = np.maximum.accumulate(over), np.maximum.accumulate(np.where(of_call >= 0, launched, low))
    last = np.minimum(np.searchsorted(done, end, side="right"), np.searchsorted(latest, end, side="left")) - 1
    waits = np.where(last >= 0, last, NOTHING)
    ended = np.where(waits >= 0, np.append(done, 0)[waits], low)
    waits = np.where((ended > start) & (blocks | (end - start > usual)), waits, NOTHING)
    after = np.where(waits >= 0, end - ended, 0)
    itself = np.where(blocks, np.minimum(end - start, after + WAIT_NS), np.minimum(end - start, usual))
    took = np.where(waits >= 0, itself, end - start)
    return _Host(rows, start, end, holder, before, start - before, took, waits, after), chain


def _before(start: Ints, end: Ints, low: int) -> tuple[Ints, Ints]:
    """Returns _Host.holder and _Host.before of calls in the order of their beginnings."""
    if not len(start):
        return start, start
    done = np.maximum.accumulate(end)
    place = np.arange(len(end))
    holder = np.maximum.accumulate(np.where(end == done, place, 0))
    holder, done = (np.concatenate([[first], found[:-1]]) for first, found in ((NOTHING, holder), (low, done)))
    lasts = done > start
    return np.where(lasts, NOTHING, holder), np.where(lasts, np.concatenate([[low], start[:-1]]), done)


def _calls(context: Context, low: int, high: int) -> tuple[Ints, Flags]:
    """Returns the calls of the chain, and which of them wait for the GPU, including copies that returned when done."""
    activity, called = context.get(gpu), context.get(calls)
    blocks = context.get(blocking_calls).copy()
    blocks[context.get(blocking_copies)] = True
    chosen = blocks | context.get(allocating_calls)
    chosen[activity.call[activity.call >= 0]] = True
    rows = np.flatnonzero(chosen & (called.start >= low) & (called.start < high))
    rows = rows[np.argsort(called.start[rows], kind="stable")]
    return rows, blocks[rows]


def allocating_calls(context: Context) -> Flags:
    """Returns for each of parts.Calls whether it allocates or releases memory."""
    found: Flags = matches(context.trace.strings, ALLOCATING)[context.get(calls).name]
    return found


def _events(context: Context, low: int, high: int) -> Ints:
    """Returns when the recorded operators and calls of the time began, ascending."""
    found = np.concatenate([context.trace.table("cpu_op")["start"], context.get(calls).start])
    return np.sort(found[(found >= low) & (found < high)])


def _scaled(own: Ints, gone: Ints, whole: Ints) -> Ints:
    """Returns the removed part of each host time, also where the cost of recording has been subtracted."""
    share = gone / np.maximum(whole, 1)
    return np.minimum((own * share).astype(np.int64), own)


def function_slots(context: Context) -> FunctionSlots:
    """Returns the slots of the training thread in its steps; empty without operators or samples."""
    steps, table, tree = context.get(host_steps), context.trace.table("cpu_op"), context.get(ops)
    rows = np.flatnonzero((tree.nested.tree.parent[tree.place] < 0) & (table["thread"] == steps.thread))
    rows = rows[np.argsort(table["start"][rows], kind="stable")]
    start, end = table["start"][rows], table.end()[rows]
    step = steps.of(start)
    inside = step >= 0
    place = np.zeros(len(rows), np.int64)
    name = table["name"][rows]
    place[inside] = _places(name[inside], step[inside], (start - steps.start[step])[inside])
    borders = np.stack([np.minimum(np.concatenate([start[:1], end[:-1]]), start), start], axis=1).reshape(-1)
    ends, places, known = np.stack([start, end], axis=1).reshape(-1), np.repeat(2 * place, 2), np.repeat(inside, 2)
    places[1::2] += 1
    found = context.get(moments)
    slot = np.searchsorted(ends, found.time, side="right")
    votes = found.sure & (slot < len(ends))
    votes[votes] = known[slot[votes]]
    nodes = context.get(framework_calls).node
    node = nodes[found.place[votes]]
    role = np.where(containing(*context.get(optimizer_steps), start) >= 0, -1, context.get(op_roles).linked[rows])
    position = _positions(place[inside], name[inside], role[inside])
    exact = None if context.get(told_by_samples) else _exact_calls(context.get(thread_slices), nodes)
    return FunctionSlots(borders[known], ends[known], places[known], places[slot[votes]], node, position, exact)


def _exact_calls(slices: ThreadSlices, nodes: Ints) -> ExactCalls:
    own = nodes >= 0
    return ExactCalls(slices.nested.events.start[own], slices.nested.tree.end[own], nodes[own])


def _positions(place: Ints, name: Ints32, role: Ints) -> Floats:
    """Returns FunctionSlots.position. place: of each operator among those of a step; role: what only its like have."""
    if not len(place):
        return np.empty(0)
    names, roles = (np.zeros(int(place.max()) + 1, np.int64) for _ in range(2))
    names[place], roles[place] = name, role
    far = np.where(np.diff(names) != 0, OTHER_NAME, SAME_NAME)
    far[np.diff(roles) != 0] = OTHER_ROLE
    of_ops = np.concatenate([[0.0], np.cumsum(far)])
    before = np.concatenate([[-OTHER_NAME / 2], (of_ops[:-1] + of_ops[1:]) / 2])
    return np.stack([before, of_ops], axis=1).reshape(-1)


def _places(name: Ints32, step: Ints, time: Ints) -> Ints:
    """Numbers the operators of steps by their names and how often each ran before in its step, in order of `time`."""
    groups = group([step, name.astype(np.int64)])
    order = np.argsort(groups.number, kind="stable")
    ordered = groups.number[order]
    before = np.empty(len(name), np.int64)
    before[order] = np.arange(len(name)) - np.searchsorted(ordered, ordered)
    alike = group([name.astype(np.int64), before])
    count = np.bincount(alike.number, minlength=len(alike))
    mean = np.bincount(alike.number, time, len(alike)) / np.maximum(count, 1)
    rank = np.empty(len(alike), np.int64)
    rank[np.argsort(mean, kind="stable")] = np.arange(len(alike))
    places: Ints = rank[alike.number]
    return places
