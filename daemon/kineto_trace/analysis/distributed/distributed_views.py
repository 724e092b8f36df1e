"""How ranks divide their time between computation and communication, and which ranks the others wait for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kineto_trace.analysis.overview.step_breakdown import device_ranges, roles
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.intervals import Union, intersection, union
from kineto_trace.base.array_types import NOTHING, Flags, Floats, Ints
from kineto_trace.collectives.rank_clocks import RankCollectives, format_ranks
from kineto_trace.collectives.rank_matching import (
    NO_COLLECTIVES,
    AlignBy,
    MatchedCollectives,
    instances,
    last_ranks,
    match,
    missing_waits,
    rank_collectives,
    skew_uncertainty,
    waits,
)
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from kineto_trace.model.trace import GPU_TABLES
from kineto_trace.structure.activity_links import communication_kernels, gpu, steps
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

ALL = "all"
_KERNEL, _COMMUNICATION = 0, 3  # numbers into step_breakdown.ROLES
OVERLAP = ("computation_us", "overlapping_us", "communication_us", "other_us")
WAIT = ("transfer_us", "synchronizing_us")
LEAST = 0.02  # of the time from the first to the last collective: a smaller delay does not make a straggler
ABOVE_OTHERS = 2.0  # times the median wait for the other ranks: less is chance
Steps = int | str | Sequence[int] | None


@dataclass(frozen=True, slots=True)
class RankOverlap:
    """What a rank contributes.

    steps: names.
    overlap: per step computation, overlapping, communication, other (us).
    cut: number of steps that the recording cut off, which are left out.
    on_gpu: whether the trace has GPU activity.
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


def rank_overlap(context: Context) -> RankOverlap:
    """Returns how much of each step is computation and communication, on the device."""
    every = context.get(device_ranges)
    found = every.measured()
    kernels = context.trace.table("kernel")
    communicates = context.get(communication_kernels)
    parts = context.get(roles)
    communication: Union = parts[_COMMUNICATION]  # on the host, if nothing communicates on the GPU
    if communicates.any():
        communication = union(kernels["start"][communicates], kernels.end()[communicates])
    costs = overlap(parts[_KERNEL], communication, found.start, found.end) / 1000
    return RankOverlap(found.name, costs, len(every.cut), len(context.get(gpu)) > 0)


def overlap(kernels: Union, communication: Union, start: Ints, end: Ints) -> Floats:
    """Returns for each [start, end): computation without communication, both, communication alone, and the rest."""
    both = intersection(kernels, communication).within(start, end)
    computing, communicating = kernels.within(start, end), communication.within(start, end)
    rest = end - start + both - computing - communicating
    return np.stack([computing - both, both, communicating - both, rest], axis=1).astype(np.float64)


def _overlap_rows(partials: Sequence[tuple[int, RankOverlap]]) -> Answer:
    known, notes = _with_steps(partials)
    values = dict(overlap_columns(known, lambda mean: mean).values)
    hosts = [rank for rank, part in known if not part.on_gpu]
    unknown = np.isin(values["rank"], hosts)
    for name in OVERLAP[:2]:
        values[name] = np.where(unknown, np.nan, values[name])
    if hosts:
        some = f"rank {hosts[0]} has" if len(hosts) == 1 else f"ranks {format_ranks(hosts)} have"
        whose = some if len(hosts) < len(known) else "the traces have"
        notes = [*notes, f"{whose} no GPU activity: communication is measured on the host, and computation is unknown"]
    return Answer(values, notes)


def _with_steps(partials: Sequence[tuple[int, Any]]) -> tuple[list[tuple[int, Any]], list[str]]:
    """Returns the ranks with complete steps, or without any, and a note on each of the others."""
    known = [(rank, part) for rank, part in partials if part.steps or not part.cut]
    left_out = sorted({rank for rank, _ in partials} - {rank for rank, _ in known})
    return known, [f"rank {rank} has no row: none of its steps was recorded completely" for rank in left_out]


def overlap_columns(partials: Sequence[tuple[int, Any]], average: Callable[[Floats], Floats]) -> Answer:
    """Returns the columns of the view distributed_overlap. average: the name of the row with the mean over the
    steps.
    """
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
        ("step", "text", "", 'step number; "all": mean over the steps'),
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
    without such kernels communicates while operators such as gloo:all_reduce run. For ranks without any GPU activity,
    computation is missing, not zero.
    """
    return context.get(rank_overlap)


def _rank_steps(context: Context) -> RankSteps:
    found, every = context.get(rank_collectives), context.get(device_ranges)
    whole = every.measured()
    if len(context.get(steps)):
        return RankSteps(found, whole.name, whole.start, whole.end, len(every.cut))
    return RankSteps(found, (), found.start[:1], np.array([found.end.max(initial=0)])[: len(found)], 0)


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
        notes.append(f"collectives outside all measured steps are not counted: {outside}")
    return wait_columns(rows, list(dict.fromkeys(names)), [rank for rank, _ in partials], notes)


def _step_costs(part: RankSteps, transfer: Ints) -> Floats:
    """Returns transfer and waiting (us) in each step. transfer: how long (ns) each collective of the rank moves
    data."""
    start, end = part.found.start, part.found.end
    moving = union(end - transfer, end).within(part.start, part.end)
    return np.stack([moving, union(start, end).within(part.start, part.end) - moving], axis=1) / 1000.0


def _transfer_and_wait(matched: MatchedCollectives, rows: Ints, transfer: Ints) -> Floats:
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
        ("step", "text", "", 'step number; "all": mean over the steps'),
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
    distributed_overlap, a step ends with the last GPU activity that it launched; everything until then counts.

    Options:
    - align: has no effect on durations; see the view `collectives`.
    """
    return context.get(_rank_steps)


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
    return distributed_ops.answer(rows, matched.notes)


@view(
    "distributed_ops",
    columns(
        ("rank", "int", "", "rank of the process in its job"),
        ("name", "text", "", "collective"),
        ("calls", "int", "", "number of calls"),
        ("total_bytes", "int", "bytes", "size of the larger of the two buffers, summed over all calls"),
        ("avg_bytes", "float", "bytes", "mean per call"),
        ("total_us", "float", "us", "time in the collective, waiting included; overlapping calls count once"),
        ("avg_us", "float", "us", "mean per call"),
        ("transfer_us", "float", "us", "part of total_us in which data moved"),
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


def _device_rows(partials: Sequence[tuple[int, RankDevices]]) -> Answer:
    return device_columns(partials, {rank: (part.host, part.process) for rank, part in partials})


def device_columns(partials: Sequence[tuple[int, RankDevices]], places: Mapping[int, tuple[str | None, int]]) -> Answer:
    """The columns of the view distributed_devices. places: host and process of each rank."""
    rows = [(rank, *places[rank], *device) for rank, part in partials for device in part.devices]
    return distributed_devices.answer(rows, [] if rows else ["the traces have no GPU activity"])


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
    return rank_devices(context, used, trace.devices_by_number)


def rank_devices(context: Context, used: Sequence[int], known: Mapping[Any, Mapping[str, Any]]) -> RankDevices:
    """Returns these GPUs as those of one rank. known: their properties by number."""
    target, devices = context.trace.target, []
    for number in used:
        row = known.get(number, {})
        version = row.get("computeMajor"), row.get("computeMinor")
        capability = None if None in version else f"{version[0]}.{version[1]}"
        devices.append(RankDevice(number, row.get("name"), row.get("totalGlobalMem"), capability))
    return RankDevices(context.worker, target.host or None, target.pid, tuple(devices))


def parse_steps(given: Steps) -> set[int] | None:
    """Returns the numbers of the steps; None for all. Raises ViewError."""
    if given is None:
        return None
    if isinstance(given, str):
        parts = [part.strip() for part in given.split(",")]
        if not all(part.isdecimal() for part in parts):
            raise ViewError(f"option steps: {given!r} is not a list of numbers such as 3,4,5")
        return {int(part) for part in parts}
    return {given} if isinstance(given, int) else set(given)


def _rows(
    partials: Sequence[tuple[int, Any]],
    *,
    steps: Steps = None,
    num_candidates: int = 2,
    align: AlignBy = "auto",
) -> Answer:
    wanted, candidates = parse_steps(steps), max(1, num_candidates)
    matched = match(partials, align)
    found = instances(matched)
    step = matched.step[np.unique(matched.instance, return_index=True)[1]]  # the step of its first rank
    several = found.seen > 1
    if wanted is not None:
        if not wanted & set(step.tolist()):
            known = sorted(set(step.tolist()) - {NOTHING})
            raise ViewError(
                f"no collective was launched in the steps {sorted(wanted)}; steps with collectives: {known}"
            )
        several &= np.isin(step, list(wanted))
    count = len(matched.ranks)
    late = matched.start - found.start[matched.instance]
    caused = np.where(several, last_ranks(matched, found).caused, 0)
    last = found.last_start
    own = several[matched.instance]
    blamed = matched.rank[found.row]
    caused_by = np.array(
        [union(*_waited_for(last, caused, blamed == place)).length() for place in range(count)], np.float64
    )
    times = np.bincount(blamed[caused > 0], minlength=count)
    seen = np.bincount(matched.rank[own], minlength=count)
    lateness = np.bincount(matched.rank[own], late[own], count)
    mean_late = lateness / np.maximum(seen, 1)
    apart = skew_uncertainty(matched)[matched.instance[own]]
    uncertainty = np.bincount(matched.rank[own], apart, count) / np.where(seen > 0, seen, np.nan)
    numbers, place = np.unique(step, return_inverse=True)
    by_step = np.zeros((len(numbers), count), np.int64)
    np.add.at(by_step, (place, blamed), caused)
    order = np.argsort(-caused_by, kind="stable")
    ranks = np.array(matched.ranks, np.int64)
    least = np.maximum(LEAST * _span(matched, several), ABOVE_OTHERS * _middle_of_others(caused_by))
    named = (np.arange(count) < candidates) & (caused_by > least)[order]
    values = {
        "rank": ranks[order],
        "candidate": named,
        "late_steps": _late_steps(by_step, candidates)[order],
        "late_collectives": times[order],
        "caused_us": caused_by[order] / 1000.0,
        "mean_late_us": mean_late[order] / 1000.0,
        "uncertainty_us": uncertainty[order] / 1000.0,
    }
    notes = [*matched.notes, *matched.clock_notes]
    doubtful = [str(matched.ranks[at]) for at in order[named] if 0 < mean_late[at] < uncertainty[at]]
    if doubtful:
        notes.append(
            f"rank {', '.join(doubtful)}: mean_late_us is below the uncertainty of the clocks; see the view "
            "rank_waits, which does not depend on clocks"
        )
    if not several.any():
        notes += missing_waits(matched, waits(matched, found))
    return Answer(values, notes)


def _waited_for(last: Ints, caused: Ints, chosen: Flags) -> tuple[Ints, Ints]:
    """Returns the spans in which the others waited for one rank: they end when it begins."""
    return last[chosen] - caused[chosen], last[chosen]


def _middle_of_others(values: Floats) -> Floats:
    """Returns for each rank the median of the other ranks' values (the lower one of two); 0 if there are none."""
    return np.array([np.sort(np.delete(values, at))[: len(values) // 2][-1:].sum() for at in range(len(values))])


def _span(matched: MatchedCollectives, several: Flags) -> int:
    """Returns the time (ns) from the first to the last of these collectives."""
    own = several[matched.instance]
    return int(matched.end[own].max() - matched.start[own].min()) if own.any() else 0


def _late_steps(by_step: Ints, candidates: int) -> Ints:
    """Returns for each rank in how many steps it is among those that cost the others most."""
    if not by_step.size:
        return np.zeros(by_step.shape[1], np.int64)
    rank_of = np.argsort(np.argsort(-by_step, axis=1, kind="stable"), axis=1, kind="stable")
    found: Ints = ((rank_of < candidates) & (by_step > 0) & (2 * by_step >= by_step.max(axis=1)[:, None])).sum(0)
    return found


@view(
    "stragglers",
    columns(
        ("rank", "int", "", "rank of the process in its job"),
        (
            "candidate",
            "bool",
            "",
            "whether the rank is a likely straggler: the others waited significantly for it, and it is among the "
            "num_candidates ranks they waited for longest",
        ),
        ("late_steps", "int", "", "number of steps in which it was among the ranks that the others waited for most"),
        (
            "late_collectives",
            "int",
            "",
            "number of collectives that it began last, by more than the uncertainty of the clocks",
        ),
        ("caused_us", "float", "us", "time in which the others waited in these collectives only for this rank"),
        ("mean_late_us", "float", "us", "mean time by which it began a collective later than the first rank"),
        ("uncertainty_us", "float", "us", "maximum error of mean_late_us due to the clocks, in either direction"),
    ),
    reduce=_rows,
)
def stragglers(context: Context) -> RankCollectives:
    """The ranks that the others wait for, most expensive first.

    All collectives that appear on several ranks count. The last rank to begin a collective is late if it begins after
    the second-to-last by more than the uncertainty of the clocks. This costs the group the time between these two
    starts, or the time the others waited in the collective if that is less; simultaneous waits count once. A rank is a
    candidate if the others waited for it for more than 2 % of the time from the first to the last collective, and more
    than twice as long as for the median of the other ranks (so ranks that take turns being late are not candidates).
    The view `rank_what_if` shows what the job would gain if the rank were as fast as the others.

    Options:
    - steps: numbers of steps such as "3,4,5"; all if not given.
    - num_candidates: maximum number of ranks marked as candidates.
    - align: how the clocks of the ranks are compared, as in the view `collectives`.
    """
    return context.get(rank_collectives)
