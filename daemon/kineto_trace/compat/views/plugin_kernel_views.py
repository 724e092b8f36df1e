"""The plug-in's kernel view in the views kernels, kernels_by_op and tensor_core_use."""

from collections.abc import Collection

import numpy as np

from kineto_trace.analysis.kernels.kernel_groups import PROPERTIES, kernel_groups
from kineto_trace.analysis.kernels.kernel_views import (
    SHAPES,
    kernel_columns,
    kernels,
    kernels_by_op,
    op_columns,
    share_columns,
    tensor_core_use,
)
from kineto_trace.compat.tensorboard.plugin_kernels import (
    ROOT,
    plugin_kernel_ops,
    plugin_launch_figures,
    plugin_mean,
    plugin_mean_by_name,
    plugin_means,
    plugin_tensor_use,
)
from kineto_trace.compat.tensorboard.plugin_nodes import base_ns, file_times
from kineto_trace.compat.tensorboard.plugin_rounding import rounded
from kineto_trace.compat.tensorboard.plugin_tensor_names import plugin_eligible_names, plugin_tensor_names
from kineto_trace.model.context import Context
from kineto_trace.structure.event_arguments import has_column
from kineto_trace.structure.module_calls import shown_names
from kineto_trace.view_api.view import Answer, Compat


@kernels.variant(Compat.PLUGIN)
def plugin_kernels(context: Context) -> Answer:
    """compat=plugin: the plug-in's list of names decides about tensor cores, and unknown launch figures count as 0.

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
    """compat=plugin: the plug-in's lists of names decide, and external ids lead from kernels to operators.

    Only what an eligible operator launched itself counts.
    """
    return share_columns(context, context.get(plugin_tensor_use))


def _rounded(answer: Answer, *, whole: Collection[str]) -> Answer:
    """The same with launch figures of two digits, and with these columns in whole numbers."""
    values = answer.values
    figures = {name: rounded(values[name], 2) for name in ("blocks_per_sm", "occupancy_pct")}
    return Answer({**values, **figures, **{name: np.round(values[name]) for name in whole}}, answer.notes)
