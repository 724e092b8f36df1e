"""The views of distributed training: overlap, waiting, operations and devices of all ranks."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.overview.step_breakdown import device_ranges, roles
from kineto_trace.arrays.intervals import Union, union
from kineto_trace.collectives.rank_clocks import RankCollectives
from kineto_trace.collectives.rank_matching import Matched, instances, match, rank_collectives
from kineto_trace.compat.tensorboard.plugin_communication import (
    NO_STEP,
    PluginRank,
    merged_length,
    missing,
    overlap_us,
    plugin_rank,
    transfers,
)
from kineto_trace.compat.tensorboard.plugin_steps import used_processes
from kineto_trace.model.context import Context
from kineto_trace.model.trace import GPU_TABLES
from kineto_trace.structure.activity_links import NOTHING, communication_kernels, steps
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, Compat, view

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
ALL = "all"
_NODE_AND_PROCESS = re.compile(r"(.*)_(\d+)")  # of a worker's name
_KERNEL, _COMMUNICATION = 0, 3  # numbers into breakdown.ROLES


@dataclass(frozen=True, slots=True)
class RankOverlap:
    """steps: names; overlap (µs): for each step computation, overlapping, communication, other."""

    steps: tuple[str, ...]
    overlap: Floats


@dataclass(frozen=True, slots=True)
class RankSteps:
    """The collectives of a rank, and the numbers of its steps."""

    found: RankCollectives
    steps: tuple[int, ...]


def rank_overlap(context: Context) -> RankOverlap:
    """How much of each step computes and communicates, on the device."""
    found = context.get(device_ranges)
    kernels = context.trace.table("kernel")
    communicates = context.get(communication_kernels)
    parts = context.get(roles)
    communication: Union = parts[_COMMUNICATION]  # of the host: where nothing communicates on the GPU
    if communicates.any():
        communication = union(kernels["start"][communicates], kernels.end()[communicates])
    return RankOverlap(
        found.name, overlap_us(parts[_KERNEL], communication, found.start, found.end) / found.clock.per_us
    )


def _nothing(names: Sequence[str], reason: str) -> Answer:
    return Answer({name: [] for name in names}, [f"the plug-in shows no distributed view: {reason}"])


_OVERLAP = ("computation_us", "overlapping_us", "communication_us", "other_us")


def _overlap_rows(partials: Sequence[tuple[int, Any]], *, compat: Compat = Compat.NONE) -> Answer:
    plugin = compat is Compat.PLUGIN
    if plugin and (reason := missing([part for _, part in partials])):
        return _nothing(("step", "rank", *_OVERLAP), reason)
    rows: dict[tuple[str, int], Any] = {}
    names = dict.fromkeys([ALL, *(name for _, part in partials for name in part.steps)])
    for rank, part in partials:
        mean = part.overlap.sum(0) / max(1, len(part.steps))
        rows[ALL, rank] = np.trunc(mean) if plugin else mean
        rows.update({(name, rank): costs for name, costs in zip(part.steps, part.overlap, strict=True)})
    ordered = [(name, rank) for name in names for rank, _ in partials if (name, rank) in rows]
    table = np.array([rows[key] for key in ordered]).reshape(-1, len(_OVERLAP))
    values: dict[str, Any] = {"step": [name for name, _ in ordered], "rank": [rank for _, rank in ordered]}
    values.update({name: table[:, at] for at, name in enumerate(_OVERLAP)})
    return Answer(values)


@view(
    "distributed_overlap",
    columns(
        ("step", "text", "", 'number of the step; "all": mean over the steps'),
        ("rank", "int", "", "rank of the process in its job"),
        ("computation_us", "float", "us", "kernels ran, none of them communicated"),
        ("overlapping_us", "float", "us", "kernels computed while others communicated"),
        ("communication_us", "float", "us", "kernels communicated, none computed"),
        ("other_us", "float", "us", "rest of the step"),
    ),
    compat=(Compat.PLUGIN,),
    reduce=_overlap_rows,
)
def distributed_overlap(context: Context, *, compat: Compat = Compat.NONE) -> RankOverlap | PluginRank:
    """How much of each step every rank computed and communicated, and how much of that at the same time.

    A step ends with the last GPU activity that it launched. Communication is told by the kernels' names; a rank
    without such kernels communicates while operators like gloo:all_reduce run.

    compat "plugin": communication is what has the external id of one of ten operators, and these operators' own time
    on the host; "all" in whole microseconds; there is no result unless every rank has as many of them.
    """
    return context.get(plugin_rank) if compat is Compat.PLUGIN else context.get(rank_overlap)


def _rank_steps(context: Context) -> RankSteps:
    return RankSteps(context.get(rank_collectives), tuple(context.get(steps).number.tolist()))


_WAIT = ("transfer_us", "synchronizing_us")


def _wait_rows(partials: Sequence[tuple[int, Any]], *, compat: Compat = Compat.NONE, align: str = "auto") -> Answer:
    if compat is Compat.PLUGIN:
        return _plugin_wait([rank for rank, _ in partials], [part for _, part in partials])
    matched = match([(rank, part.found) for rank, part in partials], align)
    transfer = instances(matched).transfer
    rows: dict[tuple[str, int], Floats] = {}
    names = [ALL]
    outside = 0
    for place, (rank, part) in enumerate(partials):
        own = np.flatnonzero(matched.rank == place)
        numbers = list(dict.fromkeys(part.steps)) or [NOTHING]
        outside += int(np.count_nonzero(matched.step[own] == NOTHING)) if part.steps else 0
        costs = []
        for number in numbers:
            chosen = own[matched.step[own] == number]
            costs.append(_transfer_and_wait(matched, chosen, transfer))
            if part.steps:
                rows[str(number), rank] = costs[-1]
                names.append(str(number))
        rows[ALL, rank] = np.mean(costs, axis=0)
    notes = list(matched.notes)
    if outside:
        notes.append(f"{outside} collectives were launched outside of all steps and are not counted")
    return _wait_answer(rows, list(dict.fromkeys(names)), [rank for rank, _ in partials], notes)


def _transfer_and_wait(matched: Matched, rows: Ints, transfer: Ints) -> Floats:
    start, end = matched.start[rows], matched.end[rows]
    moving = union(end - transfer[matched.instance[rows]], end).length()
    return np.array([moving, union(start, end).length() - moving]) / 1000.0


def _wait_answer(
    rows: dict[tuple[str, int], Floats], names: Sequence[str], ranks: Sequence[int], notes: Sequence[str] = ()
) -> Answer:
    ordered = [(name, rank) for name in names for rank in ranks if (name, rank) in rows]
    table = np.array([rows[key] for key in ordered]).reshape(-1, len(_WAIT))
    values: dict[str, Any] = {"step": [name for name, _ in ordered], "rank": [rank for _, rank in ordered]}
    values.update({name: table[:, at] for at, name in enumerate(_WAIT)})
    return Answer(values, notes)


def _plugin_wait(ranks: Sequence[int], parts: Sequence[PluginRank]) -> Answer:
    if reason := missing(parts):
        return _nothing(("step", "rank", *_WAIT), reason)
    transfer = transfers(parts)
    rows: dict[tuple[str, int], Floats] = {}
    names = [ALL]
    for rank, part in zip(ranks, parts, strict=True):
        labels = ["" if step == NO_STEP else part.steps[step] for step in part.step.tolist()]
        used = list(dict.fromkeys(labels))
        step_of_node = np.array([used.index(label) for label in labels])
        costs = []
        for place, label in enumerate(used):
            chosen = step_of_node[part.node] == place
            start, end = part.start[chosen], part.end[chosen]
            moving = merged_length(end - transfer[chosen], end)
            costs.append(np.array([moving, merged_length(start, end) - moving]))
            rows[label, rank] = costs[-1]
        names += used
        rows[ALL, rank] = np.trunc(np.sum(costs, axis=0) / max(1, len(costs)))
    return _wait_answer(rows, list(dict.fromkeys(names)), ranks)


@view(
    "distributed_wait",
    columns(
        ("step", "text", "", 'number of the step; "all": mean over the steps'),
        ("rank", "int", "", "rank of the process in its job"),
        ("transfer_us", "float", "us", "communication in which data moved"),
        ("synchronizing_us", "float", "us", "communication in which the rank waited for others"),
    ),
    compat=(Compat.PLUGIN,),
    reduce=_wait_rows,
)
def distributed_wait(context: Context, *, compat: Compat = Compat.NONE) -> RankSteps | PluginRank:
    """How much of its communication every rank waited for the others.

    Of a collective, matched over ranks by process group and sequence number, the shortest duration is the transfer;
    what a rank was in it beyond that, it waited. Collectives of a rank that overlap count once. A collective is of
    the step in which it was launched.

    align: does not matter for durations; see view collectives.

    compat "plugin": collectives are matched by their order, only ten operators count, and an operator's own time on
    the host counts like a kernel; a step "" is what lies in none; "all" in whole microseconds.
    """
    return context.get(plugin_rank) if compat is Compat.PLUGIN else context.get(_rank_steps)


_OPS = ("calls", "total_bytes", "avg_bytes", "total_us", "avg_us", "transfer_us", "avg_transfer_us")


def _op_rows(partials: Sequence[tuple[int, Any]], *, compat: Compat = Compat.NONE) -> Answer:
    if compat is Compat.PLUGIN:
        return _plugin_ops([rank for rank, _ in partials], [part for _, part in partials])
    matched = match(partials, "clock")
    transfer = instances(matched).transfer
    kinds = np.array([d.collective for d in matched.descriptions], object)
    sizes = np.array([np.nan if d.bytes is None else d.bytes for d in matched.descriptions], np.float64)
    rows: list[tuple[Any, ...]] = []
    for place, rank in enumerate(matched.ranks):
        own = np.flatnonzero(matched.rank == place)
        kind = kinds[matched.description[own]]
        for name in dict.fromkeys(kind.tolist()):
            chosen = own[kind == name]
            count = len(chosen)
            size = sizes[matched.description[chosen]].sum()
            moving, waiting = _transfer_and_wait(matched, chosen, transfer).tolist()
            total = moving + waiting
            known = None if np.isnan(size) else int(size)
            rows.append(
                (rank, name, count, known, None if known is None else known / count, total, total / count)
                + (moving, moving / count)
            )
    return _op_answer(rows, matched.notes)


def _op_answer(rows: Sequence[tuple[Any, ...]], notes: Sequence[str] = ()) -> Answer:
    names = ("rank", "name", *_OPS)
    return Answer({name: [row[at] for row in rows] for at, name in enumerate(names)}, notes)


def _plugin_ops(ranks: Sequence[int], parts: Sequence[PluginRank]) -> Answer:
    if reason := missing(parts):
        return _nothing(("rank", "name", *_OPS), reason)
    transfer = transfers(parts)
    rows: list[tuple[Any, ...]] = []
    for rank, part in zip(ranks, parts, strict=True):
        names = np.array(part.name, object)
        for name in dict.fromkeys(part.name):
            nodes = names == name
            chosen = nodes[part.node]
            start, end = part.start[chosen], part.end[chosen]
            count, size = int(nodes.sum()), int(part.bytes[nodes].sum())
            total, moving = merged_length(start, end), merged_length(end - transfer[chosen], end)
            rows.append(
                (rank, name, count, size, round(size / count), total, round(total / count))
                + (moving, round(moving / count))
            )
    return _op_answer(rows)


@view(
    "distributed_ops",
    columns(
        ("rank", "int", "", "rank of the process in its job"),
        ("name", "text", "", "collective"),
        ("calls", "int", "", "how often"),
        ("total_bytes", "int", "bytes", "of all calls: of each the larger of its two buffers"),
        ("avg_bytes", "float", "bytes", "per call"),
        ("total_us", "float", "us", "time in it, waiting included; what overlaps counts once"),
        ("avg_us", "float", "us", "per call"),
        ("transfer_us", "float", "us", "of that: data moved"),
        ("avg_transfer_us", "float", "us", "per call"),
    ),
    compat=(Compat.PLUGIN,),
    reduce=_op_rows,
)
def distributed_ops(context: Context, *, compat: Compat = Compat.NONE) -> RankCollectives | PluginRank:
    """The collectives of every rank by name: how often, how much, how long, and how much of that was transfer.

    Times are those of the kernels; sizes come from the arguments that PyTorch gives to them.

    compat "plugin": the operators nccl:… and gloo:… broadcast, reduce, all_reduce, all_gather and reduce_scatter, with
    their own time on the host; bytes are the shapes of their inputs times 8 (long), 4 (float, int), 2 (Half,
    BFloat16), 1 (uchar) or 0; matched by order; averages are rounded.
    """
    return context.get(plugin_rank) if compat is Compat.PLUGIN else context.get(rank_collectives)


class Device(NamedTuple):
    """A GPU that a rank used."""

    device: int
    name: str | None
    memory_bytes: int | None
    compute_capability: str | None


@dataclass(frozen=True, slots=True)
class RankDevices:
    """worker: of a TensorBoard log folder, else ""."""

    worker: str
    host: str | None
    process: int
    devices: tuple[Device, ...]


def _device_rows(partials: Sequence[tuple[int, Any]], *, compat: Compat = Compat.NONE) -> Answer:
    places = {rank: (part.host, part.process) for rank, part in partials}
    if compat is Compat.PLUGIN:
        unnamed = 0
        for rank, part in sorted(partials, key=lambda entry: entry[1].worker):
            if match := _NODE_AND_PROCESS.match(part.worker):
                places[rank] = match[1], int(match[2])
            elif part.worker and part.devices:
                places[rank] = part.worker, unnamed
                unnamed += 1
    rows = [(rank, *places[rank], *device) for rank, part in partials for device in part.devices]
    names = ("rank", "host", "process", *Device._fields)
    values = {name: [row[at] for row in rows] for at, name in enumerate(names)}
    return Answer(values, [] if rows else ["the traces have no activity of a GPU"])


@view(
    "distributed_devices",
    columns(
        ("rank", "int", "", "rank of the process in its job"),
        ("host", "text", "", "name of the machine"),
        ("process", "int", "", "process id"),
        ("device", "int", "", "GPU as the process numbers it"),
        ("name", "text", "", "its model"),
        ("memory_bytes", "int", "bytes", "its memory"),
        ("compute_capability", "text", "", "its compute capability"),
    ),
    compat=(Compat.PLUGIN,),
    reduce=_device_rows,
)
def distributed_devices(context: Context, *, compat: Compat = Compat.NONE) -> RankDevices:
    """The GPUs that every rank used, with the machine and process.

    compat "plugin": only GPUs whose properties the file says; of files in a TensorBoard log folder ("<machine>_<process
    id>.pt.trace.json"), machine and process are those of the file's name. Names of another kind are machines, whose
    processes count from 0 on.
    """
    trace, plugin = context.trace, compat is Compat.PLUGIN
    if plugin:
        known = dict(enumerate(trace.devices))
        used = sorted(number for number in used_processes(context) if number in known)
    else:
        used = sorted({int(n) for kind in GPU_TABLES for n in np.unique(trace.table(kind)["device"])})
        known = {device.get("id", place): device for place, device in enumerate(trace.devices)}
    devices = []
    for number in used:
        row = known.get(number, {})
        version = row.get("computeMajor"), row.get("computeMinor")
        capability = None if None in version else f"{version[0]}.{version[1]}"
        devices.append(Device(number, row.get("name"), row.get("totalGlobalMem"), capability))
    return RankDevices(context.worker, trace.target.host or None, trace.target.pid, tuple(devices))
