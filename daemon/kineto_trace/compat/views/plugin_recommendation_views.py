"""The plug-in's recommendations in the view recommendations."""

import numpy as np

from kineto_trace.analysis.findings.recommendation_views import (
    TENSOR_CORE_CAPABILITY,
    RecommendationFacts,
    capabilities,
    is_full,
    major_capability,
    recommendations,
    recommended,
)
from kineto_trace.analysis.overview.gpu_figures import global_memory, peaks_of_devices
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.compat.tensorboard.plugin_gpus import plugin_gpu_figures
from kineto_trace.compat.tensorboard.plugin_kernels import plugin_tensor_use
from kineto_trace.compat.tensorboard.plugin_nodes import COLLECTIVES
from kineto_trace.compat.tensorboard.plugin_steps import host_tables, plugin_breakdown, used_processes
from kineto_trace.model.context import Context
from kineto_trace.view_api.view import Answer, Compat


@recommendations.variant(Compat.PLUGIN)
def plugin_recommendations(context: Context) -> Answer:
    """compat=plugin: the plug-in's breakdown, utilization and kernel names.

    Only the first GPU is checked for tensor cores, and of several devices with too much memory the first one is
    reported.
    """
    return recommended(_facts(context))


def _facts(context: Context) -> RecommendationFacts:
    """The plug-in's figures. Properties are taken by place in the file's list, also from its end (CPUs have -1)."""
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
