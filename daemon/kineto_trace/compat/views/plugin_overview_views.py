"""The plug-in's overview in the views step_breakdown, gpu_summary, overview, gpu_utilization and sm_efficiency."""

from kineto_trace.analysis.overview.gpu_utilization import Course, utilization_course
from kineto_trace.analysis.overview.overview_views import (
    Stretches,
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
from kineto_trace.arrays.intervals import union
from kineto_trace.compat.tensorboard.plugin_gpus import plugin_gpu_figures, plugin_kernel_rows, plugin_sm_efficiency
from kineto_trace.compat.tensorboard.plugin_kernels import plugin_launch_figures, plugin_tensor_use
from kineto_trace.compat.tensorboard.plugin_rounding import rounded
from kineto_trace.compat.tensorboard.plugin_steps import TickClock, plugin_breakdown, plugin_clock, profiler_span
from kineto_trace.model.context import Context
from kineto_trace.view_api.view import Answer, Compat

_NO_STEPS = "the plug-in has no steps without operators"


@step_breakdown.variant(Compat.PLUGIN)
def plugin_step_breakdown(context: Context) -> Answer:
    """compat=plugin: steps end on the device, whatever `step_ends` says, and percentages have two digits.

    GPU ranges can be steps and cpu_exec, only ten collectives are communication, and driver calls do not count. Once
    the roles so far fill all steps, the next role counts as a whole, so that rows may sum to more than the step.
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
    """The same with percentages of two digits."""
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


def _stretches(course: Course, clock: TickClock) -> Stretches:
    return Stretches(clock.unix_ns(course.start), clock.us(course.end - course.start), course.value)
