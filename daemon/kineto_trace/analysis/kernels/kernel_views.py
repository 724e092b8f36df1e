"""The views of kernels: by name, by properties and operator, and how much of their time uses tensor cores."""

from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.host_time.op_times import tensor_times
from kineto_trace.analysis.kernels.kernel_groups import (
    PROPERTIES,
    ROOT,
    KernelGroups,
    kernel_groups,
    kernel_ops,
    kernel_owners,
    plugin_kernel_ops,
    plugin_mean,
    plugin_mean_by_name,
)
from kineto_trace.analysis.kernels.tensor_core_use import plugin_tensor_use, tensor_use
from kineto_trace.compat.tensorboard.plugin_nodes import base_ns, file_times
from kineto_trace.compat.tensorboard.plugin_rounding import rounded
from kineto_trace.compat.tensorboard.plugin_tensor_names import plugin_eligible_names, plugin_tensor_names
from kineto_trace.kernel_traits.tensor_cores import uses_tensor_cores
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Table
from kineto_trace.structure.event_arguments import has_column
from kineto_trace.structure.module_calls import shown_names
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, Compat, view

_FIGURES = (
    ("calls", "int", "", "number of runs"),
    ("total_us", "float", "us", "sum of its durations"),
    ("mean_us", "float", "us", "mean duration"),
    ("max_us", "float", "us", "longest duration"),
    ("min_us", "float", "us", "shortest duration"),
    ("blocks_per_sm", "float", "", "blocks per multiprocessor, mean over launches weighted by duration"),
    ("occupancy_pct", "float", "%", "estimated achieved occupancy, mean weighted by duration"),
    ("share_pct", "float", "%", "share of all kernels' time"),
)
_SHAPES = ("grid", "block")
_NO_KERNELS = "the trace has no kernels"
_NO_FIGURES = "blocks per multiprocessor and occupancy are unknown: the trace has no properties of its GPUs"


@view(
    "kernels",
    columns(
        ("name", "text", "", "name of the kernel"),
        ("tensor_cores", "bool", "", "whether it uses tensor cores, judged by its name"),
        *_FIGURES,  # type: ignore[arg-type]
    ),
    compat=(Compat.PLUGIN,),
)
def kernels(context: Context, *, compat: Compat = Compat.NONE) -> Answer:
    """The kernels by name, those with the most time first. Copies and fills are not kernels.

    Blocks per multiprocessor and occupancy are means weighted by duration, over the launches whose figures are known.

    compat=plugin: the plug-in's list of names decides about tensor cores, unknown launch figures count as 0, times are
    in whole µs, and launch figures have two digits.
    """
    table = context.trace.table("kernel")
    plugin = compat is Compat.PLUGIN
    rows, took = np.arange(len(table)), table["duration"] / 1000
    if plugin:  # it adds in the order of starts
        start, took = file_times(table, base_ns(context.trace))
        rows = np.lexsort((table.origin.get("place", rows), start))
        took = took[rows]
    found = kernel_groups(context, [table["name"][rows]], rows, took, plugin_mean_by_name if plugin else None)
    uses = context.get(plugin_tensor_names if plugin else uses_tensor_cores)
    name = table["name"][found.first]
    values = {
        "name": [context.trace.strings[number] for number in name.tolist()],
        "tensor_cores": uses[name],
        **_figures(context, found, plugin),
    }
    if plugin:
        for column in ("total_us", "max_us", "min_us"):
            values[column] = np.round(values[column])
    return Answer(values, _notes(found))


@view(
    "kernels_by_op",
    columns(
        ("name", "text", "", "name of the kernel"),
        ("op", "text", "", "operator that launched it; missing if it was launched outside of operators"),
        ("grid", "text", "", "blocks in x, y and z"),
        ("block", "text", "", "threads of a block in x, y and z"),
        ("registers", "int", "", "registers per thread"),
        ("shared_memory_bytes", "int", "bytes", "shared memory per block"),
        ("tensor_cores", "bool", "", "whether the kernel uses tensor cores, judged by its name"),
        ("op_eligible", "bool", "", "whether the operator could use tensor cores"),
        *_FIGURES,  # type: ignore[arg-type]
    ),
    compat=(Compat.PLUGIN,),
)
def kernels_by_op(context: Context, *, compat: Compat = Compat.NONE) -> Answer:
    """The kernels by name, operator and launch properties, those with the most time first.

    The operator is the innermost one around the call that launched the kernel, on its thread; without one, the
    innermost annotation. Kernels of a CUDA graph belong to the operator around the launch of the graph. An operator is
    eligible for tensor cores if its name is in a list, or if it or an operator inside it used them.

    compat=plugin: the operator is the one with the external id of the call ("CallTreeRoot" for the id 0 and for kernels
    without a call), kernels whose call belongs to no operator are left out, and the name alone decides about
    eligibility. Mean times are in whole µs, and launch figures have two digits.
    """
    table = context.trace.table("kernel")
    plugin = compat is Compat.PLUGIN
    if plugin:
        rows, op, took = plugin_kernel_ops(context)
        texts = context.get(shown_names)
        first = {text: number for number, text in reversed(list(enumerate(texts)))}  # of equal names
        op = np.append(np.array([first[text] for text in texts], np.int64), [ROOT, -1])[op]
    else:
        rows, launched_by, took = np.arange(len(table)), kernel_ops(context), table["duration"] / 1000
        op = context.get(kernel_owners)
    keys = [table["name"][rows], op, *(table[column][rows] for column in PROPERTIES)]
    if plugin:
        keys += [has_column(table, key)[rows] for key in _SHAPES]
    found = kernel_groups(context, keys, rows, took, plugin_mean if plugin else None)
    first_op = op[found.groups.first][found.order]
    name = table["name"][found.first]
    uses = context.get(plugin_tensor_names if plugin else uses_tensor_cores)
    if plugin:
        by_name = np.append(context.get(plugin_eligible_names), [False, False])  # -2 and -1: none
        eligible = by_name[first_op]
    else:
        possible = np.append(context.get(tensor_times).eligible, False)[launched_by]
        eligible = np.bincount(found.groups.number, weights=possible, minlength=len(found.first))[found.order] > 0
    names = context.trace.strings
    texts = context.get(shown_names) if plugin else tuple(names)
    values = {
        "name": [names[number] for number in name.tolist()],
        "op": [
            "CallTreeRoot" if number == ROOT else texts[number] if number >= 0 else None for number in first_op.tolist()
        ],
        **{key: _triples(table, key, found, plugin) for key in _SHAPES},
        "registers": table["registers"][found.first],
        "shared_memory_bytes": sum(
            table[f"{kind}_shared_memory"][found.first].astype(np.int64) for kind in ("static", "dynamic")
        ),
        "tensor_cores": uses[name],
        "op_eligible": eligible,
        **_figures(context, found, plugin),
    }
    return Answer(values, _notes(found))


def _figures(context: Context, found: KernelGroups, plugin: bool) -> dict[str, npt.NDArray[Any]]:
    """The columns of _FIGURES. plugin: the mean duration is rounded, and so are the launch figures."""
    whole = float(context.trace.table("kernel")["duration"].sum()) / 1000
    mean = found.total / np.maximum(found.calls, 1)
    return {
        "calls": found.calls,
        "total_us": found.total,
        "mean_us": np.round(mean) if plugin else mean,
        "max_us": found.longest,
        "min_us": found.shortest,
        "blocks_per_sm": rounded(found.blocks_per_sm, 2) if plugin else found.blocks_per_sm,
        "occupancy_pct": rounded(found.occupancy, 2) if plugin else found.occupancy,
        "share_pct": 100 * found.total / whole if whole else np.zeros(len(found.total)),
    }


def _triples(table: Table, key: str, found: KernelGroups, plugin: bool) -> list[str]:
    """plugin: "None" where the file does not say it."""
    columns_of = [table[f"{key}_{axis}"][found.first].tolist() for axis in "xyz"]
    told = has_column(table, key)[found.first].tolist() if plugin else [True] * len(found.first)
    return [f"[{x}, {y}, {z}]" if known else "None" for x, y, z, known in zip(*columns_of, told, strict=True)]


def _notes(found: KernelGroups) -> list[str]:
    if not len(found.first):
        return [_NO_KERNELS]
    return [_NO_FIGURES] if np.isnan(found.blocks_per_sm).all() else []


@view(
    "tensor_core_use",
    columns(
        ("figure", "text", "", "what the share refers to"),
        ("used_pct", "float", "%", "share that uses tensor cores, or could use them"),
        ("not_used_pct", "float", "%", "remaining share"),
    ),
    compat=(Compat.PLUGIN,),
)
def tensor_core_use(context: Context, *, compat: Compat = Compat.NONE) -> Answer:
    """How much of the kernels' time uses tensor cores, and how much of it could.

    "kernels" is the share of all kernels' time spent in kernels that use tensor cores, recognized by name. "eligible
    operators" is the share of all operators' kernel time spent in operators that could use them: the deepest ones in a
    list of matrix multiplications, convolutions, attention and similar operators, and the operators inside these.

    compat=plugin: the plug-in's lists of names, kernels by external ids, and only what an eligible operator launched
    itself.
    """
    use = context.get(plugin_tensor_use if compat is Compat.PLUGIN else tensor_use)
    shares = 100 * np.array([use.kernel_share, use.eligible_share])
    return Answer(
        {"figure": ["kernels", "eligible operators"], "used_pct": shares, "not_used_pct": 100 - shares},
        [] if len(context.trace.table("kernel")) else [_NO_KERNELS],
    )
