"""Where the time of training steps goes: each moment belongs to one role, the first in the order of priority.

Theory of operation
    A role is a set of intervals; only their union counts. The boundaries of all unions are sorted in one go, with
    the role and the side of each in the low bits of its time, so that a running sum of them is a bit mask: which
    roles are active from this boundary to the next one. How long any of the first n roles was active before some
    moment is a running sum, from which a step takes the difference of its two ends (so steps may overlap or leave
    gaps); what one more role adds to it is that role's share.

    The roles and their priority are those of the TensorBoard profiler plug-in. It subtracts role after role from
    what is free in all steps together, and once nothing is left, it takes the next role as a whole, as if it was
    the first: `partition(…, restart=True)` does the same.

    Time that a source does not cover has a role too: before the roles that the source records, since any of these may
    have been active then. Both such roles together are the time UNRECORDED. It is no share of anything: means are those
    of steps that were recorded wholly, or if there are none, of the recorded time of the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.overview.step_ranges import DeviceLaunches, StepRanges, on_device
from kineto_trace.arrays.intervals import Union, union
from kineto_trace.kernel_traits.kernel_types import communication_op_names, data_loading_names
from kineto_trace.model.context import Context
from kineto_trace.model.trace import API_TABLES, GPU_TABLES, OP_TABLES
from kineto_trace.structure.activity_links import calls, communication_kernels, gpu, step_names, steps
from kineto_trace.structure.nesting import last_end
from kineto_trace.structure.recorded_time import unrecorded
from kineto_trace.structure.steps.step_pace import step_pace

ROLES = ("kernel", "memcpy", "memset", "communication", "runtime", "dataloader", "cpu_exec")  # by priority
OTHER = "other"
UNRECORDED = "unrecorded"
NS_PER_US = 1000

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
_BITS = 5  # under each time: the role and the side
_ON_GPU = 4  # of ROLES: those that the GPU's activities decide
_NEGLIGIBLE = 0.01  # of a step


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
        """For each moment: how long (ns) before it any of the roles in `bits` was active."""
        if not len(self.time):
            return np.zeros(len(moment), np.int64)
        active = (self.mask & bits) != 0
        total = np.zeros(len(active) + 1, np.int64)
        np.cumsum(self._length * active, out=total[1:])
        at = np.searchsorted(self.time, moment, side="right") - 1
        found: Ints = np.where(at >= 0, total[at] + active[at] * (moment - self.time[at]), 0)
        return found


def partition(roles: Sequence[Union], start: Ints, end: Ints, *, restart: bool = False) -> Ints:
    """The time (ns) of each of the roles and of OTHER, the last row, in each [start, end): [role, interval].

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
        if restart and (all_high - all_low).sum() == whole:  # nothing is free any more
            group, before = 0, np.zeros(count, np.int64)
    shares[-1] = left
    return shares


def roles(context: Context) -> list[Union]:
    """When each role of ROLES was active.

    Communication: kernels that are collectives or transfers between GPUs, and the ranges of such operators on the
    host. Runtime: calls of the runtime and of the driver. DataLoader: waiting for the next batch.
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

    def chosen(mask: npt.NDArray[Any]) -> Union:
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
    """The steps that the host saw; without any the one step "all", from the first to the last event."""
    found = context.get(steps)
    if len(found):
        names = tuple(str(number) for number in found.number.tolist())
        cut, whole = np.flatnonzero(~found.complete), np.flatnonzero(found.complete)
        aside = whole[context.get(step_pace).left_out]
        launched = np.zeros(len(found), np.int64)
        return StepRanges(names, found.start, found.end, launched, cut=tuple(cut.tolist()), aside=tuple(aside.tolist()))
    tables = [context.trace.table(kind) for kind in (*OP_TABLES, *API_TABLES, *GPU_TABLES)]
    tables = [table for table in tables if len(table)]
    if not tables:
        return StepRanges((), *np.zeros((3, 0), np.int64))
    start = np.array([min(int(table["start"].min()) for table in tables)])
    return StepRanges(("all",), start, np.array([last_end(tables)]), np.zeros(1, np.int64))


def device_ranges(context: Context) -> StepRanges:
    """The same with the ends that the device gives them."""
    activity, called = context.get(gpu), context.get(calls)
    launched = DeviceLaunches(called.start, called.end, activity.call, activity.start, activity.end)
    return on_device(context.get(host_ranges), launched)


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Steps, and the time (us) of each role of ROLES and of OTHER in each of them: shares_us[role, step].

    dropped: names of the last steps that are left out. cut: places of the steps that the recording cut off. aside:
    places of others that do not show the pace; pace_note: says why. unrecorded_us: time that belongs to no role since a
    source does not cover it; None: the trace does not state that.
    """

    steps: tuple[str, ...]
    start_ns: Ints
    lengths_us: Floats
    shares_us: Floats
    dropped: tuple[str, ...]
    cut: tuple[int, ...] = ()
    unrecorded_us: Floats | None = None
    aside: tuple[int, ...] = ()
    pace_note: str | None = None

    @property
    def unrecorded(self) -> Floats:
        """The time (us) of each step that belongs to no role."""
        return np.zeros(len(self.steps)) if self.unrecorded_us is None else self.unrecorded_us

    @property
    def counted(self) -> Ints:
        """The places of the steps that means are taken over: if possible of those recorded by all sources."""
        whole = self.measured
        covered = whole[self.unrecorded[whole] <= _NEGLIGIBLE * self.lengths_us[whole]]
        return covered if len(covered) else whole

    @property
    def measured(self) -> Ints:
        """The places of the steps that were recorded from beginning to end and show the pace."""
        return np.delete(np.arange(len(self.steps)), (*self.cut, *self.aside))

    def average(self, role: str) -> float:
        """Returns the share (0 to 1) of a role in the recorded time of the mean step; NaN without steps.

        If no step is whole, it is the share of the parts that were recorded.
        """
        chosen = self.counted if len(self.measured) else slice(None)
        total = (self.lengths_us - self.unrecorded)[chosen].sum()
        return float(self.shares_us[(*ROLES, OTHER).index(role)][chosen].sum() / total) if total else float("nan")


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
    return Breakdown(found.name, found.start, lengths, shares, found.dropped, found.cut, unknown, found.aside, note)
