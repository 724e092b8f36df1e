"""The TensorBoard plug-in's overview and recommendations."""

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
from kineto_trace.analysis.overview.gpu_figures import TimeCourse, global_memory, peaks_of_devices, utilization_course
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
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.intervals import union
from kineto_trace.compat.plugin_kernels import (
    plugin_gpu_figures,
    plugin_kernel_rows,
    plugin_launch_figures,
    plugin_sm_efficiency,
    plugin_tensor_use,
    rounded,
)
from kineto_trace.compat.plugin_steps import (
    TickClock,
    host_tables,
    plugin_breakdown,
    plugin_clock,
    profiler_span,
    used_processes,
)
from kineto_trace.compat.plugin_tree import COLLECTIVES
from kineto_trace.model.context import Context
from kineto_trace.view_api.view import Answer, Compat

_NO_STEPS = "the plug-in has no steps without operators"


@step_breakdown.variant(Compat.PLUGIN)
def plugin_step_breakdown(context: Context) -> Answer:
    """compat=plugin: steps end on the device, whatever `step_ends` says, and percentages have two digits.

    GPU ranges can be steps and cpu_exec, only ten collectives are communication, and driver calls do not count. Once
    the roles so far fill all steps, the next role counts in full, so that rows may sum to more than the step.
    """
    return _rounded(step_columns(context.get(plugin_breakdown), _NO_STEPS))


@gpu_summary.variant(Compat.PLUGIN)
def plugin_gpu_summary(context: Context) -> Answer:
    """compat=plugin: the figures use the plug-in's steps and its list of kernel names.

    Only kernels that it can attribute to an operator count for tensor cores. Percentages have two digits.
    """
    return _rounded(gpu_columns(context.get(plugin_gpu_figures)))


@overview.variant(Compat.PLUGIN)
def plugin_overview(context: Context) -> Answer:
    """compat=plugin: the figures are those of these views with compat=plugin."""
    gpus, use = context.get(plugin_gpu_figures), context.get(plugin_tensor_use)
    return _rounded(overview_columns(context.get(plugin_breakdown), gpus, use, _NO_STEPS))


def _rounded(answer: Answer) -> Answer:
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
