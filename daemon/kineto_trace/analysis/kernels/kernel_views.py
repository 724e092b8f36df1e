"""Kernels by name, operator, sequence and HLO instruction."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kineto_trace.analysis.host_time.operator_views import tensor_times
from kineto_trace.analysis.kernels.precision_views import LaunchFigures, TensorUse, launch_figures, tensor_use
from kineto_trace.arrays.row_groups import Groups, group, group_sequences, sums
from kineto_trace.base.array_types import NOTHING, AnyArray, Flags, Floats, Ints, Ints32
from kineto_trace.decode.hlo_modules import KEYS
from kineto_trace.kernel_traits.precisions import eligible_op_names, names_tell, uses_tensor_cores
from kineto_trace.model.context import Context
from kineto_trace.model.trace import NO_STRING, Table
from kineto_trace.structure.activity_links import (
    KERNEL,
    calls,
    captured_ops,
    device_properties,
    gpu,
    gpu_vendor,
    owners,
    vendor_words,
)
from kineto_trace.structure.event_arguments import arguments, has_column
from kineto_trace.structure.nesting import nest_tables
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

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
    "blocks per {multiprocessor} and occupancy are unknown: the trace does not contain the launch shapes of its "
    "kernels, or the occupancy rules of these GPUs are unknown"
)
_NO_OCCUPANCY = "occupancy is unknown: the trace does not contain the register counts of its kernels"
PROPERTIES = (
    *(f"grid_{axis}" for axis in "xyz"),
    *(f"block_{axis}" for axis in "xyz"),
    "registers",
    "static_shared_memory",
    "dynamic_shared_memory",
)
Mean = Callable[[Ints, Floats, Floats, int], Floats]  # per row its group, a figure and us; and the groups
_SEPARATOR = "|"
_NAMED = ("python_function", "user_annotation", "cpu_op")
_TABLES = (("kernel", "GPU"), ("cpu_op", "CPU"))
_NOTHING = "the trace has no HLO operations: only JAX programs have them"
_UNKNOWN = "{:.1f} % of the kernels' time belongs to no known HLO operation"
_Place = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KernelGroups:
    """Groups of kernels, longest total first. Durations in us, one value per group.

    first: row of the table `kernel`.
    blocks_per_sm, occupancy: means weighted by duration; NaN if unknown.
    """

    groups: Groups
    order: Ints
    first: Ints
    calls: Ints
    total: Floats
    longest: Floats
    shortest: Floats
    blocks_per_sm: Floats
    occupancy: Floats


class LaunchedWork(NamedTuple):
    """GPU activities (durations in ns), sorted by the run of their op, then by start."""

    root: Ints  # number of the run
    name: Ints32
    duration: Ints
    root_name: Ints32  # of each run
    root_duration: Ints


@dataclass(slots=True)
class _Cost:
    """runs and their total and longest duration in ns."""

    runs: int = 0
    total: int = 0
    longest: int = 0


@view(
    "kernels",
    columns(
        ("name", "text", "", "name of the kernel"),
        (
            "tensor_cores",
            "bool",
            "",
            "whether it uses tensor cores, judged by its name; missing if the name does not show it",
        ),
        *_FIGURES,  # type: ignore[arg-type]
    ),
)
def kernels(context: Context) -> Answer:
    """The kernels by name, longest total time first. Copies and fills are not kernels.

    Blocks per multiprocessor and occupancy are means weighted by duration, over the launches for which they are known.
    """
    table = context.trace.table("kernel")
    took = table["duration"] / 1000
    found = kernel_groups([table["name"]], np.arange(len(table)), took, context.get(launch_figures))
    return kernel_columns(context, found, context.get(uses_tensor_cores))


def kernel_columns(context: Context, found: KernelGroups, uses: Flags) -> Answer:
    """Returns the columns of the view kernels. uses: for each string whether a kernel of that name uses tensor
    cores.
    """
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
        ("op", "text", "", "operator that launched or captured it; missing if that happened outside any operator"),
        ("grid", "text", "", "blocks in x, y and z; missing if not recorded"),
        ("block", "text", "", "threads of a block in x, y and z; missing if not recorded"),
        ("registers", "int", "", "registers per thread; missing if not recorded"),
        ("shared_memory_bytes", "int", "bytes", "shared memory per block; missing if not recorded"),
        ("tensor_cores", "bool", "", "whether the kernel uses tensor cores, judged by its name"),
        ("op_eligible", "bool", "", "whether the operator could use tensor cores"),
        *_FIGURES,  # type: ignore[arg-type]
    ),
)
def kernels_by_op(context: Context) -> Answer:
    """The kernels by name, operator and launch properties, longest total time first.

    The operator is the innermost one around the call that launched the kernel, on its thread; if there is none, the
    innermost annotation. Kernels of a CUDA graph belong to the operator that captured them, if the agent saw the
    capture, otherwise to the operator around the launch of the graph. An operator is eligible for tensor cores if its
    name is in a built-in list, or if the operator or one nested in it used them.
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
    """Returns the launch's properties where they were recorded: no kernel has 0 blocks, threads or registers."""
    registers = has_column(table, "registers per thread") & (table["registers"] > 0)
    shown = {"registers": registers, "shared_memory_bytes": has_column(table, "shared memory")}
    shown |= {key: has_column(table, key) & (table[f"{key}_x"] > 0) for key in SHAPES}
    nothing = np.full(len(table), None, object)
    return {key: np.where(known, np.array(values[key], object), nothing) for key, known in shown.items()}


def op_columns(
    context: Context, found: KernelGroups, ops: Sequence[str | None], eligible: Flags, uses: Flags
) -> Answer:
    """Returns the columns of the view kernels_by_op. ops, eligible: of each group; uses: as in kernel_columns."""
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
    """Returns whether kernels use tensor cores; None if names do not show it on these GPUs."""
    return uses if names_tell(context.get(gpu_vendor)) else [True if each else None for each in uses.tolist()]


def _figures(context: Context, found: KernelGroups) -> dict[str, AnyArray]:
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
        ("used_pct", "float", "%", "share that uses tensor cores, or could"),
        ("not_used_pct", "float", "%", "remaining share"),
    ),
)
def tensor_core_use(context: Context) -> Answer:
    """How much of the kernels' time uses tensor cores, and how much of it could.

    "kernels" is the share of all kernels' time spent in kernels that use tensor cores, recognized by name. "eligible
    operators" is the share of all operators' kernel time spent in operators that could use them: the innermost
    operators from a list of matrix multiplications, convolutions, attention and similar operators, and the operators
    nested in these.
    """
    return share_columns(context, context.get(tensor_use))


def share_columns(context: Context, use: TensorUse) -> Answer:
    """The columns of the view tensor_core_use."""
    shares = 100 * np.array([use.kernel_share, use.eligible_share])
    return Answer(
        {"figure": ["kernels", "eligible operators"], "used_pct": shares, "not_used_pct": 100 - shares},
        [] if len(context.trace.table("kernel")) else [_NO_KERNELS],
    )


def known_mean(number: Ints, value: Floats, took: Floats, count: int) -> Floats:
    """Returns the duration-weighted mean of the known values (unweighted where all durations are zero)."""
    rows = np.flatnonzero(~np.isnan(value))
    number, value, took = number[rows], value[rows], took[rows]
    whole = np.bincount(number, weights=took, minlength=count)
    weight = np.where(whole[number] > 0, took, 1)
    summed = np.bincount(number, weights=value * weight, minlength=count)
    whole = np.bincount(number, weights=weight, minlength=count)
    mean: Floats = np.divide(summed, whole, out=np.full(count, np.nan), where=whole > 0)
    return mean


def kernel_groups(
    keys: Sequence[AnyArray],
    rows: Ints,
    took: Floats,
    figures: LaunchFigures,
    means: tuple[Mean, Mean] = (known_mean, known_mean),
) -> KernelGroups:
    """Groups these rows of the table `kernel` (repeats are allowed) by their keys, an array each. took: us.

    means: of blocks per multiprocessor and of occupancy.
    """
    found = group(keys)
    count = len(found)
    total = np.bincount(found.number, weights=took, minlength=count).astype(np.float64)
    longest, shortest = np.zeros(count), np.full(count, np.inf)
    np.maximum.at(longest, found.number, took)
    np.minimum.at(shortest, found.number, took)
    order = np.argsort(-total, kind="stable")
    return KernelGroups(
        groups=found,
        order=order,
        first=rows[found.first][order],
        calls=found.sizes()[order],
        total=total[order],
        longest=longest[order],
        shortest=shortest[order],
        blocks_per_sm=means[0](found.number, figures.blocks_per_sm[rows], took, count)[order],
        occupancy=means[1](found.number, figures.occupancy[rows], took, count)[order],
    )


def kernel_ops(context: Context) -> Ints:
    """Returns for each row of the table `kernel` the row of cpu_op that launched it, or NOTHING."""
    return _of_kernels(context, context.get(gpu).op)


def captured_kernels(context: Context) -> Flags:
    """Returns for each row of the table `kernel` whether it belongs to an op that captured it into a CUDA graph."""
    captured: Flags = _of_kernels(context, context.get(captured_ops)) != NOTHING
    return captured


def kernel_owners(context: Context) -> Ints:
    """Returns for each row of the table `kernel` the name of the op or annotation that it belongs to, or NOTHING."""
    return _of_kernels(context, context.get(owners))


def _of_kernels(context: Context, of_activity: Ints) -> Ints:
    """Returns for each row of the table `kernel` its value among those of GPU activities, or NOTHING."""
    activity = context.get(gpu)
    own = activity.kind == KERNEL
    found = np.full(len(context.trace.table("kernel")), NOTHING, np.int64)
    found[activity.row[own]] = of_activity[own]
    return found


@view(
    "frequent_sequences",
    columns(
        ("pattern", "text", "", "op|first GPU activity|second|…"),
        ("length", "int", "", "number of GPU activities"),
        ("count", "int", "", "number of calls"),
        ("gpu_us", "float", "us", "sum of the durations of these activities"),
        ("cpu_us", "float", "us", "sum of the durations of the operator's runs"),
    ),
)
def frequent_sequences(
    context: Context,
    *,
    op: str = "aten::",
    min_pattern_len: int = 3,
    top_k: int = 5,
) -> Answer:
    """The most frequent sequences of GPU activities launched by the runs of an operator.

    A run counts if no other matching run encloses it on its thread. Its activities are those launched on its thread
    while it runs, in order of their starts.

    Options:
    - op: operators, annotations and Python functions whose names contain this text match.
    - min_pattern_len: the minimum number of activities in a sequence.
    - top_k: the number of sequences to list; 0 lists all.
    """
    return sequence_columns(context, launched_activities(context, op), op, min_pattern_len, top_k)


def sequence_columns(
    context: Context, found: LaunchedWork, op: str, min_pattern_len: int, top_k: int, notes: Sequence[str] = ()
) -> Answer:
    """The columns of the view."""
    runs, size = np.unique(found.root, return_counts=True)
    long = np.zeros(len(found.root_name), np.bool_)
    long[runs[size >= min_pattern_len]] = True
    chosen = long[found.root]
    root = found.root[chosen]
    name, duration = found.name[chosen].astype(np.int64), found.duration[chosen]
    first = np.flatnonzero(np.diff(root, prepend=-1))
    run = root[first]
    values = np.insert(name, first, found.root_name[run])
    sequences = group_sequences(values, first + np.arange(len(first)))
    length = np.diff(first, append=len(root))
    count = len(sequences.size)
    gpu_ns = sums(np.repeat(sequences.number, length), duration, count)
    cpu_ns = sums(sequences.number, found.root_duration[run], count)
    strings = context.trace.strings
    rows = []
    for place, example in enumerate(sequences.example.tolist()):
        start = first[example]
        texts = [strings[number] for number in (found.root_name[run[example]], *name[start : start + length[example]])]
        times = (int(gpu_ns[place]) / 1000, int(cpu_ns[place]) / 1000)
        rows.append((_SEPARATOR.join(texts), int(length[example]), int(sequences.size[place]), *times))
    rows.sort(key=lambda row: (-row[2], row[0]))
    if top_k:
        rows = rows[:top_k]
    nothing = [] if rows else [f"no event whose name contains {op!r} launched {min_pattern_len} or more GPU activities"]
    return frequent_sequences.answer(rows, [*notes, *nothing])


def names_containing(context: Context, op: str) -> Flags:
    """Returns for each string whether it contains the text."""
    return np.array([op in text for text in context.trace.strings], np.bool_)


def launched_activities(context: Context, op: str) -> LaunchedWork:
    """Returns the launched activities by the threads and times of calls."""
    fits, trace = names_containing(context, op), context.trace
    tables = [trace.table(kind) for kind in _NAMED]
    tables = [table.take(np.flatnonzero(fits[table["name"]])) if len(table) else table for table in tables]
    nested = nest_tables(tables, trace.window_end_ns)
    work, called = context.get(gpu), context.get(calls)
    rows = np.flatnonzero(work.call >= 0)
    place = nested.innermost(called.thread, called.start)[work.call[rows]] if len(rows) else rows
    rows, place = rows[place >= 0], place[place >= 0]
    tops = np.flatnonzero(nested.tree.parent < 0)
    root = np.searchsorted(tops, place, side="right") - 1
    order = np.argsort(root, kind="stable")  # they are sorted by start already
    rows = rows[order]
    names = np.concatenate([table["name"] for table in tables])
    top = nested.order[tops]
    length = nested.tree.end[tops] - nested.events.start[tops]
    return LaunchedWork(root[order], work.name[rows], (work.end - work.start)[rows], names[top], length)


@view(
    "hlo_ops",
    columns(
        ("hlo_op", "text", "", "HLO instruction, as in the compiled module; missing if only the module is known"),
        ("hlo_module", "text", "", "module that it belongs to, such as jit_train_step"),
        ("op_name", "text", "", "path of the JAX operation that it was compiled from; missing if unknown"),
        ("source", "text", "", "line of the program that called that operation; missing if unknown"),
        ("where", "text", "", "GPU: kernels (or work on another device); CPU: operations run by the CPU"),
        ("runs", "int", "", "number of kernels, or of runs on the CPU"),
        ("total_us", "float", "us", "sum of their durations"),
        ("mean_us", "float", "us", "mean duration"),
        ("max_us", "float", "us", "longest duration"),
        ("share_pct", "float", "%", "share of the time of all kernels, or of all HLO operations on the CPU"),
    ),
)
def hlo_ops(context: Context) -> Answer:
    """The cost of each HLO instruction of a JAX program, longest total time first.

    On a CPU, XLA itself records the operations. On NVIDIA GPUs, the kernels of the trace are matched with the modules
    that the program compiled: a kernel that may have run several instructions gets only what they have in common. CPU
    operations can be nested: a loop, for example, contains its body.
    """
    rows: list[tuple[_Place, str, _Cost, float]] = []
    notes = []
    for kind, where in _TABLES:
        costs = _costs(context, kind)
        if not costs:
            continue
        known = sum(cost.total for cost in costs.values())
        whole = int(context.trace.table(kind)["duration"].sum()) if kind == "kernel" else known
        rows += [(place, where, cost, 100 * cost.total / max(whole, 1)) for place, cost in costs.items()]
        if kind == "kernel" and known < whole:
            notes.append(_UNKNOWN.format(100 * (whole - known) / whole))
    rows.sort(key=lambda row: -row[2].total)
    values = {key: [place[number] or None for place, *_ in rows] for number, key in enumerate(KEYS)}
    costs_only = [cost for _, _, cost, _ in rows]
    return Answer(
        {
            **values,
            "where": [where for _, where, _, _ in rows],
            "runs": [cost.runs for cost in costs_only],
            "total_us": [cost.total / 1000 for cost in costs_only],
            "mean_us": [cost.total / cost.runs / 1000 for cost in costs_only],
            "max_us": [cost.longest / 1000 for cost in costs_only],
            "share_pct": [share for *_, share in rows],
        },
        notes or ([] if rows else [_NOTHING]),
    )


def _costs(context: Context, kind: str) -> dict[_Place, _Cost]:
    """Returns the cost of each operation that rows of the table belong to."""
    table, parsed = context.trace.table(kind), arguments(context, kind)
    places = [tuple(_text(found.get(key)) for key in KEYS) for found in parsed.objects]
    rows = np.flatnonzero(parsed.text != NO_STRING)
    text, took = parsed.text[rows], table["duration"][rows]
    count = len(places)
    runs = np.bincount(text, minlength=count)
    total = _sums(text, took, count)
    longest = np.zeros(count, np.int64)
    np.maximum.at(longest, text, took)
    costs: dict[_Place, _Cost] = {}
    for place, *figures in zip(places, runs.tolist(), total.tolist(), longest.tolist(), strict=True):
        if place[1]:  # of a module
            cost = costs.setdefault(place, _Cost())
            cost.runs, cost.total = cost.runs + figures[0], cost.total + figures[1]
            cost.longest = max(cost.longest, figures[2])
    return {place: cost for place, cost in costs.items() if cost.runs}


def _sums(text: Ints, took: Ints, count: int) -> Ints:
    total = np.zeros(count, np.int64)
    np.add.at(total, text, took)
    return total


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
