"""What would the steps of a process take if something were left out of them: host and GPU, run again.

Theory of operation
    The host is a chain of calls: those that launch work, wait for the GPU or allocate, of all threads in the order of
    their beginnings (a thread that trains waits while autograd's launches); one that begins while another still lasts
    follows the beginning of the call before it. The GPU is a chain of activities. Between two calls the host works for
    as long as it did; an activity begins once the one before it is over and its launch was LAUNCH_NS ago, and covers as
    much time as it did. A call that waited for the GPU ends once the activity that ended last in it is over. What else
    delayed an activity (an event, another stream) delays it again by as much.

    So the steps take as long as the longest path through this graph, which gives the time that they took. If a part of
    the host's time, of its calls or of the GPU's work is left out, whatever waited for it comes earlier: a wait that is
    taken away lets the host run ahead again; a function that is taken away saves nothing as long as the GPU is behind.

    Recording makes the host slower: each operator and each call costs some more time. Where the agent measured how
    much longer iterations took than before (step_ratio, or least_step_ratio if the pace changed), the cost of one event
    is the one with which the steps without it take as long as they did before; and all savings are those of the program
    that is not recorded.

    There is no replay of a trace without calls, and of a process with several GPUs. A model that is off by more than
    MAX_ERROR predicts nothing.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.causes.measured_steps import MeasuredSteps, measured_steps
from kineto_trace.analysis.distributed.rank_work import LAUNCH_NS, unhindered_ns
from kineto_trace.analysis.idle.idle_gaps import ALLOCATING, blocking_calls, copies_waited_for
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.intervals import Union, union
from kineto_trace.arrays.longest_paths import Edges, longest
from kineto_trace.kernel_traits.kernel_types import matches
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import NOTHING, calls, gpu

OWN_NS = 10_000  # of the host before a launch that goes, where the call before stays: the rest is another's
WAIT_NS = 2_000  # what a call that waits takes itself
MAX_ACTIVITIES = 30_000  # as many whole steps as have no more are run again; of a first one with more, a part
MAX_ERROR = 0.02
MOST_COST_NS = 5_000.0  # of recording one event
LEAST_LEFT = 0.2  # of the host's time between two calls, and in one, whatever recording cost
SEARCHES = 12
NEAR = 0.01  # to the least time that any cost gives

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
_NO_TIME = Union(np.empty(0, np.int64), np.empty(0, np.int64))


class Change(NamedTuple):
    """What is changed. All of it is optional.

    left_out: times of the host (Unix ns) that go, with the calls in them and the work that these launch. faster: times
    of the host that go, while their work stays. calls: flags of parts.Calls that go. unwaited: of those that no longer
    wait for the GPU. work: flags of parts.Gpu that go, with the calls that launch nothing else, and the host's time
    since the call before each; if that call stays, no more than OWN_NS of it. pace: for each of parts.Calls by what the
    host's time in and before it is multiplied. thread: whose time is left out; 0: of all.
    """

    left_out: Union = _NO_TIME
    faster: Union = _NO_TIME
    calls: Flags | None = None
    unwaited: Flags | None = None
    work: Flags | None = None
    pace: npt.NDArray[np.float64] | None = None
    thread: int = 0


@dataclass(frozen=True, slots=True)
class _Host:
    """The chain of calls. row: place in parts.Calls. own: time since `before` (ns); took: in it.

    holder: place of the call before that ended last; NOTHING: there is none, or it still lasts. before: when that call
    ended, or the call before began if it still lasts (Unix ns). waits: place of the activity that it waited for;
    NOTHING: none. after: from the end of that activity to its own.
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
    """The chain of activities. row: place in parts.Gpu. call: place in _Host; NOTHING: launched before.

    covers: time that only it fills (ns). launch: from its launch at least; delay: what came on top.
    """

    row: Ints
    call: Ints
    covers: Ints
    launch: Ints
    delay: Ints


class StepReplay:
    """The steps from `low` to `high` (Unix ns).

    recorded_ns: what they took; event_cost_ns: what recording one event took; base_ns: what they take without that.
    """

    def __init__(self, context: Context, low: int, high: int) -> None:
        self.low, self.high = low, high
        self._host, self._gpu = _chains(context, low, high)
        self._thread = context.get(calls).thread[self._host.row]
        self.recorded_ns = high - low
        self.base_ns = self._run(Change(), self._host)
        self.error = abs(self.base_ns - self.recorded_ns) / self.recorded_ns
        self.event_cost_ns = 0.0
        ratio = context.trace.target.known_step_ratio
        if ratio > 1:
            self._leave_recording_out(_events(context, low, high), int(self.base_ns / ratio))

    def share(self, change: Change) -> float:
        """Returns the share (0 to 1) of the steps' time, without what recording took, that a change would save."""
        return max(1 - self._run(change, self._host) / self.base_ns, 0.0) if self.base_ns else 0.0

    @property
    def slowdown(self) -> float:
        """How many times as long the steps took as without being recorded."""
        return self.recorded_ns / self.base_ns if self.base_ns else 1.0

    @property
    def busy_ns(self) -> int:
        """The time in which the GPU worked."""
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
            return cheaper, self._run(Change(), cheaper)

        low, high = 0.0, MOST_COST_NS
        reached = max(target_ns, int(at(high)[1] * (1 + NEAR)))  # the GPU, or other things, may have been slower, too
        for _ in range(SEARCHES):
            middle = (low + high) / 2
            low, high = (middle, high) if at(middle)[1] > reached else (low, middle)
        self.event_cost_ns = high
        self._host, self.base_ns = at(high)

    def _run(self, change: Change, host: _Host) -> int:
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
        passed = (host.holder >= 0) & (host.holder < call - 1)  # the call before had ended, too, but earlier
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


def step_replay(context: Context) -> StepReplay | None:
    """Returns the replay of the measured steps, or None if there can be none."""
    activity = context.get(gpu)
    if len(unique_values(activity.device)) != 1 or not (activity.call >= 0).any():
        return None
    low, high = _window(context.get(measured_steps), np.sort(activity.start))
    if high <= low:
        return None
    replay = StepReplay(context, low, high)
    return replay if replay.error <= MAX_ERROR else None


def _window(steps: MeasuredSteps, starts: Ints) -> tuple[int, int]:
    """Returns the time of as many measured steps, from the first one on, as have no more than MAX_ACTIVITIES.

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
    usual = unhindered_ns(called.name[rows], called.end[rows] - start)
    # the last activity that was over, and all before it, when the call ended, and that had been launched by then
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
    """The calls of the chain, and which of them wait for the GPU; copies too, from which the host came back after."""
    activity, called = context.get(gpu), context.get(calls)
    blocks = context.get(blocking_calls).copy()
    blocks[context.get(copies_waited_for)] = True
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
    """When the operators and calls of the time began that were recorded, ascending."""
    found = np.concatenate([context.trace.table("cpu_op")["start"], context.get(calls).start])
    return np.sort(found[(found >= low) & (found < high)])


def _scaled(own: Ints, gone: Ints, whole: Ints) -> Ints:
    """The part of each time of the host that goes, also where recording has been left out of it."""
    share = gone / np.maximum(whole, 1)
    return np.minimum((own * share).astype(np.int64), own)
