"""Which steps are measured, and why a GPU was idle: one cause for every gap between its activities.

Theory of operation
    A gap is a span of the window (the complete steps, or the whole trace if it has none) in which no kernel, copy or
    fill runs on a GPU, also before the first and after the last activity. Time in which the GPU's activities were not
    recorded is not a gap. The cause follows from the call that launched the activity at the end of the gap, even after
    the window:

    queued            it had been launched before the gap began: it waited for an event, another stream or the launch
    synchronisation   launched in the gap, by a host that was blocked when the gap began: the host had waited for the
                      GPU to finish everything, and then the GPU waited for the host to come with more
    data_loading      … and for at least half of the time until the launch, the host waited for the next batch
    communication     … likewise, for a collective on the host (gloo, barriers, waiting for other ranks)
    memory            … likewise, for the allocation or release of device or pinned memory by CUDA
    host              … the host was busy with anything else: Python, operators, launches
    unknown           the launch is not in the trace

    After the last activity of the trace there is no launch: the host's time until the end of the window counts.
    idle_pieces.py divides each gap by what the host did in it.

    "Blocked" means a synchronising call (or a copy that waits) of any thread that launches work. The operator of a
    gap is the one around the blocking call for synchronisation, for queued work the one that launched it, else
    the innermost one that ran half way between the beginning of the gap and the launch, on the launching thread.
"""

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.intervals import Union, difference, union
from kineto_trace.base.array_types import NOTHING, Flags, Ints, UInts8
from kineto_trace.base.quantities import format_duration
from kineto_trace.kernel_traits.kernel_types import communication_op_names, data_loading_names, matches
from kineto_trace.model.context import Context
from kineto_trace.model.trace import GPU_TABLES, OP_TABLES
from kineto_trace.structure.activity_links import MEMCPY, Calls, calls, gpu, ops, steps, training_thread, whole_steps
from kineto_trace.structure.nesting import unrecorded
from kineto_trace.structure.step_pace import StepPace, step_pace

IdleCause = Literal["host", "synchronisation", "data_loading", "communication", "memory", "queued", "unknown"]
CAUSES: tuple[str, ...] = get_args(IdleCause)
HOST, SYNCHRONISATION, DATA_LOADING, COMMUNICATION, MEMORY, QUEUED, UNKNOWN = range(len(CAUSES))
BLOCKING = re.compile(r"^(?:cuda|hip)(?:Device|Stream|Event|Ctx)Synchronize|^cu(?:Ctx|Stream|Event)Synchronize")
BLOCKING_COPY = re.compile(r"^(?:cuda|hip)Memcpy(?!.*Async)|^cuMemcpy(?!.*Async)")
ALLOCATING = re.compile(
    r"^(?:cuda|hip)(?:Malloc|Free|HostAlloc|HostRegister|HostUnregister|HostFree)(?!Async)"
    r"|^cuMem(?:Alloc|Free|Map|Unmap|Create|Release|SetAccess|HostRegister|AddressReserve)(?!Async)"
)
ONCE_SHARE = 0.25  # of the window
ONCE_NS = 100_000_000
MUCH_LEFT_OUT, MUCH_PCT = "% of the trace,", 20.0
MIN_ACTIVITIES = 3  # after warm-up: fewer do not show how the program goes on


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Ranges (Unix ns) in order.

    number: of the step; -1 if the trace has no complete one.
    left_out: not in means and savings.
    pace: of the steps; None without steps.
    """

    number: Ints
    start: Ints
    end: Ints
    left_out: Flags
    pace: StepPace | None = None

    @property
    def length(self) -> Ints:
        """Returns the length of each range, in ns."""
        return self.end - self.start

    @property
    def measured_ns(self) -> int:
        """Returns the length (ns) of all ranges but those that are left out."""
        return int(self.length[~self.left_out].sum())

    @property
    def steps(self) -> int:
        """Returns how many steps are measured; 0 if the trace has no complete one."""
        return int(np.count_nonzero(~self.left_out & (self.number >= 0)))

    def note(self) -> str | None:
        """Returns a note on what is left out; None if nothing is."""
        left = int(self.length[self.left_out].sum())
        part = 100 * left / max(int(self.length.sum()), 1)
        share = f", {part:.0f} {MUCH_LEFT_OUT}" if part >= MUCH_PCT else ""
        if self.pace is not None:
            return self.pace.note(share)
        why = "they end with a gap that does not recur (a warm-up, or a wait for work that was not recorded)"
        return f"the first {format_duration(left)}{share} are left out: {why}" if left else None


@dataclass(frozen=True, slots=True)
class IdleGaps:
    """Gaps in the order of (device, start), times in Unix ns.

    since: when the GPU became idle, which may be before the window (the window's start if nothing ran before).
    cause: number into CAUSES.
    before, after: places in parts.Gpu.
    launch: place in parts.Calls of the call that launched `after`, or NOTHING.
    blocking: place of the call that had waited, or NOTHING.
    op: row of cpu_op, or NOTHING.
    step: place in parts.Steps.
    windows: device -> the length (ns) that was searched for gaps.
    """

    device: Ints
    start: Ints
    end: Ints
    since: Ints
    cause: UInts8
    before: Ints
    after: Ints
    launch: Ints
    blocking: Ints
    op: Ints
    step: Ints
    windows: dict[int, int]

    def __len__(self) -> int:
        return len(self.device)

    @property
    def length(self) -> Ints:
        """Returns the length of each gap, in ns."""
        return self.end - self.start


def idle_gaps(context: Context) -> IdleGaps:
    """Returns all gaps of all GPUs."""
    activity, called = context.get(gpu), context.get(calls)
    low, high = context.get(idle_window)
    nothing = np.empty(0, np.int64)
    found: list[tuple[Ints, ...]] = [(nothing,) * 5]
    devices = unique_values(activity.device).tolist() if high > low else []
    lost = unrecorded(context.trace, GPU_TABLES)  # like an unknown activity
    starts, ends = np.concatenate([activity.start, lost.start]), np.concatenate([activity.end, lost.end])
    rows_lost = np.arange(len(activity), len(starts))
    for device in devices:
        rows = np.concatenate([np.flatnonzero(activity.device == device), rows_lost])
        rows = rows[np.argsort(starts[rows], kind="stable")]
        since, end, before, after = _of_device(starts[rows], ends[rows], low, high)
        rows[rows >= len(activity)] = NOTHING
        before, after = (np.where(place >= 0, rows[place], NOTHING) for place in (before, after))
        found.append((np.full(len(since), device), since, end, before, after))
    device, since, until, before, after = (np.concatenate(part) for part in zip(*found, strict=True))
    start, end = np.maximum(since, low), np.minimum(until, high)
    launch = np.where(after >= 0, activity.call[after], NOTHING) if len(activity) else after
    blocking = _blocking(context, called, launch, since)
    cause, op = _causes(context, _Ended(since, until, launch, after < 0, blocking))
    window = Union(np.array([low]), np.array([high]))
    windows = dict.fromkeys(devices, difference(window, lost).length())
    return IdleGaps(
        device, start, end, since, cause, before, after, launch, blocking, op, context.get(steps).at(start), windows
    )


def _of_device(start: Ints, end: Ints, low: int, high: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Returns start, end and the places of the activities before and after (or NOTHING) of the gaps in a window.

    start, end: of a GPU's activities, in the order of their starts.
    """
    reach = np.maximum.accumulate(end)
    at = np.flatnonzero(start[1:] > reach[:-1]) + 1
    since = np.concatenate([[min(low, int(start[0]))], reach[at - 1], reach[-1:]])
    until = np.concatenate([start[:1], start[at], [max(high, int(reach[-1]))]])
    last = np.searchsorted(reach, reach[np.append(at, len(reach)) - 1])  # the one that ended last before the gap
    before, after = np.concatenate([[NOTHING], last]), np.concatenate([[0], at, [NOTHING]])
    inside = np.minimum(until, high) > np.maximum(since, low)
    return since[inside], until[inside], before[inside], after[inside]


def idle_window(context: Context) -> tuple[int, int]:
    """Returns the time (Unix ns) that is searched for gaps: that of the complete steps, otherwise the window."""
    found = context.get(whole_steps)
    if len(found):
        return int(found.start.min()), int(found.end.max())
    return context.trace.window_start_ns, context.trace.window_end_ns


def measured_steps(context: Context) -> MeasuredSteps:
    """Returns the complete steps of a trace, or its window if it has none."""
    found = context.get(whole_steps)
    if len(found):
        pace = context.get(step_pace)
        return MeasuredSteps(found.number, found.start, found.end, pace.left_out, pace)
    low, high = context.get(idle_window)
    first = _after_warm_up(context, low, high)
    borders = np.array([low, first, high] if low < first < high else [low, high], np.int64)
    return MeasuredSteps(np.full(len(borders) - 1, -1), borders[:-1], borders[1:], borders[1:] <= first)


def _after_warm_up(context: Context, low: int, high: int) -> int:
    """Returns when the last one-time gap ends, or `low` if there is none. Unix ns."""
    gaps = context.get(idle_gaps)
    end = _once(context, gaps, low, high) if len(gaps.windows) == 1 else None
    while end is not None:
        low, end = end, _once(context, gaps, end, high)
    return low


def _once(context: Context, gaps: IdleGaps, low: int, high: int) -> int | None:
    """Returns the end of the last one-time gap since `low`; None if there is none."""
    activity = context.get(gpu)
    inside = np.sort(activity.start[(activity.start > low) & (activity.start < high)])
    if len(inside) < MIN_ACTIVITIES:
        return None
    followed = (gaps.start >= low) & (gaps.after >= 0)
    early = gaps.end <= inside[len(inside) // 2]
    later = int(gaps.length[followed & ~early].sum())
    least = max(ONCE_NS, ONCE_SHARE * (high - low), later)
    once = followed & early & (gaps.length > least)
    return int(gaps.end[once].max()) if once.any() else None


def blocking_calls(context: Context) -> Flags:
    """Returns for each of parts.Calls whether it waits for the GPU on a thread that launches work."""
    called, activity, strings = context.get(calls), context.get(gpu), context.trace.strings
    launching = unique_values(called.thread[activity.call[activity.call >= 0]])
    waits = matches(strings, BLOCKING)[called.name] | matches(strings, BLOCKING_COPY)[called.name]
    found: Flags = waits & np.isin(called.thread, launching)
    return found


def blocking_copies(context: Context) -> Ints:
    """Returns the places in parts.Calls of copies that returned only when they were done."""
    activity, called = context.get(gpu), context.get(calls)
    copies = np.flatnonzero((activity.kind == MEMCPY) & (activity.call >= 0))
    launch = activity.call[copies]
    found: Ints = launch[called.end[launch] >= activity.end[copies]]
    return found


def _blocking(context: Context, called: Calls, launch: Ints, start: Ints) -> Ints:
    """Returns for each gap the blocking call that was running when it began and ended before the launch, or NOTHING."""
    rows = np.flatnonzero(context.get(blocking_calls))
    if not len(rows) or not len(start):
        return np.full(len(start), NOTHING)
    rows = rows[np.argsort(called.start[rows], kind="stable")]
    at = np.searchsorted(called.start[rows], start, side="right") - 1
    # If calls overlap (on several threads), the one that ends last among the nearest held the host.
    best = np.full(len(start), NOTHING)
    for back in range(min(4, len(rows))):
        candidate = rows[np.maximum(at - back, 0)]
        running = (at >= back) & (called.end[candidate] > start) & (launch >= 0)
        running &= called.end[candidate] <= called.start[launch]
        later = (best == NOTHING) | (called.end[candidate] > called.end[best])
        best = np.where(running & later, candidate, best)
    return best


class _Ended(NamedTuple):
    """Gaps that are not cut off by the window, and how they ended. last: no activity follows."""

    since: Ints
    until: Ints
    launch: Ints
    last: Flags
    blocking: Ints


def _causes(context: Context, gaps: _Ended) -> tuple[UInts8, Ints]:
    """Returns the cause of each gap and its operator (row of cpu_op)."""
    called, launch, blocking, start = context.get(calls), gaps.launch, gaps.blocking, gaps.since
    cause = np.full(len(start), HOST, np.uint8)
    if not len(start):
        return cause, np.empty(0, np.int64)
    known = (launch >= 0) | gaps.last
    launched = np.where(launch >= 0, called.start[launch], gaps.until) if len(called) else gaps.until
    waited = np.maximum(launched - start, 0)
    allocates = matches(context.trace.strings, ALLOCATING)[called.name]
    for number, covering in (
        (MEMORY, union(called.start[allocates], called.end[allocates])),
        (COMMUNICATION, _host_union(context, context.get(communication_op_names))),
        (DATA_LOADING, _host_union(context, context.get(data_loading_names))),
    ):
        cause[2 * covering.within(start, start + waited) >= np.maximum(waited, 1)] = number
    cause[blocking >= 0] = SYNCHRONISATION
    cause[(launch >= 0) & (launched <= start)] = QUEUED
    cause[~known] = UNKNOWN
    thread = np.full(len(start), context.get(training_thread), np.uint32)
    thread = np.where(launch >= 0, called.thread[launch], thread) if len(called) else thread
    tree = context.get(ops)
    op = np.full(len(start), NOTHING)
    if len(tree.row):
        inside = tree.nested.innermost(thread, start + waited // 2)
        op = np.where(inside >= 0, tree.row[inside], NOTHING)
    if len(called):
        op = np.where(cause == QUEUED, called.op[launch], op)
        op = np.where(blocking >= 0, called.op[blocking], op)
    return cause, np.where(known, op, NOTHING)


def _host_union(context: Context, names: Flags) -> Union:
    tables = [context.trace.table(kind) for kind in OP_TABLES]
    chosen = [names[table["name"]] for table in tables]
    return union(
        np.concatenate([table["start"][mask] for table, mask in zip(tables, chosen, strict=True)]),
        np.concatenate([table.end()[mask] for table, mask in zip(tables, chosen, strict=True)]),
    )
