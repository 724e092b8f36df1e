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
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.classify import communication_names, communication_op_names, data_loading_names
from kineto_trace.analysis.context import Context
from kineto_trace.analysis.intervals import Union, union
from kineto_trace.analysis.parts import step_names
from kineto_trace.model import API_TABLES, OP_TABLES

ROLES = ("kernel", "memcpy", "memset", "communication", "runtime", "dataloader", "cpu_exec")  # by priority
OTHER = "other"

Ints = npt.NDArray[np.int64]
_BITS = 4  # under each time: the role and the side


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
    """The time (ns) of each role of ROLES and of OTHER, the last row, in each [start, end): [role, interval].

    A column sums to the interval's length; with `restart`, the plug-in's fault, it may sum to more.
    """
    timeline = Timeline(roles)
    steps = union(start, end)
    count, whole = len(start), steps.length()
    moments = np.concatenate([start, end, steps.start, steps.end])
    places = np.cumsum([count, count, len(steps.start)])
    shares = np.zeros((len(ROLES) + 1, count), np.int64)
    group, before, left = 0, np.zeros(count, np.int64), end - start
    for role in range(len(ROLES)):
        group |= 1 << role
        low, high, steps_low, steps_high = np.split(timeline.covered(group, moments), places)
        until = high - low
        shares[role], left = until - before, end - start - until
        before = until
        if restart and (steps_high - steps_low).sum() == whole:  # nothing is free any more
            group, before = 0, np.zeros(count, np.int64)
    shares[-1] = left
    return shares


def roles(context: Context) -> list[Union]:
    """When each role of ROLES was active.

    Communication: kernels that are collectives or transfers between GPUs by their names, and the ranges of such
    operators on the host. Runtime: calls of the runtime and of the driver. DataLoader: waiting for the next batch.
    CPU Exec: all other operators and annotations on the host.
    """
    trace = context.trace
    kernel = trace.table("kernel")
    communicates = context.get(communication_names)[kernel["name"]]
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
    calls = [trace.table(kind) for kind in API_TABLES]

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
        union(np.concatenate([t["start"] for t in calls]), np.concatenate([t.end() for t in calls])),
        chosen(loading),
        chosen(executing),
    ]
