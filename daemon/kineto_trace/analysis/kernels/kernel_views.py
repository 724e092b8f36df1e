"""The views of kernels: by name, by properties and operator, and how much of their time uses tensor cores."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.host_time.op_times import tensor_times
from kineto_trace.analysis.kernels.kernel_groups import (
    PROPERTIES,
    KernelGroups,
    captured_kernels,
    kernel_groups,
    kernel_ops,
    kernel_owners,
)
from kineto_trace.analysis.kernels.launch_occupancy import launch_figures
from kineto_trace.analysis.kernels.tensor_core_use import TensorUse, tensor_use
from kineto_trace.kernel_traits.tensor_cores import eligible_op_names, names_tell, uses_tensor_cores
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Table
from kineto_trace.structure.event_arguments import has_column
from kineto_trace.structure.gpu_devices import device_properties, gpu_vendor, vendor_words
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

Flags = npt.NDArray[np.bool_]

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
SHAPES = ("grid", "block")
_NO_KERNELS = "the trace has no kernels"
_NO_PROPERTIES = "blocks per multiprocessor and occupancy are unknown: the trace has no properties of its GPUs"
_NO_FIGURES = (
    "blocks per {multiprocessor} and occupancy are unknown: the trace does not state the launch shapes of its kernels, "
    "or the rules of these GPUs are not known"
)
_NO_OCCUPANCY = "occupancy is unknown: the trace does not state the registers of its kernels"


@view(
    "kernels",
    columns(
        ("name", "text", "", "name of the kernel"),
        ("tensor_cores", "bool", "", "whether it uses tensor cores, judged by its name; missing if that does not tell"),
        *_FIGURES,  # type: ignore[arg-type]
    ),
)
def kernels(context: Context) -> Answer:
    """The kernels by name, those with the most time first. Copies and fills are not kernels.

    Blocks per multiprocessor and occupancy are means weighted by duration, over the launches whose figures are known.
    """
    table = context.trace.table("kernel")
    took = table["duration"] / 1000
    found = kernel_groups([table["name"]], np.arange(len(table)), took, context.get(launch_figures))
    return kernel_columns(context, found, context.get(uses_tensor_cores))


def kernel_columns(context: Context, found: KernelGroups, uses: Flags) -> Answer:
    """The columns of the view kernels. uses: for each string whether a kernel of that name uses tensor cores."""
    name = context.trace.table("kernel")["name"][found.first]
    values = {
        "name": [context.trace.strings[number] for number in name.tolist()],
        "tensor_cores": _told(context, uses[name]),
        **_figures(context, found),
    }
    return Answer(values, _notes(context, found))


@view(
    "kernels_by_op",
    columns(
        ("name", "text", "", "name of the kernel"),
        ("op", "text", "", "operator that launched or captured it; missing if that happened outside of operators"),
        ("grid", "text", "", "blocks in x, y and z; missing if it was not recorded"),
        ("block", "text", "", "threads of a block in x, y and z; missing if it was not recorded"),
        ("registers", "int", "", "registers per thread; missing if they were not recorded"),
        ("shared_memory_bytes", "int", "bytes", "shared memory per block; missing if it was not recorded"),
        ("tensor_cores", "bool", "", "whether the kernel uses tensor cores, judged by its name"),
        ("op_eligible", "bool", "", "whether the operator could use tensor cores"),
        *_FIGURES,  # type: ignore[arg-type]
    ),
)
def kernels_by_op(context: Context) -> Answer:
    """The kernels by name, operator and launch properties, those with the most time first.

    The operator is the innermost one around the call that launched the kernel, on its thread; without one, the
    innermost annotation. Kernels of a CUDA graph belong to the operator that captured them, if the agent saw that, and
    else to the one around the launch of the graph. An operator is eligible for tensor cores if its name is in a list,
    or if it or an operator inside it used them.
    """
    table, owner, names = context.trace.table("kernel"), context.get(kernel_owners), context.trace.strings
    keys = [table["name"], owner, *(table[column] for column in PROPERTIES)]
    found = kernel_groups(keys, np.arange(len(table)), table["duration"] / 1000, context.get(launch_figures))
    possible = np.append(context.get(tensor_times).eligible, False)[kernel_ops(context)]
    captured = captured_kernels(context)
    possible[captured] = context.get(eligible_op_names)[owner[captured]]
    eligible = np.bincount(found.groups.number, weights=possible, minlength=len(found.first))[found.order] > 0
    ops = [names[number] if number >= 0 else None for number in owner[found.first].tolist()]
    answer = op_columns(context, found, ops, eligible, context.get(uses_tensor_cores))
    return Answer({**answer.values, **_recorded(table.take(found.first), answer.values)}, answer.notes)


def _recorded(table: Table, values: Mapping[str, Any]) -> dict[str, Any]:
    """The launch's properties where they were recorded: no kernel has 0 blocks, threads or registers."""
    registers = has_column(table, "registers per thread") & (table["registers"] > 0)
    shown = {"registers": registers, "shared_memory_bytes": has_column(table, "shared memory")}
    shown |= {key: has_column(table, key) & (table[f"{key}_x"] > 0) for key in SHAPES}
    nothing = np.full(len(table), None, object)
    return {key: np.where(known, np.array(values[key], object), nothing) for key, known in shown.items()}


def op_columns(
    context: Context, found: KernelGroups, ops: Sequence[str | None], eligible: Flags, uses: Flags
) -> Answer:
    """The columns of the view kernels_by_op. ops, eligible: of each group; uses: as of kernel_columns."""
    table = context.trace.table("kernel").take(found.first)
    values = {
        "name": [context.trace.strings[number] for number in table["name"].tolist()],
        "op": ops,
        **{key: _triples(table, key) for key in SHAPES},
        "registers": table["registers"],
        "shared_memory_bytes": sum(table[f"{kind}_shared_memory"].astype(np.int64) for kind in ("static", "dynamic")),
        "tensor_cores": _told(context, uses[table["name"]]),
        "op_eligible": eligible,
        **_figures(context, found),
    }
    return Answer(values, _notes(context, found))


def _told(context: Context, uses: Flags) -> Any:
    """Whether kernels use tensor cores; None where names do not tell on these GPUs."""
    return uses if names_tell(context.get(gpu_vendor)) else [True if each else None for each in uses.tolist()]


def _figures(context: Context, found: KernelGroups) -> dict[str, npt.NDArray[Any]]:
    """The columns of _FIGURES."""
    whole = float(context.trace.table("kernel")["duration"].sum()) / 1000
    return {
        "calls": found.calls,
        "total_us": found.total,
        "mean_us": found.total / np.maximum(found.calls, 1),
        "max_us": found.longest,
        "min_us": found.shortest,
        "blocks_per_sm": found.blocks_per_sm,
        "occupancy_pct": found.occupancy,
        "share_pct": 100 * found.total / whole if whole else np.zeros(len(found.total)),
    }


def _triples(table: Table, key: str) -> list[str]:
    axes = [table[f"{key}_{axis}"].tolist() for axis in "xyz"]
    return [f"[{x}, {y}, {z}]" for x, y, z in zip(*axes, strict=True)]


def _notes(context: Context, found: KernelGroups) -> list[str]:
    if not len(found.first):
        return [_NO_KERNELS]
    if np.isnan(found.blocks_per_sm).all():
        if not context.get(device_properties):
            return [_NO_PROPERTIES]
        return [_NO_FIGURES.format(multiprocessor=vendor_words(context).multiprocessor)]
    return [_NO_OCCUPANCY] if np.isnan(found.occupancy).all() else []


@view(
    "tensor_core_use",
    columns(
        ("figure", "text", "", "what the share refers to"),
        ("used_pct", "float", "%", "share that uses tensor cores, or could use them"),
        ("not_used_pct", "float", "%", "remaining share"),
    ),
)
def tensor_core_use(context: Context) -> Answer:
    """How much of the kernels' time uses tensor cores, and how much of it could.

    "kernels" is the share of all kernels' time spent in kernels that use tensor cores, recognized by name. "eligible
    operators" is the share of all operators' kernel time spent in operators that could use them: the deepest ones in a
    list of matrix multiplications, convolutions, attention and similar operators, and the operators inside these.
    """
    return share_columns(context, context.get(tensor_use))


def share_columns(context: Context, use: TensorUse) -> Answer:
    """The columns of the view tensor_core_use."""
    shares = 100 * np.array([use.kernel_share, use.eligible_share])
    return Answer(
        {"figure": ["kernels", "eligible operators"], "used_pct": shares, "not_used_pct": 100 - shares},
        [] if len(context.trace.table("kernel")) else [_NO_KERNELS],
    )
