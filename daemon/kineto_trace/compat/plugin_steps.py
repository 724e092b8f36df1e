"""Steps, roles and launches as the TensorBoard profiler plug-in sees them (its last version, of 2026).

Theory of operation
    The plug-in identifies events by their category and ignores other categories (cuda_driver, cuda_sync, overhead, …).
    Here the rows of a table represent a category; runtime calls count if Kineto writes their category.

    It computes with the microseconds of the file as doubles, rounded to a nanosecond or so. Sums and comparisons of
    such doubles are exact; so are those of the integers here (`TickClock`), which are the same doubles times a power of
    two.

    Steps are all ranges called "ProfilerStep#N", on the GPU too; without any, the one step "0" is from the first
    start to the last end of operators. Then their ends move to the device (analysis/overview/step_breakdown.py).
    plugin_tree.py finds the call that launched a device event.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kineto_trace.analysis.overview.step_breakdown import Breakdown, DeviceLaunches, StepRanges, on_device, partition
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.intervals import Union, union
from kineto_trace.base.array_types import AnyArray, Flags, Floats, Ints
from kineto_trace.compat.plugin_tree import COLLECTIVES, LIGHTNING_PROFILE, base_ns, external_ids, file_times, launches
from kineto_trace.kernel_traits.kernel_types import data_loading_names
from kineto_trace.model.context import Context
from kineto_trace.model.trace import GPU_TABLES, Table
from kineto_trace.structure.activity_links import step_names
from kineto_trace.structure.module_calls import LIGHTNING_MODULE, is_lightning
from kineto_trace.structure.trace_forms import SPANNING, events_of, runtime_calls, spanning_tables

_HOST = ("cpu_op", "user_annotation", "gpu_user_annotation")  # operators and annotations


@dataclass(frozen=True, slots=True)
class TickClock:
    """The meaning of ticks: their origin (Unix ns), and how many make a microsecond."""

    base_ns: int
    per_us: int

    def us(self, ticks: AnyArray) -> Floats:
        """Converts a duration to µs."""
        found: Floats = ticks / self.per_us
        return found

    def unix_ns(self, ticks: Ints) -> Ints:
        """Converts a time to Unix ns."""
        whole, rest = np.divmod(ticks, self.per_us)
        found: Ints = whole * 1000 + np.rint(rest * 1000 / self.per_us).astype(np.int64) + self.base_ns
        return found

    def times(self, table: Table) -> tuple[Ints, Ints]:
        """Returns starts and ends of the rows of a table, in ticks."""
        start, duration = file_times(table, self.base_ns)
        end = start + duration
        with np.errstate(invalid="ignore", over="ignore"):  # absurd times
            return np.rint(start * self.per_us).astype(np.int64), np.rint(end * self.per_us).astype(np.int64)


def rows_of(context: Context, kind: str) -> Table:
    """Returns the rows of a table that the plug-in counts as events of that kind."""
    table = runtime_calls(context.trace) if kind == "cuda_runtime" else context.trace.table(kind)
    if kind == "cpu_op" and is_lightning(context.trace):
        texts = context.trace.strings
        ours = [text.startswith((LIGHTNING_MODULE, LIGHTNING_PROFILE)) for text in texts]
        table = table.take(~np.array(ours, np.bool_)[table["name"]])
    return table


def used_processes(context: Context) -> set[int]:
    """Returns the processes that the file states for GPU events, which are the numbers of the GPUs."""
    found: set[int] = set()
    for kind in GPU_TABLES:
        table = rows_of(context, kind)
        found.update(unique_values(table.origin.get("pid", table["device"])).tolist())
    return found


def host_tables(context: Context) -> list[Table]:
    """Returns operators, annotations of the host and of GPUs, and events of the old category "python"."""
    return [*(rows_of(context, kind) for kind in _HOST), events_of(context.trace, "python")]


def plugin_clock(context: Context) -> TickClock:
    """Returns the clock whose ticks express the file's microseconds, which are doubles, without loss."""
    trace = context.trace
    base = base_ns(trace)
    tables = [trace.table(kind) for kind in (*SPANNING, "other") if len(trace.table(kind))]
    ends = [abs(int(side) - base) for t in tables for side in (t["start"].min(), t["start"].max(), t.end().max())]
    return TickClock(base, 1 << min(58 - (max(ends, default=0) // 1000 + 1).bit_length(), 48))


def device_launches(context: Context) -> DeviceLaunches:
    """Returns the device events, table by table of GPU_TABLES, and the runtime calls in the order of their table."""
    clock = context.get(plugin_clock)
    device = [clock.times(context.trace.table(kind)) for kind in GPU_TABLES]
    start, end = (np.concatenate([part[side] for part in device]) for side in (0, 1))
    calls = clock.times(rows_of(context, "cuda_runtime"))
    return DeviceLaunches(*calls, context.get(launches).call, start, end)


def host_steps(context: Context) -> StepRanges:
    """Returns all ranges with the name of a step, by start; else the one step "0"; none if there are no operators."""
    flags, texts, clock = context.get(step_names), context.trace.strings, context.get(plugin_clock)
    tables = [rows_of(context, kind) for kind in _HOST]
    chosen = [table.take(flags[table["name"]]) for table in tables]
    start, end = _joined(clock, chosen)
    if not len(start):
        start, end = _joined(clock, [tables[0], events_of(context.trace, "python")])
        if not len(start):
            return StepRanges((), start, end, start)
        return StepRanges(("0",), start.min(keepdims=True), end.max(keepdims=True), np.zeros(1, np.int64))
    place = np.concatenate([table.origin.get("place", np.zeros(len(table), np.uint32)) for table in chosen])
    order = np.lexsort((place, start))  # at equal starts the order in the file counts
    name = np.concatenate([table["name"] for table in chosen])[order]
    names = tuple(str(int(texts[number].split("#")[1])) for number in name.tolist())
    return StepRanges(names, start[order], end[order], np.zeros(len(order), np.int64))


def _joined(clock: TickClock, tables: Sequence[Table]) -> tuple[Ints, Ints]:
    """Returns starts and ends of the rows of all tables, in ticks."""
    times = [clock.times(table) for table in tables]
    return np.concatenate([start for start, _ in times]), np.concatenate([end for _, end in times])


def plugin_steps(context: Context) -> StepRanges:
    """Returns the plug-in's steps."""
    return on_device(context.get(host_steps), context.get(device_launches))


def plugin_roles(context: Context) -> list[Union]:
    """Returns when each role of step_breakdown.ROLES was active for the plug-in, in ticks of its clock.

    Communication: operators and annotations with the names in plugin_nodes.COLLECTIVES, on the GPU too, and kernels
    with an external id of one of these. CPU Exec: all other operators and annotations, on the GPU too.
    """
    kernel = rows_of(context, "kernel")
    own, ids = _communication(context)
    communicates = np.isin(external_ids(kernel), ids)
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
    """Returns for each string whether it names such an operator, and these operators' external ids."""
    texts = context.trace.strings
    own = np.fromiter((text in COLLECTIVES for text in texts), np.bool_, len(texts))
    ids = []
    for table in host_tables(context):
        ids.append(external_ids(table)[own[table["name"]]])
    return own, np.concatenate(ids)


def plugin_breakdown(context: Context) -> Breakdown:
    """Returns the plug-in's steps, and their time by its rules."""
    found, clock = context.get(plugin_steps), context.get(plugin_clock)
    shares = partition(context.get(plugin_roles), found.start, found.end, restart=True)
    lengths = clock.us(found.end - found.start)
    return Breakdown(found.name, clock.unix_ns(found.start), lengths, clock.us(shares), found.dropped)


def profiler_span(context: Context) -> tuple[int, int]:
    """Returns start and end of the recording, in ticks."""
    times = [context.get(plugin_clock).times(table) for table in spanning_tables(context)]
    if not times:
        return 0, 0
    return min(int(start.min()) for start, _ in times), max(int(end.max()) for _, end in times)
