"""NCCL's collectives: sizes, bandwidths, latest ranks, and what ran at the same time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.base.array_types import AnyArray, Flags, Floats, Ints
from kineto_trace.collectives.nccl import NO_SEQUENCE, CollectiveDescription, bus_factor
from kineto_trace.collectives.rank_clocks import UNKNOWN, RankCollectives
from kineto_trace.collectives.rank_matching import (
    NO_COLLECTIVES,
    AlignBy,
    Instances,
    MatchedCollectives,
    instances,
    last_ranks,
    match,
    rank_collectives,
    skew_uncertainty,
)
from kineto_trace.model.context import Context
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

Sizes = Literal["exact", "log2", "all"]
Groups = Literal["alike", "each"]
MAX_NAMES = 4  # of process groups that a row lists
SIGMAS = 3.0  # a rank is named only if it comes last this much more often than by chance
_WHAT = columns(
    ("collective", "text", "", "all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send, …"),
    ("process_group", "text", "", "name of the process group"),
    ("group_description", "text", "", "PyTorch's description of the group: default_pg, mesh_tp, …"),
    ("group_size", "int", "", "number of ranks in the group"),
    ("dtype", "text", "", "element type"),
    ("bytes", "int", "bytes", "size of the larger of a rank's two buffers (nccl-tests' size)"),
)


def _described(descriptions: Sequence[CollectiveDescription], number: Ints) -> dict[str, list[Any]]:
    chosen = [descriptions[at] for at in number.tolist()]
    return {
        "collective": [d.collective for d in chosen],
        "process_group": [d.group for d in chosen],
        "group_description": [d.group_description for d in chosen],
        "group_size": [d.size for d in chosen],
        "dtype": [d.dtype for d in chosen],
        "bytes": [d.bytes for d in chosen],
    }


def _bandwidths(descriptions: Sequence[CollectiveDescription], number: Ints, ns: Ints) -> tuple[Floats, Floats]:
    """Returns algorithm and bus bandwidth in GB/s."""
    size = np.array([np.nan if d.bytes is None else d.bytes for d in descriptions], np.float64)
    factor = np.array([np.nan if d.size is None else bus_factor(d.collective, d.size) for d in descriptions])
    if not len(number):
        return np.empty(0), np.empty(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        algorithm = np.where(ns > 0, size[number] / ns, np.nan)
    return algorithm, algorithm * factor[number]


def _seen(matched: MatchedCollectives, found: Instances) -> Ints:
    """Returns which instances several ranks have: the others have no skew."""
    several: Ints = np.flatnonzero(found.seen > 1)
    return several


def _notes(matched: MatchedCollectives, found: Instances) -> list[str]:
    notes = [*matched.notes, *matched.clock_notes]
    if len(found.seen) and not (found.seen > 1).any():
        notes.append(
            "each collective appears on only one rank: skews are unknown, and durations include waiting for the other "
            "ranks, so the bandwidths are lower bounds"
        )
    return notes


def _only(values: Ints, several: Flags) -> Floats:
    return np.where(several, values / 1000.0, np.nan)


def _list(partials: Sequence[tuple[int, RankCollectives]], *, align: AlignBy = "auto") -> Answer:
    matched = match(partials, align)
    found = instances(matched)
    largest = _largest(matched, found)
    order = np.argsort(found.start, kind="stable")
    found = Instances(*(getattr(found, name)[order] for name in Instances.__slots__))
    several = found.seen > 1
    description, sequence = largest[order], matched.sequence[found.row]
    algorithm, bus = _bandwidths(matched.descriptions, description, found.transfer)
    ranks = np.array(matched.ranks, np.int64)
    last = ranks[matched.rank[found.row]] if len(found.row) else found.row
    certain = last_ranks(matched, instances(matched)).certain[order]
    values = {
        **_described(matched.descriptions, description),
        "sequence": [None if number == NO_SEQUENCE else number for number in sequence.tolist()],
        "ranks_seen": found.seen,
        "start_ns": found.start,
        "duration_us": (found.end - found.start) / 1000.0,
        "transfer_us": found.transfer / 1000.0,
        "algbw_gb_s": algorithm,
        "busbw_gb_s": bus,
        "start_skew_us": _only(found.last_start - found.start, several),
        "end_skew_us": _only(found.end - found.first_end, several),
        "skew_uncertainty_us": skew_uncertainty(matched)[order] / 1000.0,
        "last_rank": [rank if shared else None for rank, shared in zip(last.tolist(), certain.tolist(), strict=True)],
        "compute_pct": _compute_of_groups(matched, np.arange(len(order)), len(order))[order],
    }
    return Answer(values, _notes(matched, found))


@view(
    "collectives",
    _WHAT
    + columns(
        ("sequence", "int", "", "PyTorch's sequence number in the process group"),
        ("ranks_seen", "int", "", "number of ranks whose traces contain it"),
        ("start_ns", "int", "ns", "Unix time at which the first rank began"),
        ("duration_us", "float", "us", "time until the last rank ended"),
        ("transfer_us", "float", "us", "shortest duration over all ranks: that of the rank that waited least"),
        ("algbw_gb_s", "float", "GB/s", "bytes / transfer_us"),
        ("busbw_gb_s", "float", "GB/s", "algbw times the factor of the collective (nccl-tests)"),
        ("start_skew_us", "float", "us", "time between the starts of the first and the last rank"),
        ("end_skew_us", "float", "us", "time between the ends of the first and the last rank"),
        ("skew_uncertainty_us", "float", "us", "maximum error of the skews due to the clocks, in either direction"),
        ("last_rank", "int", "", "rank that began last; missing if the clocks are too uncertain to tell"),
        (
            "compute_pct",
            "float",
            "%",
            "share of its time, over all ranks, in which other kernels ran on the same GPU; missing on the host",
        ),
    ),
    reduce=_list,
    nothing=NO_COLLECTIVES,
)
def collective_instances(context: Context) -> RankCollectives:
    """Every NCCL or RCCL collective over all ranks, in order of time.

    Collectives are matched across ranks by process group and sequence number. The transfer time is the shortest
    duration over all ranks, because the durations of the others include waiting for the last rank. Bandwidths follow
    nccl-tests: algbw = size / time, busbw = algbw x 2(n-1)/n (all_reduce), (n-1)/n (all_gather, reduce_scatter,
    all_to_all, gather, scatter), 1 (others). Where the ranks' sizes differ (gather, scatter), the largest one counts.
    Traces do not show which algorithm and protocol NCCL chose: RING_LL in the name of a kernel does not indicate it.

    Options:
    - align: how the clocks of the ranks are compared. "auto" uses the measured offsets in the traces, refined by
      collectives (docs/analysis.md, "Several ranks in one file"), and the ends of collectives for ranks whose offset is
      unknown; "clock" uses only the measured offsets; "collectives" uses only the ends of collectives.
    """
    return context.get(rank_collectives)


def _largest(matched: MatchedCollectives, found: Instances) -> Ints:
    """Returns the description of each instance: that of the rank with the largest buffer; on a tie, of the last to
    begin.
    """
    size = np.array([-1 if d.bytes is None else d.bytes for d in matched.descriptions], np.int64)
    description = matched.description[found.row]
    if not len(matched):
        return description
    most = np.full(len(found.seen), -1, np.int64)
    own = size[matched.description]
    np.maximum.at(most, matched.instance, own)
    larger = np.flatnonzero((own == most[matched.instance]) & (own > size[description][matched.instance]))
    description[matched.instance[larger]] = matched.description[larger]
    return description


@dataclass(frozen=True, slots=True)
class _Rows:
    """How collectives are grouped into rows.

    of: the row number of each collective.
    names: the process groups of each row.
    """

    of: Ints
    descriptions: list[CollectiveDescription]
    names: list[str | None]


def _rows_of(descriptions: Sequence[CollectiveDescription], description: Ints, sizes: str, groups: str) -> _Rows:
    numbers: dict[tuple[CollectiveDescription, str | None], int] = {}
    row = np.zeros(len(descriptions), np.int64)
    names: list[dict[str, None]] = []
    for place in unique_values(description).tolist():
        entry = descriptions[place]
        kind = replace(entry, in_bytes=None, out_bytes=None)
        if groups == "alike":
            kind = replace(kind, ranks=(), group=None if entry.group_description is not None else entry.group)
        number = numbers.setdefault((kind, _size_text(entry.bytes, sizes)), len(numbers))
        names += [{}] * (number == len(names))
        names[number] = names[number] | ({} if entry.group is None else {entry.group: None})
        row[place] = number
    listed = [", ".join(list(each)[:MAX_NAMES]) + (", …" if len(each) > MAX_NAMES else "") or None for each in names]
    return _Rows(row[description], [kind for kind, _ in numbers], listed)


def _size_text(size: int | None, sizes: str) -> str | None:
    """Returns the text for the sizes of a row: this size, its range up to the next power of two, or all."""
    if size is None or sizes == "all":
        return None
    return str(size) if sizes == "exact" else str(size.bit_length())


def _grouped(
    partials: Sequence[tuple[int, RankCollectives]],
    *,
    align: AlignBy = "auto",
    sizes: Sizes = "exact",
    groups: Groups = "alike",
) -> Answer:
    matched = match(partials, align)
    found = instances(matched)
    description = _largest(matched, found)
    algorithm, bus = _bandwidths(matched.descriptions, description, found.transfer)
    rows = _rows_of(matched.descriptions, description, sizes, groups)
    several = found.seen > 1
    lone = ~several if several.any() else np.zeros(len(several), np.bool_)
    inverse = np.where(lone, len(rows.descriptions), rows.of)  # the last row is for those left out
    count = len(rows.descriptions) + 1
    calls = np.bincount(inverse, minlength=count)

    def total(values: AnyArray) -> Floats:
        return np.bincount(inverse, values.astype(np.float64), count).astype(np.float64)

    def largest(values: AnyArray) -> Floats:
        most = np.full(count, -np.inf)
        np.maximum.at(most, inverse, np.nan_to_num(values.astype(np.float64), nan=-np.inf))
        return np.where(np.isfinite(most), most, np.nan)

    def mean(values: AnyArray, weights: AnyArray) -> Floats:
        with np.errstate(divide="ignore", invalid="ignore"):
            return total(np.where(weights > 0, values, 0) * weights) / total(weights)

    size = np.array([np.nan if d.bytes is None else d.bytes for d in matched.descriptions], np.float64)
    sized = np.isfinite(size[description]) if len(description) else np.empty(0, np.bool_)
    time = total(found.transfer)
    skew = found.last_start - found.start
    last, share = _most_often_last(matched, found, inverse, count)
    order = np.argsort(-time[:-1], kind="stable")
    order = order[calls[order] > 0]
    known = np.isfinite(algorithm)
    values: dict[str, Any] = {
        "calls": calls,
        "total_us": time / 1000.0,
        "mean_us": time / 1000.0 / np.maximum(calls, 1),
        "min_us": -largest(-found.transfer) / 1000.0,
        "max_us": largest(found.transfer) / 1000.0,
        "wait_us": total(np.bincount(matched.instance, _waits(matched, found), len(found.seen))) / 1000.0,
        "algbw_gb_s": mean(np.nan_to_num(algorithm), known * found.transfer),
        "busbw_gb_s": mean(np.nan_to_num(bus), np.isfinite(bus) * found.transfer),
        "max_busbw_gb_s": largest(bus),
        "mean_start_skew_us": mean(skew, several.astype(np.int64)) / 1000.0,
        "max_start_skew_us": largest(np.where(several, skew, np.nan)) / 1000.0,
        "skew_uncertainty_us": _worst(skew_uncertainty(matched), inverse, several, count) / 1000.0,
        "last_rank": last,
        "last_rank_pct": share,
        "compute_pct": _compute_of_groups(matched, inverse, count),
    }
    picked = {name: _picked(column, order) for name, column in values.items()}
    described = _described(rows.descriptions, order)
    described["process_group"] = [rows.names[at] for at in order.tolist()]
    described["bytes"] = _whole(mean(np.nan_to_num(size[description]), sized.astype(np.int64)))[order].tolist()
    described["bytes"] = [None if value < 0 else value for value in described["bytes"]]
    notes = _notes(matched, found)
    if lone.any():
        notes.append(f"collectives recorded on only one rank are left out: {int(lone.sum())}")
    return Answer({**described, **picked}, notes)


def _whole(values: Floats) -> Ints:
    """Rounds the values; below 0 means unknown."""
    rounded: Ints = np.rint(np.nan_to_num(values, nan=-1)).astype(np.int64)
    return rounded


def _worst(values: Floats, group: Ints, several: Flags, count: int) -> Floats:
    """Returns the largest of each group; unknown if one is, or if no collective of it is on several ranks."""
    most = np.full(count, -np.inf)
    np.fmax.at(most, group[several], values[several])
    most[group[several & np.isnan(values)]] = np.nan
    return np.where(np.isneginf(most), np.nan, most)


def _picked(column: Any, order: Ints) -> Any:
    return [column[at] for at in order.tolist()] if isinstance(column, list) else column[order]


def _waits(matched: MatchedCollectives, found: Instances) -> Ints:
    """Returns how long (ns) each rank was in a collective beyond the transfer."""
    waited: Ints = matched.end - matched.start - found.transfer[matched.instance]
    return waited


def _compute_of_groups(matched: MatchedCollectives, group: Ints, count: int) -> Floats:
    own = np.bincount(group[matched.instance], matched.end - matched.start, count) if len(matched) else np.zeros(count)
    known = np.where(matched.compute_ns == UNKNOWN, np.nan, matched.compute_ns)
    computing = np.bincount(group[matched.instance], known, count) if len(matched) else own
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Floats = np.where(own > 0, 100 * computing / own, np.nan)
    return found


def _most_often_last(
    matched: MatchedCollectives, found: Instances, group: Ints, count: int
) -> tuple[list[int | None], Floats]:
    """Returns the rank that came last most often in each group, and in how many per cent of the collectives.

    None if it is no more often than by chance.
    """
    several, certain = found.seen > 1, last_ranks(matched, found).certain
    table = np.zeros((count, max(len(matched.ranks), 1)), np.int64)
    np.add.at(table, (group[certain], matched.rank[found.row[certain]]), 1)
    total = np.bincount(group[several], minlength=count)
    # expected count if each rank were last equally often
    chance = np.bincount(group[several], 1 / found.seen[several], count)
    spread = np.sqrt(np.bincount(group[several], (1 - 1 / found.seen[several]) / found.seen[several], count))
    most, times = table.argmax(1), table.max(1)
    clear = (total > 0) & (times >= chance + SIGMAS * spread)
    ranks: list[int | None] = [
        matched.ranks[at] if named else None for at, named in zip(most.tolist(), clear.tolist(), strict=True)
    ]
    with np.errstate(divide="ignore", invalid="ignore"):
        return ranks, np.where(clear, 100 * times / total, np.nan)


@view(
    "collective_summary",
    _WHAT
    + columns(
        ("calls", "int", "", "number of collectives of this kind"),
        ("total_us", "float", "us", "sum of their transfer times"),
        ("mean_us", "float", "us", "mean transfer time"),
        ("min_us", "float", "us", "shortest transfer time"),
        ("max_us", "float", "us", "longest transfer time"),
        ("wait_us", "float", "us", "time that all ranks spent in them beyond the transfers, waiting for the last rank"),
        ("algbw_gb_s", "float", "GB/s", "sum of bytes / total_us"),
        ("busbw_gb_s", "float", "GB/s", "algbw times the factor of the collective (nccl-tests)"),
        ("max_busbw_gb_s", "float", "GB/s", "bus bandwidth of the fastest one"),
        ("mean_start_skew_us", "float", "us", "mean time between the starts of the first and the last rank"),
        ("max_start_skew_us", "float", "us", "longest time between these starts"),
        ("skew_uncertainty_us", "float", "us", "maximum error of the skews due to the clocks, in either direction"),
        ("last_rank", "int", "", "rank that most often began last; missing if that may be chance"),
        ("last_rank_pct", "float", "%", "share of the collectives that it began last"),
        (
            "compute_pct",
            "float",
            "%",
            "share of their time, over all ranks, in which other kernels ran on the same GPU; missing on the host",
        ),
    ),
    reduce=_grouped,
    nothing=NO_COLLECTIVES,
)
def collective_summary(context: Context) -> RankCollectives:
    """The collectives of the view `collectives` grouped by kind, process group, size and type.

    Rows are sorted by the sum of the transfer times.

    Options:
    - sizes: which sizes share a row: "exact" (equal sizes), "log2" (from one power of two to just below the next, the
      steps of nccl-tests) or "all". Where a row covers several sizes, bytes is their mean.
    - groups: "alike" puts process groups with the same description and size into one row, for example all
      tensor-parallel groups; "each" keeps them apart.
    - align: as in the view `collectives`.
    """
    return context.get(rank_collectives)
