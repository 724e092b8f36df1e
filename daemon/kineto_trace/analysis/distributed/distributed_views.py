"""The views of distributed training: overlap, waiting, operations and devices of all ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.overview.step_breakdown import device_ranges, roles
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.intervals import Union, intersection, union
from kineto_trace.collectives.rank_clocks import RankCollectives, listed
from kineto_trace.collectives.rank_matching import AlignBy, Matched, instances, match, rank_collectives
from kineto_trace.collectives.rank_waits import NO_COLLECTIVES
from kineto_trace.model.context import Context
from kineto_trace.model.trace import GPU_TABLES
from kineto_trace.structure.activity_links import communication_kernels, gpu, steps
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
ALL = "all"
_KERNEL, _COMMUNICATION = 0, 3  # numbers into step_breakdown.ROLES


@dataclass(frozen=True, slots=True)
class RankOverlap:
    """What a rank contributes. steps: names; overlap (µs): per step computation, overlapping, communication, other.

    cut: number of its steps that the recording cut off, which are left out. on_gpu: whether the trace has GPU activity.
    """

    steps: tuple[str, ...]
    overlap: Floats
    cut: int = 0
    on_gpu: bool = True


@dataclass(frozen=True, slots=True)
class RankSteps:
    """The collectives of a rank, and its complete steps: names, start and end (Unix ns). cut: number of the others.

    A trace without steps is one step without a name.
    """

    found: RankCollectives
    steps: tuple[str, ...]
    start: Ints
    end: Ints
    cut: int


def rank_overlap(context: Context) -> RankOverlap:
    """How much of each step computes and communicates, on the device."""
    every = context.get(device_ranges)
    found = every.measured()
    kernels = context.trace.table("kernel")
    communicates = context.get(communication_kernels)
    parts = context.get(roles)
    communication: Union = parts[_COMMUNICATION]  # of the host: where nothing communicates on the GPU
    if communicates.any():
        communication = union(kernels["start"][communicates], kernels.end()[communicates])
    costs = overlap(parts[_KERNEL], communication, found.start, found.end) / 1000
    return RankOverlap(found.name, costs, len(every.cut), len(context.get(gpu)) > 0)


def overlap(kernels: Union, communication: Union, start: Ints, end: Ints) -> Floats:
    """For each [start, end): computation without communication, both, communication alone, and the rest."""
    both = intersection(kernels, communication).within(start, end)
    computing, communicating = kernels.within(start, end), communication.within(start, end)
    rest = end - start + both - computing - communicating
    return np.stack([computing - both, both, communicating - both, rest], axis=1).astype(np.float64)


OVERLAP = ("computation_us", "overlapping_us", "communication_us", "other_us")


def _overlap_rows(partials: Sequence[tuple[int, RankOverlap]]) -> Answer:
    known, notes = _with_steps(partials)
    values = dict(overlap_columns(known, lambda mean: mean).values)
    hosts = [rank for rank, part in known if not part.on_gpu]
    unknown = np.isin(values["rank"], hosts)
    for name in OVERLAP[:2]:
        values[name] = np.where(unknown, np.nan, values[name])
    if hosts:
        some = f"rank {hosts[0]} has" if len(hosts) == 1 else f"ranks {listed(hosts)} have"
        whose = some if len(hosts) < len(known) else "the traces have"
        notes = [*notes, f"{whose} no GPU activity: communication is that of the host, and computation is unknown"]
    return Answer(values, notes)


def _with_steps(partials: Sequence[tuple[int, Any]]) -> tuple[list[tuple[int, Any]], list[str]]:
    """Returns the ranks with complete steps, or without any, and a note on each of the others."""
    known = [(rank, part) for rank, part in partials if part.steps or not part.cut]
    left_out = sorted({rank for rank, _ in partials} - {rank for rank, _ in known})
    return known, [f"rank {rank} has no row: its recording began or ended in each of its steps" for rank in left_out]


def overlap_columns(partials: Sequence[tuple[int, Any]], average: Callable[[Floats], Floats]) -> Answer:
    """The columns of the view distributed_overlap. average: what is shown of the mean over the steps."""
    rows: dict[tuple[str, int], Any] = {}
    names = dict.fromkeys([ALL, *(name for _, part in partials for name in part.steps)])
    for rank, part in partials:
        mean = part.overlap.sum(0) / max(1, len(part.steps))
        rows[ALL, rank] = average(mean)
        rows.update({(name, rank): costs for name, costs in zip(part.steps, part.overlap, strict=True)})
    ordered = [(name, rank) for name in names for rank, _ in partials if (name, rank) in rows]
    table = np.array([rows[key] for key in ordered]).reshape(-1, len(OVERLAP))
    values: dict[str, Any] = {"step": [name for name, _ in ordered], "rank": [rank for _, rank in ordered]}
    values.update({name: table[:, at] for at, name in enumerate(OVERLAP)})
    return Answer(values)


@view(
    "distributed_overlap",
    columns(
        ("step", "text", "", 'number of the step; "all": mean over the steps'),
        ("rank", "int", "", "rank of the process in its job"),
        ("computation_us", "float", "us", "time in which kernels ran and none of them communicated"),
        ("overlapping_us", "float", "us", "time in which some kernels computed and others communicated"),
        ("communication_us", "float", "us", "time in which kernels communicated and none computed"),
        ("other_us", "float", "us", "rest of the step"),
    ),
    reduce=_overlap_rows,
)
def distributed_overlap(context: Context) -> RankOverlap:
    """How much of each step every rank spent on computation, on communication, and on both at the same time.

    A step ends with the last GPU activity that it launched. Communication kernels are recognized by their names; a rank
    without such kernels communicates while operators such as gloo:all_reduce run. Of ranks without any GPU activity in
    their traces, computation is missing, not zero.
    """
    return context.get(rank_overlap)


def _rank_steps(context: Context) -> RankSteps:
    found, every = context.get(rank_collectives), context.get(device_ranges)
    whole = every.measured()
    if len(context.get(steps)):
        return RankSteps(found, whole.name, whole.start, whole.end, len(every.cut))
    return RankSteps(found, (), found.start[:1], np.array([found.end.max(initial=0)])[: len(found)], 0)


WAIT = ("transfer_us", "synchronizing_us")


def _wait_rows(partials: Sequence[tuple[int, RankSteps]], *, align: AlignBy = "auto") -> Answer:
    known, cut = _with_steps(partials)
    shown = {rank for rank, _ in known}
    matched = match([(rank, part.found) for rank, part in partials], align)
    transfer = instances(matched).transfer
    rows: dict[tuple[str, int], Floats] = {}
    names = [ALL]
    outside = 0
    for place, (rank, part) in enumerate(partials):
        if rank not in shown:
            continue
        costs = _step_costs(part, transfer[matched.instance[matched.rank == place]])
        rows.update({(name, rank): each for name, each in zip(part.steps, costs, strict=False)})
        names.extend(part.steps)
        rows[ALL, rank] = costs.sum(0) / max(1, len(costs))
        outside += int(np.count_nonzero(union(part.start, part.end).within(part.found.start, part.found.end) == 0))
    notes = [*matched.notes, *cut]
    if outside:
        notes.append(f"{outside} collectives ran outside of all measured steps and are not counted")
    return wait_columns(rows, list(dict.fromkeys(names)), [rank for rank, _ in partials], notes)


def _step_costs(part: RankSteps, transfer: Ints) -> Floats:
    """Transfer and waiting (us) in each step. transfer: how long (ns) each collective of the rank moves data."""
    start, end = part.found.start, part.found.end
    moving = union(end - transfer, end).within(part.start, part.end)
    return np.stack([moving, union(start, end).within(part.start, part.end) - moving], axis=1) / 1000.0


def _transfer_and_wait(matched: Matched, rows: Ints, transfer: Ints) -> Floats:
    start, end = matched.start[rows], matched.end[rows]
    moving = union(end - transfer[matched.instance[rows]], end).length()
    return np.array([moving, union(start, end).length() - moving]) / 1000.0


def wait_columns(
    rows: dict[tuple[str, int], Floats], names: Sequence[str], ranks: Sequence[int], notes: Sequence[str] = ()
) -> Answer:
    """The columns of the view distributed_wait."""
    ordered = [(name, rank) for name in names for rank in ranks if (name, rank) in rows]
    table = np.array([rows[key] for key in ordered]).reshape(-1, len(WAIT))
    values: dict[str, Any] = {"step": [name for name, _ in ordered], "rank": [rank for _, rank in ordered]}
    values.update({name: table[:, at] for at, name in enumerate(WAIT)})
    return Answer(values, notes)


@view(
    "distributed_wait",
    columns(
        ("step", "text", "", 'number of the step; "all": mean over the steps'),
        ("rank", "int", "", "rank of the process in its job"),
        ("transfer_us", "float", "us", "communication time in which data moved"),
        ("synchronizing_us", "float", "us", "communication time in which the rank waited for others"),
    ),
    reduce=_wait_rows,
)
def distributed_wait(context: Context) -> RankSteps:
    """How much of its communication time each rank spent waiting for the others.

    Collectives are matched across ranks by process group and sequence number. The shortest duration of a collective is
    its transfer; the rest of a rank's duration is waiting. Overlapping collectives of a rank count once. As in
    distributed_overlap, a step ends with the last GPU activity that it launched, and what runs until then counts.

    Options:
    - align: has no effect on durations; see the view `collectives`.
    """
    return context.get(_rank_steps)


OPS = ("calls", "total_bytes", "avg_bytes", "total_us", "avg_us", "transfer_us", "avg_transfer_us")


def _op_rows(partials: Sequence[tuple[int, Any]]) -> Answer:
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
    return op_columns(rows, matched.notes)


def op_columns(rows: Sequence[tuple[Any, ...]], notes: Sequence[str] = ()) -> Answer:
    """The columns of the view distributed_ops."""
    names = ("rank", "name", *OPS)
    return Answer({name: [row[at] for row in rows] for at, name in enumerate(names)}, notes)


@view(
    "distributed_ops",
    columns(
        ("rank", "int", "", "rank of the process in its job"),
        ("name", "text", "", "collective"),
        ("calls", "int", "", "number of calls"),
        ("total_bytes", "int", "bytes", "sum over all calls of the larger of the two buffers"),
        ("avg_bytes", "float", "bytes", "mean per call"),
        ("total_us", "float", "us", "time in it including waiting; overlapping calls count once"),
        ("avg_us", "float", "us", "mean per call"),
        ("transfer_us", "float", "us", "part of it in which data moved"),
        ("avg_transfer_us", "float", "us", "mean per call"),
    ),
    reduce=_op_rows,
    nothing=NO_COLLECTIVES,
)
def distributed_ops(context: Context) -> RankCollectives:
    """The collectives of each rank by name: number of calls, bytes, time, and how much of the time was transfer.

    Times are those of the kernels. Sizes come from the arguments that PyTorch records with them.
    """
    return context.get(rank_collectives)


class RankDevice(NamedTuple):
    """A GPU that a rank used."""

    device: int
    name: str | None
    memory_bytes: int | None
    compute_capability: str | None


@dataclass(frozen=True, slots=True)
class RankDevices:
    """The GPUs of a rank. worker: of a TensorBoard log folder, otherwise ""."""

    worker: str
    host: str | None
    process: int
    devices: tuple[RankDevice, ...]


def _device_rows(partials: Sequence[tuple[int, RankDevices]]) -> Answer:
    return device_columns(partials, {rank: (part.host, part.process) for rank, part in partials})


def device_columns(partials: Sequence[tuple[int, RankDevices]], places: Mapping[int, tuple[str | None, int]]) -> Answer:
    """The columns of the view distributed_devices. places: host and process of each rank."""
    rows = [(rank, *places[rank], *device) for rank, part in partials for device in part.devices]
    names = ("rank", "host", "process", *RankDevice._fields)
    values = {name: [row[at] for row in rows] for at, name in enumerate(names)}
    return Answer(values, [] if rows else ["the traces have no GPU activity"])


@view(
    "distributed_devices",
    columns(
        ("rank", "int", "", "rank of the process in its job"),
        ("host", "text", "", "name of the machine"),
        ("process", "int", "", "process id"),
        ("device", "int", "", "GPU index in the process"),
        ("name", "text", "", "model of the GPU"),
        ("memory_bytes", "int", "bytes", "memory of the GPU"),
        ("compute_capability", "text", "", "compute capability of the GPU"),
    ),
    reduce=_device_rows,
)
def distributed_devices(context: Context) -> RankDevices:
    """The GPUs that each rank used, with their machine and process."""
    trace = context.trace
    used = sorted({int(n) for kind in GPU_TABLES for n in unique_values(trace.table(kind)["device"])})
    return rank_devices(context, used, {device.get("id", place): device for place, device in enumerate(trace.devices)})


def rank_devices(context: Context, used: Sequence[int], known: Mapping[Any, Mapping[str, Any]]) -> RankDevices:
    """Returns these GPUs of one rank. known: their properties by number."""
    target, devices = context.trace.target, []
    for number in used:
        row = known.get(number, {})
        version = row.get("computeMajor"), row.get("computeMinor")
        capability = None if None in version else f"{version[0]}.{version[1]}"
        devices.append(RankDevice(number, row.get("name"), row.get("totalGlobalMem"), capability))
    return RankDevices(context.worker, target.host or None, target.pid, tuple(devices))
