"""The figures of kernels and GPUs, the overview and the recommendations of the TensorBoard plug-in."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from kineto_trace.analysis.findings.recommendation_views import (
    TENSOR_CORE_CAPABILITY,
    RecommendationFacts,
    capabilities,
    is_full,
    major_capability,
    recommendation_columns,
    recommendations,
)
from kineto_trace.analysis.kernels.kernel_views import (
    PROPERTIES,
    SHAPES,
    Mean,
    kernel_columns,
    kernel_groups,
    kernels,
    kernels_by_op,
    known_mean,
    op_columns,
    share_columns,
    tensor_core_use,
)
from kineto_trace.analysis.kernels.precision_views import (
    NAN,
    LaunchFigures,
    TensorUse,
    launch_figures,
    share_of,
    stated_figures,
)
from kineto_trace.analysis.overview.gpu_figures import (
    FigureBasis,
    GpuFigures,
    TimeCourse,
    figures_of,
    global_memory,
    kernel_rows,
    peaks_of_devices,
    utilization_course,
)
from kineto_trace.analysis.overview.overview_views import (
    ShareSpans,
    efficiency_columns,
    gpu_columns,
    gpu_summary,
    gpu_utilization,
    overview,
    overview_columns,
    sm_efficiency,
    step_breakdown,
    step_columns,
    utilization_columns,
)
from kineto_trace.analysis.overview.step_breakdown import Breakdown, DeviceLaunches, StepRanges, on_device, partition
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.intervals import Union, union
from kineto_trace.base.array_types import NOTHING, AnyArray, Flags, Floats, Ints
from kineto_trace.compat.plugin_backward import outermost, plugin_backward
from kineto_trace.compat.plugin_tree import (
    COLLECTIVES,
    LIGHTNING_PROFILE,
    base_ns,
    external_ids,
    file_times,
    launches,
    nodes,
    plugin_eligible_names,
    plugin_tensor_names,
    plugin_tree,
)
from kineto_trace.kernel_traits.kernel_types import data_loading_names
from kineto_trace.model.activity_tables import STEP_PREFIX
from kineto_trace.model.context import Context
from kineto_trace.model.trace import GPU_TABLES, Table
from kineto_trace.structure.activity_links import KERNEL, step_names
from kineto_trace.structure.event_arguments import has_column
from kineto_trace.structure.module_calls import LIGHTNING_MODULE, is_lightning, shown_names
from kineto_trace.structure.trace_forms import SPANNING, events_of, runtime_calls, spanning_tables
from kineto_trace.view_api.view import Answer, Compat

_HOST = ("cpu_op", "user_annotation", "gpu_user_annotation")  # operators and annotations
ROOT = -2  # the number of the plug-in's CallTreeRoot
_NO_STEPS = "without operators, the plug-in has no steps"


# Steps, roles and launches as the TensorBoard profiler plug-in sees them (its last version, of 2026).
#
# Theory of operation
# The plug-in identifies events by their category and ignores other categories (cuda_driver, cuda_sync, overhead, …).
# Here the rows of a table represent a category; runtime calls count if Kineto writes their category.
#
# It computes with the microseconds of the file as doubles, rounded to a nanosecond or so. Sums and comparisons of
# such doubles are exact; so are those of the integers here (`TickClock`), which are the same doubles times a power of
# two.
#
# Steps are all ranges called "ProfilerStep#N", on the GPU too; without any, the one step "0" is from the first
# start to the last end of operators. Then their ends move to the device (analysis/overview/step_breakdown.py).
# plugin_tree.py finds the call that launched a device event.


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


def plugin_launch_figures(context: Context) -> LaunchFigures:
    """Returns the launch figures for the plug-in: those stated in the file or, for our captures, in their export."""
    return context.get(launch_figures) if context.trace.head is None else stated_figures(context)


def plugin_mean_by_name(number: Ints, value: Floats, took: Floats, count: int) -> Floats:
    """Returns the plug-in's mean for kernels by name; unknown values are 0. It adds in numpy's order."""
    order = np.argsort(number, kind="stable")
    ends = np.cumsum(np.bincount(number, minlength=count))[:-1]
    weights = np.split(took[order], ends)
    products = np.split(np.nan_to_num(value[order]) * took[order], ends)
    wholes = [weight.sum() for weight in weights]
    return np.array([part.sum() / whole if whole else 0.0 for part, whole in zip(products, wholes, strict=True)])


def plugin_mean(number: Ints, value: Floats, took: Floats, count: int) -> Floats:
    """Returns the same for kernels by operator, which the plug-in adds one after the other."""
    summed = np.bincount(number, weights=np.nan_to_num(value) * took, minlength=count)
    whole = np.bincount(number, weights=took, minlength=count)
    mean: Floats = np.divide(summed, whole, out=np.zeros(count), where=whole > 0)
    return mean


def plugin_means(mean: Mean, figures: LaunchFigures) -> tuple[Mean, Mean]:
    """Returns the means of blocks per multiprocessor and of occupancy. A figure that no kernel has stays unknown."""
    blocks, occupancy = (figures.blocks_per_sm > 0).any(), (figures.occupancy >= 0).any()
    return mean if blocks else known_mean, mean if occupancy else known_mean


def plugin_kernel_ops(context: Context) -> tuple[Ints, Ints, Floats]:
    """Returns rows of the table `kernel` in the plug-in's order of visits, with the number of a name, and µs.

    The name is that of the node with the kernel's call, by external ids. ROOT: kernels whose call has the external id 0
    in a thread that has nodes, and, once for every thread that has steps, kernels without a call. All others are
    missing: calls without an operator of their external id.
    """
    launched, tree, found = context.get(launches), context.get(plugin_tree), context.get(nodes)
    kernel = np.flatnonzero(launched.kind == KERNEL)
    node = tree.activity[kernel]
    owned = np.flatnonzero(node >= 0)
    moved = context.get(plugin_backward)
    times = moved.visits[node[owned]]
    rows = [np.repeat(launched.row[kernel[owned]], times)]
    names = [np.repeat(tree.name[node[owned]].astype(np.int64), times)]
    left = np.bincount(tree.track[tree.parent == NOTHING], minlength=int(tree.track.max(initial=-1)) + 1)
    left -= np.bincount(tree.track[moved.removed[tree.parent[moved.removed] == NOTHING]], minlength=len(left))
    if len(left):
        left[moved.main] += np.count_nonzero(moved.host == NOTHING)
    zero = (launched.external == 0) & np.isin(launched.thread, tree.thread[left[tree.track] > 0])
    call = launched.call[kernel]
    at_root = np.flatnonzero(np.append(zero, False)[call])
    lost = np.flatnonzero(call == NOTHING)
    steps = np.array([text.startswith(STEP_PREFIX) for text in context.trace.strings], np.bool_)
    threads = len(unique_values(found.thread[steps[found.name]]))
    for chosen in (at_root, *[lost] * threads):
        rows.append(launched.row[kernel[chosen]])
        names.append(np.full(len(chosen), ROOT, np.int64))
    row = np.concatenate(rows)
    return row, np.concatenate(names), launched.device_duration[kernel][row]


def plugin_tensor_use(context: Context) -> TensorUse:
    """Returns the figures by the plug-in's names and operator tree; kernels count as often as it visits their node."""
    table, tree, launched = context.trace.table("kernel"), context.get(plugin_tree), context.get(launches)
    took = table["duration"].astype(np.float64)
    uses = context.get(plugin_tensor_names)[table["name"]]
    kernel = launched.kind == KERNEL
    node = tree.activity[kernel]
    owned = np.flatnonzero(node >= 0)
    visits = context.get(plugin_backward).visits[node[owned]]
    weighted = launched.device_duration[kernel][owned] * visits
    is_op = tree.operator[node[owned]]
    deepest = _deepest(context)
    devices, device = np.unique(table["device"], return_inverse=True)
    whole = np.bincount(device[owned], weights=weighted * is_op, minlength=len(devices))
    tensor = np.bincount(device[owned], weights=weighted * (is_op & uses[owned]), minlength=len(devices))
    counted = bool((is_op & (visits > 0)).any())
    shown = len(context.get(plugin_roles)[0].start) > 0  # without computing kernels there is no kernel view
    return TensorUse(
        kernel_share=share_of(took[uses].sum(), took.sum(), 0.0) if shown else NAN,
        by_device={
            number: share_of(part, of_device, 0.0)
            for number, part, of_device in zip(devices.tolist(), tensor, whole, strict=True)
            if counted
        },
        eligible_share=share_of(weighted[deepest[node[owned]]].sum(), whole.sum(), 0.0),
    )


def _deepest(context: Context) -> Flags:
    """Returns which eligible nodes have no eligible one inside; backward operators count at their new places."""
    tree, moved = context.get(plugin_tree), context.get(plugin_backward)
    inside = tree.below(tree.eligible)
    eligible = tree.eligible.astype(np.int64)
    top = outermost(moved.parent)
    of_top = np.bincount(top[moved.below], weights=inside[moved.roots], minlength=len(moved.module))[moved.hung]
    hosted = (of_top > 0) & (moved.host >= 0)
    np.add.at(eligible, moved.host[hosted], 1)
    found: Flags = tree.eligible & (tree.below(eligible) == 1)
    return found


def plugin_gpu_figures(context: Context) -> list[GpuFigures]:
    """Returns the figures of every GPU with a kernel, over the plug-in's steps, with properties by place in the list.

    In a trace without operators, and so without steps, the plug-in reports all GPUs as idle.
    """
    basis = FigureBasis(
        span=context.get(plugin_steps).span(),
        times=context.get(plugin_clock).times,
        kernel_rows=context.get(plugin_kernel_rows),
        launches=context.get(plugin_launch_figures),
        efficiency=plugin_sm_efficiency,
        tensor_cores=context.get(plugin_tensor_use).by_device,
        properties=dict(enumerate(context.trace.devices)),
    )
    return [figures_of(context, device, basis) for device in sorted(basis.kernel_rows)]


def plugin_kernel_rows(context: Context) -> dict[int, Ints]:
    """Returns the rows of the table `kernel` of each GPU, by start, without kernels that do not state their GPU."""
    told = has_column(context.trace.table("kernel"), "device")
    found = {device: rows[told[rows]] for device, rows in context.get(kernel_rows).items()}
    return {device: rows for device, rows in found.items() if len(rows)}


def plugin_sm_efficiency(blocks_per_sm: Floats, start: Ints, end: Ints) -> TimeCourse:
    """Returns gpu_utilization.sm_efficiency as the plug-in computes it; kernels are added by their starts.

    It adds and subtracts doubles, so that a rounding error may remain after the last kernel: then the time until the
    next one is a span as well.
    """
    known = blocks_per_sm > 0
    start, end, value = start[known], end[known], blocks_per_sm[known]
    ending = np.tile([0, 1], len(start))
    time = np.stack([start, end], axis=1).reshape(-1)
    order = np.lexsort((ending, time))
    time = time[order]
    total = np.cumsum(np.stack([value, -value], axis=1).reshape(-1)[order])
    lasting = np.flatnonzero((np.diff(time) > 0) & (total[:-1] > 0))
    return TimeCourse(time[lasting], time[lasting + 1], np.minimum(total[lasting], 1.0))


def rounded(values: Floats, digits: int) -> Floats:
    """Rounds each value to that many decimal places; NaN stays. Slow (value by value): for short columns."""
    return np.array([round(value, digits) for value in values.tolist()], np.float64)


@kernels.variant(Compat.PLUGIN)
def plugin_kernels(context: Context) -> Answer:
    """compat=plugin: the plug-in's list of names decides which kernels use tensor cores; unknown launch figures are 0.

    Times are in whole µs, and launch figures have two digits.
    """
    table, figures = context.trace.table("kernel"), context.get(plugin_launch_figures)
    start, took = file_times(table, base_ns(context.trace))
    rows = np.lexsort((table.origin.get("place", np.arange(len(table))), start))  # it adds in the order of starts
    means = plugin_means(plugin_mean_by_name, figures)
    found = kernel_groups([table["name"][rows]], rows, took[rows], figures, means)
    answer = kernel_columns(context, found, context.get(plugin_tensor_names))
    return _rounded(answer, whole=("total_us", "mean_us", "max_us", "min_us"))


@kernels_by_op.variant(Compat.PLUGIN)
def plugin_kernels_by_op(context: Context) -> Answer:
    """compat=plugin: the operator is the one with the external id of the call.

    It is "CallTreeRoot" for the id 0 and for kernels without a call. Kernels whose call belongs to no operator are left
    out, and the name alone decides about eligibility. Mean times are in whole µs, and launch figures have two digits.
    """
    table, figures, texts = context.trace.table("kernel"), context.get(plugin_launch_figures), context.get(shown_names)
    rows, op, took = plugin_kernel_ops(context)
    first = {text: number for number, text in reversed(list(enumerate(texts)))}  # of equal names
    op = np.append(np.array([first[text] for text in texts], np.int64), [ROOT, -1])[op]
    stated = [has_column(table, key) for key in SHAPES]
    keys = [table["name"][rows], op, *(table[column][rows] for column in PROPERTIES), *(each[rows] for each in stated)]
    found = kernel_groups(keys, rows, took, figures, plugin_means(plugin_mean, figures))
    first_op = op[found.groups.first][found.order]
    ops = ["CallTreeRoot" if number == ROOT else texts[number] for number in first_op.tolist()]
    eligible = np.append(context.get(plugin_eligible_names), [False, False])[first_op]  # -2 and -1: none
    answer = op_columns(context, found, ops, eligible, context.get(plugin_tensor_names))
    shapes = {
        key: np.where(each[found.first], np.array(answer.values[key], object), "None")
        for key, each in zip(SHAPES, stated, strict=True)
    }
    return _rounded(Answer({**answer.values, **shapes}, answer.notes), whole=("mean_us",))


@tensor_core_use.variant(Compat.PLUGIN)
def plugin_tensor_core_use(context: Context) -> Answer:
    """compat=plugin: the plug-in's lists of names decide, and kernels belong to operators by external ids.

    Only kernels that an eligible operator launched itself count.
    """
    return share_columns(context, context.get(plugin_tensor_use))


def _rounded(answer: Answer, *, whole: Collection[str]) -> Answer:
    """Returns the answer with launch figures of two digits, and with these columns in whole numbers."""
    values = answer.values
    figures = {name: rounded(values[name], 2) for name in ("blocks_per_sm", "occupancy_pct")}
    return Answer({**values, **figures, **{name: np.round(values[name]) for name in whole}}, answer.notes)


@step_breakdown.variant(Compat.PLUGIN)
def plugin_step_breakdown(context: Context) -> Answer:
    """compat=plugin: steps end on the device, whatever `step_ends` says, and percentages have two digits.

    GPU ranges can be steps and cpu_exec, only ten collectives are communication, and driver calls do not count. Once
    the roles so far fill all steps, the next role counts in full, so that rows may sum to more than the step.
    """
    return _rounded_shares(step_columns(context.get(plugin_breakdown), _NO_STEPS))


@gpu_summary.variant(Compat.PLUGIN)
def plugin_gpu_summary(context: Context) -> Answer:
    """compat=plugin: the figures use the plug-in's steps and its list of kernel names.

    Only kernels that it can attribute to an operator count for tensor cores. Percentages have two digits.
    """
    return _rounded_shares(gpu_columns(context.get(plugin_gpu_figures)))


@overview.variant(Compat.PLUGIN)
def plugin_overview(context: Context) -> Answer:
    """compat=plugin: the figures of the underlying views with compat=plugin."""
    gpus, use = context.get(plugin_gpu_figures), context.get(plugin_tensor_use)
    return _rounded_shares(overview_columns(context.get(plugin_breakdown), gpus, use, _NO_STEPS))


def _rounded_shares(answer: Answer) -> Answer:
    """Returns the answer with percentages of two digits."""
    values = {
        name: rounded(column, 2) if name.endswith("_pct") and len(column) else column
        for name, column in answer.values.items()
    }
    return Answer(values, answer.notes)


@gpu_utilization.variant(Compat.PLUGIN)
def plugin_gpu_utilization(context: Context) -> Answer:
    """compat=plugin: the same figures apart from the precision of the times."""
    clock, (low, high) = context.get(plugin_clock), profiler_span(context)
    start, end = clock.times(context.trace.table("kernel"))
    return utilization_columns(
        {
            device: _stretches(utilization_course(union(start[rows], end[rows]), low, high, clock.per_us), clock)
            for device, rows in context.get(plugin_kernel_rows).items()
        }
    )


@sm_efficiency.variant(Compat.PLUGIN)
def plugin_efficiency(context: Context) -> Answer:
    """compat=plugin: only launch figures that the file states count.

    A few more rows of about 0 % appear between kernels, because the plug-in adds with doubles.
    """
    clock, blocks = context.get(plugin_clock), context.get(plugin_launch_figures).blocks_per_sm
    start, end = clock.times(context.trace.table("kernel"))
    return efficiency_columns(
        {
            device: _stretches(plugin_sm_efficiency(blocks[rows], start[rows], end[rows]), clock)
            for device, rows in context.get(plugin_kernel_rows).items()
        }
    )


def _stretches(course: TimeCourse, clock: TickClock) -> ShareSpans:
    return ShareSpans(clock.unix_ns(course.start), clock.us(course.end - course.start), course.value)


@recommendations.variant(Compat.PLUGIN)
def plugin_recommendations(context: Context) -> Answer:
    """compat=plugin: the plug-in's breakdown, utilization and kernel names.

    Only the first GPU is checked for tensor cores, and of several devices with too much memory the first one is
    reported.
    """
    return recommendation_columns(_facts(context))


def _facts(context: Context) -> RecommendationFacts:
    """Returns the plug-in's figures. Properties are taken by place in the file's list, also from its end (CPUs have
    -1).
    """
    trace, use = context.trace, context.get(plugin_tensor_use)
    numbers = unique_values(np.concatenate([table["name"] for table in host_tables(context)]))
    names = frozenset(trace.strings[number] for number in numbers.tolist())
    devices = trace.devices
    capable = bool(devices) and major_capability(devices[0]) >= TENSOR_CORE_CAPABILITY
    unused = len(trace.table("kernel")) > 0 and use.kernel_share == 0
    full = [
        (device, peak, memory)
        for (_, device), peak in context.get(peaks_of_devices).items()
        if -len(devices) <= device < len(devices)
        and (memory := global_memory(devices[device])) is not None
        and is_full(peak, memory)
    ]
    return RecommendationFacts(
        steps=context.get(plugin_breakdown),
        gpus=context.get(plugin_gpu_figures),
        use=use,
        names=names,
        used_devices=len(used_processes(context)),
        capabilities=capabilities(dict(enumerate(devices))),
        uses_nccl=any(name.startswith("nccl:") for name in names & COLLECTIVES),
        tensor_devices=[0] if capable and unused else [],
        peaks=full[:1],
    )
