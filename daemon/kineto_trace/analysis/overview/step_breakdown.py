"""What each training step spent its time on.

Theory of operation
    A role is a set of intervals; only their union counts. The boundaries of all unions are sorted in one go, with the
    role and the side of each in the low bits of its time, so that a running sum of them is a bit mask of the roles that
    are active from this boundary to the next one. The time for which any of the first n roles was active before some
    moment is a running sum; a step's value is the difference at its two ends (so steps may overlap or leave gaps), and
    the increase by one more role is that role's share.

    The roles and their priority are those of the TensorBoard profiler plug-in. It subtracts role after role from the
    free time of all steps together, and once nothing is left, it uses the next role as a whole, as if it were the
    first: `partition(…, restart=True)` does the same.

    Time that a source does not cover has a role too: before the roles that the source records, since any of these may
    have been active then. Both such roles together are the time UNRECORDED. It is not a share of anything: means are
    those of completely recorded steps, or if there are none, of the recorded time of the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kineto_trace.analysis.gpu_time_views import unknown_without_gpu
from kineto_trace.arrays.intervals import Union, union
from kineto_trace.arrays.row_groups import sums
from kineto_trace.base.array_types import NOTHING, AnyArray, Floats, Ints
from kineto_trace.base.quantities import format_duration
from kineto_trace.kernel_traits.kernel_types import communication_op_names, data_loading_names
from kineto_trace.model.context import Context
from kineto_trace.model.trace import API_TABLES, GPU_TABLES, OP_TABLES
from kineto_trace.structure.activity_links import Steps, calls, communication_kernels, gpu, step_names, steps
from kineto_trace.structure.nesting import last_end, unrecorded
from kineto_trace.structure.step_pace import step_pace
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

ROLES = ("kernel", "memcpy", "memset", "communication", "runtime", "dataloader", "cpu_exec")  # by priority
OTHER = "other"
UNRECORDED = "unrecorded"
NS_PER_US = 1000
_BITS = 5  # below each time: the role and the side
_ON_GPU = 4  # number of ROLES that the GPU's activities decide
_NEGLIGIBLE = 0.01  # of a step
INCOMPLETE = 0.8  # of the device events of the previous step
NO_STEPS = "the trace has no ProfilerStep#N annotations"
_SHOWN = 5


# When steps begin and end, on the host and on the device.
# The ends of steps move from the host to the device by the rule of the TensorBoard profiler plug-in:
# - A call belongs to the step in which it lies entirely. Calls are visited by their starts, and the first call that
# starts after a step's end leaves that step behind for good.
# - A step ends with the last device event that its calls launched, but not before its host end. It starts when the
# previous step ends, but not before its host start. The first one is preceded by the last device event of no step that
# ended before the first one of step 0 started.
# - Steps after the last one with device events are dropped, and that one as well if it launched less than 0.8 times as
# many as the previous one: the recording may have ended before its kernels did.
@dataclass(frozen=True, slots=True)
class StepRanges:
    """Steps in their order.

    start, end: in any one unit of time.
    launched: device events of each.
    dropped: names of the last ones that are left out.
    cut: places of those that the recording cut off.
    untypical: places of others that means leave out because they do not show the pace (structure/step_pace.py).
    """

    name: tuple[str, ...]
    start: Ints
    end: Ints
    launched: Ints
    dropped: tuple[str, ...] = ()
    cut: tuple[int, ...] = ()
    untypical: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.name)

    def span(self) -> tuple[int, int] | None:
        """Returns the start of the first step and the end of the last one; None without steps."""
        return (int(self.start[0]), int(self.end[-1])) if len(self) else None

    def measured(self) -> "StepRanges":
        """Returns the steps that count for means: without those that were cut off, and untypical ones."""
        if not self.cut and not self.untypical:
            return self
        rows = np.delete(np.arange(len(self)), (*self.cut, *self.untypical))
        names = tuple(self.name[row] for row in rows.tolist())
        return StepRanges(names, self.start[rows], self.end[rows], self.launched[rows], self.dropped)


@dataclass(frozen=True, slots=True)
class DeviceLaunches:
    """Device events with the calls that launched them. call: number of the call, or NOTHING."""

    call_start: Ints
    call_end: Ints
    call: Ints
    start: Ints
    end: Ints


class Timeline:
    """Which of some roles are active when. time: boundaries (ns); mask: from each to the next, bit n: the n-th role."""

    def __init__(self, roles: Sequence[Union]) -> None:
        lasting = [Union(*(side[role.end > role.start] for side in role)) for role in roles]
        base = min((int(role.start[0]) for role in lasting if len(role.start)), default=0)
        keys = [(role.start - base) << _BITS | number << 1 for number, role in enumerate(lasting)]
        keys += [(role.end - base) << _BITS | number << 1 | 1 for number, role in enumerate(lasting)]
        key = np.sort(np.concatenate(keys), kind="stable")
        change = np.array([sign << number for number in range(len(roles)) for sign in (1, -1)], np.int16)
        self.time: Ints = (key >> _BITS) + base
        self.mask = np.cumsum(change[key & ((1 << _BITS) - 1)], dtype=np.int16)
        self._length = np.diff(self.time, append=self.time[-1:])

    def covered(self, bits: int, moment: Ints) -> Ints:
        """Returns for each moment how long (ns) before it any of the roles in `bits` was active."""
        if not len(self.time):
            return np.zeros(len(moment), np.int64)
        active = (self.mask & bits) != 0
        total = np.zeros(len(active) + 1, np.int64)
        np.cumsum(self._length * active, out=total[1:])
        at = np.searchsorted(self.time, moment, side="right") - 1
        found: Ints = np.where(at >= 0, total[at] + active[at] * (moment - self.time[at]), 0)
        return found


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Steps, and the time (us) of each role of ROLES and of OTHER in each of them: shares_us[role, step].

    dropped: names of the last steps that are left out.
    cut: places of the steps that the recording cut off.
    untypical: places of others that do not show the pace.
    pace_note: says why.
    unrecorded_us: time without a role because a source does not cover it; None if the trace does not state that.
    """

    steps: tuple[str, ...]
    start_ns: Ints
    lengths_us: Floats
    shares_us: Floats
    dropped: tuple[str, ...]
    cut: tuple[int, ...] = ()
    unrecorded_us: Floats | None = None
    untypical: tuple[int, ...] = ()
    pace_note: str | None = None

    @property
    def unrecorded(self) -> Floats:
        """Returns the time (us) of each step without a role."""
        return np.zeros(len(self.steps)) if self.unrecorded_us is None else self.unrecorded_us

    @property
    def counted(self) -> Ints:
        """Returns the places of the steps that count for means: if possible those recorded by all sources."""
        whole = self.measured
        covered = whole[self.unrecorded[whole] <= _NEGLIGIBLE * self.lengths_us[whole]]
        return covered if len(covered) else whole

    @property
    def measured(self) -> Ints:
        """Returns the places of the steps that were recorded from beginning to end and show the pace."""
        return np.delete(np.arange(len(self.steps)), (*self.cut, *self.untypical))

    def average(self, role: str) -> float:
        """Returns the share (0 to 1) of a role in the recorded time of the mean step; NaN without steps.

        If no step is whole, it is the share of the parts that were recorded.
        """
        chosen = self.counted if len(self.measured) else slice(None)
        total = (self.lengths_us - self.unrecorded)[chosen].sum()
        return float(self.shares_us[(*ROLES, OTHER).index(role)][chosen].sum() / total) if total else float("nan")


def on_device(host: StepRanges, launched: DeviceLaunches) -> StepRanges:
    """Returns the steps with the ends that the device gives them, by the rule above."""
    if not len(host):
        return host
    step = _step_of_calls(host, launched.call_start, launched.call_end)
    owner = np.where(launched.call >= 0, step[launched.call], NOTHING) if len(step) else np.full_like(launched.call, -1)
    matched = owner >= 0
    if not matched.any():
        return host
    count = len(host)
    events = np.bincount(owner[matched], minlength=count)
    last, first = np.full(count, np.iinfo(np.int64).min), np.full(count, np.iinfo(np.int64).max)
    np.maximum.at(last, owner[matched], launched.end[matched])
    np.minimum.at(first, owner[matched], launched.start[matched])
    previous = int(host.start[0])
    if events[0]:
        early = launched.end[~matched & (launched.end < first[0])]
        previous = max(previous, int(early.max(initial=previous)))
    start, end = host.start.copy(), host.end.copy()
    for number in range(count):
        start[number] = max(previous, int(start[number]))
        previous = end[number] = max(int(end[number]), int(start[number]), int(last[number]))
    keep = _complete(events.tolist())
    cut, aside = (tuple(place for place in places if place < keep) for places in (host.cut, host.untypical))
    dropped = host.name[keep:]
    return StepRanges(host.name[:keep], start[:keep], end[:keep], events[:keep], dropped, cut, aside)


def _step_of_calls(host: StepRanges, start: Ints, end: Ints) -> Ints:
    """Returns for each call the step in which it lies entirely, or NOTHING."""
    reach = np.maximum.accumulate(host.end)
    step = np.searchsorted(reach, start, "right")
    lasting_not = end == start  # a call without duration still belongs to a step that ends with it
    step[lasting_not] = np.searchsorted(reach, start[lasting_not], "left")
    place = np.minimum(step, len(reach) - 1)
    inside = (step < len(reach)) & (host.start[place] <= start) & (end <= host.end[place])
    return np.where(inside, place, NOTHING)


def _complete(events: list[int]) -> int:
    """Returns how many steps remain."""
    if len(events) < 2:
        return len(events)
    last = max(number for number, count in enumerate(events) if count)
    if last > 0 and events[last - 1] * INCOMPLETE > events[last]:
        return last
    return last + 1


def partition(roles: Sequence[Union], start: Ints, end: Ints, *, restart: bool = False) -> Ints:
    """Returns the time (ns) of each of the roles and of OTHER, the last row, in each [start, end): [role, interval].

    A column sums to the interval's length; with `restart`, the plug-in's fault, it may sum to more.
    """
    timeline = Timeline(roles)
    together = union(start, end)
    count, whole = len(start), together.length()
    moments = np.concatenate([start, end, together.start, together.end])
    places = np.cumsum([count, count, len(together.start)])
    shares = np.zeros((len(roles) + 1, count), np.int64)
    group, before, left = 0, np.zeros(count, np.int64), end - start
    for role in range(len(roles)):
        group |= 1 << role
        low, high, all_low, all_high = np.split(timeline.covered(group, moments), places)
        until = high - low
        shares[role], left = until - before, end - start - until
        before = until
        if restart and (all_high - all_low).sum() == whole:  # no free time is left
            group, before = 0, np.zeros(count, np.int64)
    shares[-1] = left
    return shares


def roles(context: Context) -> list[Union]:
    """Returns when each role of ROLES was active.

    Communication: kernels that are collectives or transfers between GPUs, and the ranges of such operators on the host.
    Runtime: calls of the runtime and of the driver.
    DataLoader: waiting for the next batch.
    CPU Exec: all other operators and annotations on the host.
    """
    trace = context.trace
    kernel = trace.table("kernel")
    communicates = context.get(communication_kernels)
    copies, fills = trace.table("gpu_memcpy"), trace.table("gpu_memset")
    host = [trace.table(kind) for kind in OP_TABLES]
    name, start, end = (
        np.concatenate(part)
        for part in ([t["name"] for t in host], [t["start"] for t in host], [t.end() for t in host])
    )
    step = context.get(step_names)[name]
    communication = context.get(communication_op_names)[name] & ~step
    loading = context.get(data_loading_names)[name] & ~communication & ~step
    executing = ~(step | communication | loading)
    made = [trace.table(kind) for kind in API_TABLES]

    def chosen(mask: AnyArray) -> Union:
        return union(start[mask], end[mask])

    return [
        union(kernel["start"][~communicates], kernel.end()[~communicates]),
        union(copies["start"], copies.end()),
        union(fills["start"], fills.end()),
        union(
            np.concatenate([kernel["start"][communicates], start[communication]]),
            np.concatenate([kernel.end()[communicates], end[communication]]),
        ),
        union(np.concatenate([t["start"] for t in made]), np.concatenate([t.end() for t in made])),
        chosen(loading),
        chosen(executing),
    ]


def host_ranges(context: Context) -> StepRanges:
    """Returns the steps that the host saw; without any the one step "all", from the first to the last event."""
    found = context.get(steps)
    if len(found):
        names = tuple(str(number) for number in found.number.tolist())
        cut, whole = np.flatnonzero(~found.complete), np.flatnonzero(found.complete)
        untypical = tuple(whole[context.get(step_pace).left_out].tolist())
        launched = np.zeros(len(found), np.int64)
        return StepRanges(names, found.start, found.end, launched, cut=tuple(cut.tolist()), untypical=untypical)
    tables = [context.trace.table(kind) for kind in (*OP_TABLES, *API_TABLES, *GPU_TABLES)]
    tables = [table for table in tables if len(table)]
    if not tables:
        return StepRanges((), *np.zeros((3, 0), np.int64))
    start = np.array([min(int(table["start"].min()) for table in tables)])
    return StepRanges(("all",), start, np.array([last_end(tables)]), np.zeros(1, np.int64))


def device_ranges(context: Context) -> StepRanges:
    """Returns the same steps with the ends that the device gives them."""
    activity, called = context.get(gpu), context.get(calls)
    launched = DeviceLaunches(called.start, called.end, activity.call, activity.start, activity.end)
    return on_device(context.get(host_ranges), launched)


def breakdown(context: Context) -> Breakdown:
    """Returns the steps of the host and their time."""
    return _broken_down(context, context.get(host_ranges))


def device_breakdown(context: Context) -> Breakdown:
    """Returns the steps with ends on the device, and their time."""
    return _broken_down(context, context.get(device_ranges))


def _broken_down(context: Context, found: StepRanges) -> Breakdown:
    lengths = (found.end - found.start) / NS_PER_US
    active = context.get(roles)
    unknown = np.zeros(len(found)) if context.trace.coverage else None
    no_gpu, no_host = (unrecorded(context.trace, kinds) for kinds in (GPU_TABLES, (*OP_TABLES, *API_TABLES)))
    if len(no_gpu.start) or len(no_host.start):
        active = [no_gpu, *active[:_ON_GPU], no_host, *active[_ON_GPU:]]
    shares = partition(active, found.start, found.end) / NS_PER_US
    if len(active) > len(ROLES):
        unknown = shares[[0, 1 + _ON_GPU]].sum(axis=0)
        shares = np.delete(shares, [0, 1 + _ON_GPU], axis=0)
    note = context.get(step_pace).note()
    return Breakdown(found.name, found.start, lengths, shares, found.dropped, found.cut, unknown, found.untypical, note)


def incomplete_note(names: Sequence[str], whole: int, longest_us: float) -> str:
    """Returns a note on the steps that the recording cut off. names: of these; whole: the number of others."""
    listed = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
    if not whole:
        plural = "s" if len(names) > 1 else ""
        return (
            f"no step is complete: the recording began or ended during step{plural} {listed}. A step takes at least "
            f"{format_duration(1000 * longest_us)} (the longest recorded part); shares refer to the recorded parts"
        )
    return f"incomplete steps, left out of means because the recording began or ended during them: {listed}"


@view(
    "profiler_steps",
    columns(
        ("step", "int", "", "step number in the name of the annotation"),
        ("start_ns", "int", "ns", "Unix time when it began on the host"),
        ("complete", "bool", "", "whether all of it was recorded; if not, duration_us is the recorded part"),
        ("duration_us", "float", "us", "duration on the host"),
        ("gpu_activities", "int", "", "number of kernels, copies and fills that any thread launched while it ran"),
        ("gpu_us", "float", "us", "sum of their durations"),
    ),
)
def profiler_steps(context: Context) -> Answer:
    """The "ProfilerStep#N" annotations on the host, ordered by start.

    Without any GPU activity in the trace, the GPU figures are missing, not zero.
    """
    found = context.get(steps)
    answer = Answer(step_values(context), _notes(found))
    return unknown_without_gpu(context, answer, ("gpu_activities", "gpu_us")) if len(found) else answer


def step_values(context: Context) -> dict[str, AnyArray]:
    """The columns of the view profiler_steps; without GPU activity its figures are 0."""
    found, work, called = context.get(steps), context.get(gpu), context.get(calls)
    launched = np.flatnonzero(work.call >= 0)
    launch = called.start[work.call[launched]] if len(launched) else launched
    at = found.at(launch)
    inside = at >= 0
    step = at[inside]
    return {
        "step": found.number,
        "start_ns": found.start,
        "complete": found.complete,
        "duration_us": (found.end - found.start) / 1000,
        "gpu_activities": np.bincount(step, minlength=len(found)),
        "gpu_us": sums(step, (work.end - work.start)[launched[inside]], len(found)) / 1000,
    }


def _notes(found: Steps) -> list[str]:
    if not len(found):
        return [NO_STEPS]
    cut = np.flatnonzero(~found.complete)
    if not len(cut):
        return []
    longest = float((found.end - found.start)[cut].max()) / 1000
    return [incomplete_note([str(number) for number in found.number[cut]], len(found) - len(cut), longest)]
