"""The plug-in's module view, and its Lightning view, in the view modules."""

from kineto_trace.analysis.host_time.module_views import SEPARATOR, modules
from kineto_trace.compat.tensorboard.plugin_modules import plugin_modules
from kineto_trace.model.context import Context
from kineto_trace.structure.module_calls import NO_MODULES
from kineto_trace.view_api.view import Answer, Compat


@modules.variant(Compat.PLUGIN)
def plugin_module_rows(context: Context) -> Answer:
    """compat=plugin: the module view of the TensorBoard profiler plug-in, for PyTorch Lightning its Lightning view.

    Every row has the figures of all calls of the module, wherever it was called from. Device time counts only where
    external ids lead to operators. There are no backward figures.
    """
    rows = context.get(plugin_modules)
    missing = [None] * len(rows)
    return Answer(
        {
            "path": [SEPARATOR.join(row.names) for row in rows],
            "name": [row.names[-1] for row in rows],
            "module_id": [row.module for row in rows],
            "depth": [len(row.names) - 1 for row in rows],
            "occurrences": [row.figures.occurrences for row in rows],
            "operators": [row.figures.operators for row in rows],
            "host_total_us": [row.figures.host_total for row in rows],
            "host_self_us": [row.figures.host_self for row in rows],
            "host_overhead_us": [row.figures.host_self for row in rows],
            "device_total_us": [row.figures.device_total for row in rows],
            "device_self_us": [row.figures.device_self for row in rows],
            "backward_host_us": missing,
            "backward_device_us": missing,
        },
        [] if rows or not len(context.trace.table("cpu_op")) else [NO_MODULES],
    )
