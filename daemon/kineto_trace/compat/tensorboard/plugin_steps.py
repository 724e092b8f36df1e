"""Steps, roles and launches as the TensorBoard profiler plug-in sees them (its last version, of 2026).

Theory of operation
    The plug-in knows events by their category, in any case; what has another category (cuda_driver, cuda_sync,
    overhead, …) is not there for it. Here the rows of a table stand for their category; rows that were read from a
    file are asked for the one that the file gave them.

    It computes with the microseconds of the file as doubles, rounded to a nanosecond or so. Sums and comparisons of
    such doubles are exact; so are those of the integers here (`Clock`), which are the same doubles times a power of
    two.

    Steps are all ranges called "ProfilerStep#N", on the GPU too; without any, the one step "0" is from the first
    start to the last end of operators. Then their ends move to the device:

    - A runtime call belongs to the step in which it lies as a whole. Calls go by their starts, and a step is left
      behind for good by the first call that starts after its end.
    - A step ends with the last device event that its calls launched, but not before its host end. It starts when
      the step before it ends, but not before its host start. Before the first one lies the last device event of no
      step that ended before the first one of step 0 started.
    - Steps after the last one with device events are dropped, and that one as well if it launched less than 0.8
      times what the one before it did: the recording may have ended before its kernels did.

    Which call launched a device event, plugin_nodes.py says.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.intervals import Union, union
from kineto_trace.compat.tensorboard import plugin_nodes
from kineto_trace.compat.tensorboard.plugin_nodes import LIGHTNING_PROFILE
from kineto_trace.kernel_traits.kernel_types import data_loading_names
from kineto_trace.model.context import Context
from kineto_trace.model.trace import GPU_TABLES, Table
from kineto_trace.structure.activity_links import NOTHING, step_names
from kineto_trace.structure.module_calls import LIGHTNING_MODULE, is_lightning
from kineto_trace.structure.recording_span import SPANNING, events_of, runtime_calls, spanning_tables

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

INCOMPLETE = 0.8  # of the device events of the step before
_HOST = ("cpu_op", "user_annotation", "gpu_user_annotation")  # operators and annotations


@dataclass(frozen=True, slots=True)
class TickClock:
    """The meaning of ticks: their origin (Unix ns), and how many make a microsecond."""

    base_ns: int
    per_us: int

    def us(self, ticks: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Converts a duration to µs."""
        found: npt.NDArray[np.float64] = ticks / self.per_us
        return found

    def unix_ns(self, ticks: Ints) -> Ints:
        """Converts a time to Unix ns."""
        if self.per_us == 1000:
            return ticks + self.base_ns
        whole, rest = np.divmod(ticks, self.per_us)
        found: Ints = whole * 1000 + np.rint(rest * 1000 / self.per_us).astype(np.int64) + self.base_ns
        return found

    def times(self, table: Table) -> tuple[Ints, Ints]:
        """Returns starts and ends of the rows of a table, in ticks."""
        if self.per_us == 1000:
            return table["start"] - self.base_ns, table.end() - self.base_ns
        start, duration = plugin_nodes.file_times(table, self.base_ns)
        end = start + duration
        with np.errstate(invalid="ignore", over="ignore"):  # absurd times
            return np.rint(start * self.per_us).astype(np.int64), np.rint(end * self.per_us).astype(np.int64)


UNIX_NS = TickClock(0, 1000)


@dataclass(frozen=True, slots=True)
class StepRanges:
    """Steps in their order. start, end: ticks of the clock. launched: device events of each.

    dropped: names of the last ones that are left out.
    """

    name: tuple[str, ...]
    start: Ints
    end: Ints
    launched: Ints
    clock: TickClock = UNIX_NS
    dropped: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.name)


@dataclass(frozen=True, slots=True)
class DeviceLaunches:
    """Device events with the calls that launched them, in ticks. call: number of the call, NOTHING: none."""

    call_start: Ints
    call_end: Ints
    call: Ints
    start: Ints
    end: Ints


def rows_of(context: Context, kind: str) -> Table:
    """The rows of a table that the plug-in takes for events of that sort."""
    table = runtime_calls(context.trace) if kind == "cuda_runtime" else context.trace.table(kind)
    if kind == "cpu_op" and is_lightning(context.trace):
        texts = context.trace.strings
        ours = [text.startswith((LIGHTNING_MODULE, LIGHTNING_PROFILE)) for text in texts]
        table = table.take(~np.array(ours, np.bool_)[table["name"]])
    return table


def used_processes(context: Context) -> set[int]:
    """What the file's GPU events have as their process: the numbers of the GPUs."""
    found: set[int] = set()
    for kind in GPU_TABLES:
        table = rows_of(context, kind)
        found.update(np.unique(table.origin.get("pid", table["device"])).tolist())
    return found


def host_tables(context: Context) -> list[Table]:
    """Operators, annotations of the host and of GPUs, and events of the old category "python"."""
    return [*(rows_of(context, kind) for kind in _HOST), events_of(context.trace, "python")]


def plugin_clock(context: Context) -> TickClock:
    """The doubles of the file's microseconds as integers, without loss."""
    trace = context.trace
    base = plugin_nodes.base_ns(trace)
    tables = [trace.table(kind) for kind in (*SPANNING, "other") if len(trace.table(kind))]
    ends = [abs(int(side) - base) for t in tables for side in (t["start"].min(), t["start"].max(), t.end().max())]
    return TickClock(base, 1 << min(58 - (max(ends, default=0) // 1000 + 1).bit_length(), 48))


def launches(context: Context) -> DeviceLaunches:
    """The device events, table by table of GPU_TABLES, and the runtime calls, as in their table."""
    clock = context.get(plugin_clock)
    device = [clock.times(context.trace.table(kind)) for kind in GPU_TABLES]
    start, end = (np.concatenate([part[side] for part in device]) for side in (0, 1))
    calls = clock.times(rows_of(context, "cuda_runtime"))
    return DeviceLaunches(*calls, context.get(plugin_nodes.launches).call, start, end)


def host_steps(context: Context) -> StepRanges:
    """All ranges with the name of a step, by their starts; or the one step "0"; none where there are no operators."""
    flags, texts, clock = context.get(step_names), context.trace.strings, context.get(plugin_clock)
    tables = [rows_of(context, kind) for kind in _HOST]
    chosen = [table.take(flags[table["name"]]) for table in tables]
    start, end = _joined(clock, chosen)
    if not len(start):
        start, end = _joined(clock, [tables[0], events_of(context.trace, "python")])
        if not len(start):
            return StepRanges((), start, end, start, clock)
        return StepRanges(("0",), start.min(keepdims=True), end.max(keepdims=True), np.zeros(1, np.int64), clock)
    place = np.concatenate([table.origin.get("place", np.zeros(len(table), np.uint32)) for table in chosen])
    order = np.lexsort((place, start))  # of equal starts the order in the file counts
    name = np.concatenate([table["name"] for table in chosen])[order]
    names = tuple(str(int(texts[number].split("#")[1])) for number in name.tolist())
    return StepRanges(names, start[order], end[order], np.zeros(len(order), np.int64), clock)


def _joined(clock: TickClock, tables: Sequence[Table]) -> tuple[Ints, Ints]:
    """Starts and ends of the rows of all tables, in ticks."""
    times = [clock.times(table) for table in tables]
    return np.concatenate([start for start, _ in times]), np.concatenate([end for _, end in times])


def on_device(host: StepRanges, launched: DeviceLaunches) -> StepRanges:
    """The steps with the ends that the device gives them, by the rule above."""
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
    return StepRanges(host.name[:keep], start[:keep], end[:keep], events[:keep], host.clock, dropped=host.name[keep:])


def _step_of_calls(host: StepRanges, start: Ints, end: Ints) -> Ints:
    """For each call the step in which it lies as a whole; NOTHING: none."""
    reach = np.maximum.accumulate(host.end)
    step = np.searchsorted(reach, start, "right")
    lasting_not = end == start  # one without duration still belongs to a step that ends with it
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


def plugin_steps(context: Context) -> StepRanges:
    """Returns the plug-in's steps."""
    return on_device(context.get(host_steps), context.get(launches))


def plugin_roles(context: Context) -> list[Union]:
    """When each role of breakdown.ROLES was active for the plug-in, in ticks of its clock.

    Communication: operators and annotations with the names in plugin_nodes.COLLECTIVES, on the GPU too, and kernels
    with an external id of one of these. CPU Exec: all other operators and annotations, on the GPU too.
    """
    kernel = rows_of(context, "kernel")
    own, ids = _communication(context)
    communicates = np.isin(plugin_nodes.external_ids(kernel), ids)
    host = host_tables(context)
    clock = context.get(plugin_clock)
    name = np.concatenate([table["name"] for table in host])
    start, end = _joined(clock, host)
    step, communication = context.get(step_names)[name], own[name]
    loading = context.get(data_loading_names)[name]
    loading[len(loading) - len(host[-1]) :] = False
    step[len(step) - len(host[-1]) :] = False
    communication &= ~(step | loading)
    device = [rows_of(context, kind) for kind in ("gpu_memcpy", "gpu_memset", "cuda_runtime")]
    copies, fills, calls = (union(*clock.times(table)) for table in device)
    executing = ~(step | communication | loading)
    begin, stop = clock.times(kernel)
    return [
        union(begin[~communicates], stop[~communicates]),
        copies,
        fills,
        union(
            np.concatenate([begin[communicates], start[communication]]),
            np.concatenate([stop[communicates], end[communication]]),
        ),
        calls,
        union(start[loading], end[loading]),
        union(start[executing], end[executing]),
    ]


def _communication(context: Context) -> tuple[Flags, Ints]:
    """For each string whether it is the name of such an operator; and the external ids of these operators."""
    texts = context.trace.strings
    own = np.fromiter((text in plugin_nodes.COLLECTIVES for text in texts), np.bool_, len(texts))
    ids = []
    for table in host_tables(context):
        ids.append(plugin_nodes.external_ids(table)[own[table["name"]]])
    return own, np.concatenate(ids)


def profiler_span(context: Context) -> tuple[int, int]:
    """Start and end of the recording, in ticks."""
    times = [context.get(plugin_clock).times(table) for table in spanning_tables(context)]
    if not times:
        return 0, 0
    return min(int(start.min()) for start, _ in times), max(int(end.max()) for _, end in times)
