"""Hardware counters of groups of GPU activities: measured where a group runs alone for several samples, else estimated.

Theory of operation
    Each GPU is evaluated on its own, and so are counters that were not sampled at the same times. A sample counts only
    if it lies entirely in the window of the trace and in time for which the GPU's activities were recorded.

    direct   At least WHOLE_SHARE of the time in which the group runs alone is covered by WHOLE_SAMPLES or more samples
    that lie entirely in it: the value is their time-weighted mean. This holds for activities that last three samples or
    longer. fit      Otherwise least squares over all samples (share_fit.py). The value is stated if the group ran alone
    for
             LEAST_SAMPLES samples' length, if the fit has the evidence of EVIDENCE samples in it alone, and if the 95 %
             interval of the value is at most plus or minus ERROR of the scale (100 % of a percentage, of another
             counter its largest sample), and if the fit leaves at most RESIDUAL of the scale of the samples in which
             the group ran: a larger one means that groups have no single value, which distorts the others too.

    Activities of a group that last twice as long as others have a column of their own in the fit; the group's value is
    the time-weighted mean of its columns. A missing value has a reason. A group that runs alone for less than ALONE of
    its time has no value, since its samples also measure other groups.

Which groups of GPU activities run when on one GPU: pieces of time in which nothing changes, without holes.
    The starts and ends of all activities, in order, cut the time into tiles. Three running sums tell what runs in a
    tile: how many activities (c), the sum of the numbers of their groups (s) and of the squares of these (q). All are
    of one group exactly if c·q = s² (Cauchy and Schwarz), and the group is then s / c. A set of several groups is
    identified by a sum of random numbers, one for each group, modulo 2**64.

    A tile has a column: that of its group, one for the time in which nothing runs, or one for each set of groups that
    run at once; of these the MAX_SETS with the most time have a column of their own, and all others share one. Of the
    groups, MAX_GROUPS have columns, those with the most time; the rest share one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kineto_trace.analysis.counters.sampled_counters import PERCENT, SampledCounter, sampled_counters, tracks_of
from kineto_trace.arrays.codec import Interner
from kineto_trace.arrays.intervals import cut
from kineto_trace.arrays.row_groups import group as grouped
from kineto_trace.base.array_types import NOTHING, Flags, Floats, Ints, Objects, UInts64
from kineto_trace.model.context import Context
from kineto_trace.model.trace import GPU_TABLES
from kineto_trace.structure.activity_links import gpu
from kineto_trace.structure.nesting import unrecorded

NOT_STATED, DIRECT, FIT = range(3)
METHODS = ("not stated", "direct", "fit")
WHOLE_SHARE, WHOLE_SAMPLES = 0.6, 3
LEAST_SAMPLES = 50  # sample lengths: 50 ms at 1 ms
EVIDENCE = 2.0  # samples
ERROR = 0.10  # of the scale
RESIDUAL = 0.08  # of the scale: residual that a good model of one value per group may leave
ALONE = 0.2  # share of the group's time
NORMAL_95 = 1.96  # standard deviations
RARE = 0.05  # share of a group's time
MAX_COMBINATIONS = 512  # groups that are evaluated, those with the most time
_NO_SAMPLES = "no sample lies entirely within the recorded time"
_MANY = f"not evaluated: only the {MAX_COMBINATIONS} with the most GPU time are"
_COLLINEAR = "not enough evidence: it ran in the same proportion to other work in every sample"
BLOCK = 8192  # samples
_TINY = 1e-9  # of the largest eigenvalue: smaller ones count as 0
_WITHIN = 1e-4  # share of a combination that may lie in an undetermined direction
_WHOLE = 0.999  # share of a sample that lies in the columns of one combination
_STEPS = 200  # of the descent, at most
_SETTLED = 1e-6  # of the scale of the values
MAX_GROUPS, MAX_SETS = 200, 24  # columns of a fit, whose cost grows with their square


@dataclass(frozen=True, slots=True)
class ShareFit:
    """Result of a least-squares fit.

    value, error: [combination, metric]; the standard error is infinite where nothing is known.
    samples: per combination, the number of samples in it alone that would be equally strong evidence.
    residual: [column, metric], the root mean square residual of the samples, weighted by the share of the column.
    whole: per combination, the number of samples that lie in its columns alone.
    whole_length, whole_mean, whole_error: of these samples, the sum of weights, the weighted mean and its standard
        error.
    partner: per column, the column it is hardest to tell apart from; itself if there is none.
    """

    value: Floats
    error: Floats
    samples: Floats
    residual: Floats
    whole: Ints
    whole_length: Floats
    whole_mean: Floats
    whole_error: Floats
    partner: Ints


@dataclass(frozen=True, slots=True)
class Grouping:
    """Groups of GPU activities.

    number: per GPU activity (parts.gpu) its group, 0 to len(names) - 1; below 0 it is left out, as if idle.
    sums: [group, part], the parts of each group; None if each group is its own only part.
    """

    number: Ints
    names: Sequence[str]
    sums: Flags | None = None


@dataclass(frozen=True, slots=True)
class DeviceCounters:
    """The counters of groups on one GPU: [group, track].

    group: numbers, those with the most time first.
    value: NaN if it is not stated.
    error: 95 % interval, plus or minus.
    residual: root mean square residual of the samples.
    method: number into METHODS.
    why: reason why a value is missing; "" if there is one.
    total_ns: time of the activities.
    shared_pct: share of that time in which other groups ran as well, in %.
    """

    device: int
    tracks: tuple[SampledCounter, ...]
    group: Ints
    total_ns: Ints
    shared_pct: Floats
    value: Floats
    error: Floats
    residual: Floats
    method: Ints
    why: Objects

    def of(self, label: str) -> Floats:
        """Returns the values of the counter with this label; NaN if there is none."""
        place = next((at for at, track in enumerate(self.tracks) if track.label == label), -1)
        return self.value[:, place] if place >= 0 else np.full(len(self.group), np.nan)

    def error_of(self, label: str) -> Floats:
        """Returns the 95 % intervals of the counter with this label, plus or minus; NaN if there is none."""
        place = next((at for at, track in enumerate(self.tracks) if track.label == label), -1)
        return self.error[:, place] if place >= 0 else np.full(len(self.group), np.nan)


class _Kinds(NamedTuple):
    """Kinds of activities.

    number: per activity, its kind.
    group: per kind, its group.
    """

    number: Ints
    group: Ints


class GroupedActivities(NamedTuple):
    """GPU activities of one GPU (Unix ns), each with the number of its group, 0 to `groups` - 1."""

    start: Ints
    end: Ints
    group: Ints
    groups: int


class DeviceTiles(NamedTuple):
    """Tiles in order, without holes.

    column: of each tile.
    groups: the group of each of the first columns, which have one group each; then come the column of all other groups
        and that of idle time.
    columns: number of columns.
    total_ns: per group, the sum of its durations.
    shared_ns: per group, the part of total_ns in which other groups ran as well, or which has no column of its own.
    """

    start: Ints
    end: Ints
    column: Ints
    groups: Ints
    columns: int
    total_ns: Ints
    shared_ns: Ints

    @property
    def idle(self) -> int:
        """Returns the column of the time in which nothing runs."""
        return len(self.groups) + 1


class SamplePieces(NamedTuple):
    """Parts of samples in order of time.

    share: fraction of the sample's length that lies in a tile of this column.
    """

    sample: Ints
    column: Ints
    share: Floats


# Values of groups from samples that are longer than what runs in them: bounded least squares with its evidence.
#
# The value of a sample is taken as the mean of the values of what ran in it, weighted by the
# share of its length: y = A x, with a column of A for each group, for each set of groups at once, and for idle time,
# so that each row of A sums to 1. Samples weigh as much as they are long. x is the least-squares solution with 0 <= x
# <= 100 for percentages and x >= 0 for others (coordinate descent on the normal equations, which are positive
# semidefinite: it converges for any A).
# The unbounded problem shows how well x is determined. N = A'WA. The value of a combination c'x (c: one column, or
# a mean over several) has as much evidence as 1 / (c' N⁺ c) samples that lie in it alone. Collinear columns, such as
# those of kernels that always run in the same proportion, have next to none, however much time they take: this is
# their share squared, less what the other columns explain of it (the variance inflation). Its variance is the larger
# one of two: that of equal errors, σ² c'N⁺c, and the sandwich with each sample's own error over one less its leverage
# (HC3), which holds if groups differ in how well one value describes them.
# Memory is bounded: A is made in blocks of BLOCK samples.
class FitSamples(NamedTuple):
    """Samples as input of the fit.

    value: [sample, metric].
    weight: per sample; 1 for a usual one.
    upper: per metric, its largest possible value.
    """

    pieces: SamplePieces
    value: Floats
    weight: Floats
    upper: Floats
    columns: int


def _blocks(observed: FitSamples) -> Iterator[tuple[slice, Floats]]:
    """Yields the rows of A in blocks."""
    count, pieces, columns = len(observed.value), observed.pieces, observed.columns
    borders = np.searchsorted(pieces.sample, np.arange(0, count + BLOCK, BLOCK))
    for place, first in enumerate(range(0, count, BLOCK)):
        rows = min(BLOCK, count - first)
        own = slice(int(borders[place]), int(borders[place + 1]))
        at = (pieces.sample[own] - first) * columns + pieces.column[own]
        shares = np.bincount(at, pieces.share[own], rows * columns).astype(np.float64)
        yield slice(first, first + rows), shares.reshape(rows, columns)


def fit(observed: FitSamples, combinations: Floats) -> ShareFit:
    """Returns the values of combinations of columns: [column, combination], whose sums over the columns are 1."""
    columns, metrics = observed.columns, observed.value.shape[1]
    scale = np.maximum(np.abs(observed.value).max(axis=0, initial=0), 1e-300)
    normal, right = np.zeros((columns, columns)), np.zeros((columns, metrics))
    parts = (combinations > 0).astype(np.float64)
    whole, of_whole = np.zeros((3, parts.shape[1])), np.zeros((2, parts.shape[1], metrics))
    for rows, shares in _blocks(observed):
        value = observed.value[rows] / scale
        weighted = shares * observed.weight[rows, None]
        normal += shares.T @ weighted
        right += weighted.T @ value
        inside = (shares @ parts >= _WHOLE).astype(np.float64)
        heavy = inside * observed.weight[rows, None]
        whole += np.stack([each.sum(axis=0) for each in (inside, heavy, heavy**2)])
        of_whole += np.stack([heavy.T @ value, heavy.T @ value**2])
    inverse, unknown = _inverse(normal)
    freedom = max(len(observed.value) - columns + unknown.shape[1], 1)
    solved = _bounded(normal, right, inverse @ right, observed.upper / scale)
    spread = inverse @ combinations
    informed = np.einsum("ck,ck->k", combinations, spread)
    left, variance, residual = np.zeros(metrics), np.zeros((combinations.shape[1], metrics)), np.zeros_like(right)
    for rows, shares in _blocks(observed):
        weight = observed.weight[rows, None]
        rest = observed.value[rows] / scale - shares @ solved
        leverage = weight[:, 0] * np.einsum("sc,sc->s", shares @ inverse, shares)
        left += (weight * rest**2).sum(axis=0)
        residual += shares.T @ rest**2
        influence = (shares * weight) @ spread
        variance += (influence**2).T @ (rest / np.maximum(1 - leverage, 1e-3)[:, None]) ** 2
    variance = np.maximum(variance, informed[:, None] * (left / freedom)[None, :])
    hidden = np.abs(unknown.T @ combinations).max(axis=0, initial=0) > _WITHIN
    variance[hidden] = np.inf
    share = np.maximum(_sums(observed), 1e-300)
    number, heavy, squares = whole
    mean, square = of_whole / np.maximum(heavy, 1e-300)[:, None]
    several = number / np.maximum(number - 1, 1) * squares / np.maximum(heavy**2, 1e-300)
    return ShareFit(
        value=(combinations.T @ solved) * scale,
        error=np.sqrt(variance) * scale,
        samples=np.where(hidden, 0.0, 1 / np.maximum(informed, 1e-300)),
        residual=np.sqrt(residual / share[:, None]) * scale,
        whole=number.astype(np.int64),
        whole_length=heavy,
        whole_mean=mean * scale,
        whole_error=np.sqrt(np.maximum(square - mean**2, 0) * several[:, None]) * scale,
        partner=_partners(normal, inverse, unknown),
    )


def _sums(observed: FitSamples) -> Floats:
    found: Floats = np.bincount(observed.pieces.column, observed.pieces.share, observed.columns).astype(np.float64)
    return found


def _inverse(normal: Floats) -> tuple[Floats, Floats]:
    """Returns a generalized inverse, and the directions in which x may change without changing A x: [column,
    direction].
    """
    if not len(normal):
        return normal, normal
    diagonal = np.sqrt(np.maximum(np.diag(normal), 0))
    used = diagonal > 0
    by = 1 / np.where(used, diagonal, 1)
    values, vectors = np.linalg.eigh(normal * by[:, None] * by[None, :])
    kept = values > _TINY * max(float(values.max(initial=0)), 1e-300)
    scaled = vectors[:, kept] * by[:, None]
    lost = vectors[:, ~kept] * by[:, None]
    lost /= np.maximum(np.linalg.norm(lost, axis=0), 1e-300)
    return (scaled / values[kept]) @ scaled.T, lost


def _bounded(normal: Floats, right: Floats, begin: Floats, upper: Floats) -> Floats:
    """Returns the least-squares solution in [0, upper] of each metric: [column, metric]."""
    found = np.clip(np.nan_to_num(begin), 0, upper)
    diagonal = np.diag(normal)
    used = np.flatnonzero(diagonal > 0).tolist()
    gradient = normal @ found - right
    for _ in range(_STEPS):
        moved = 0.0
        for column in used:
            better = np.clip(found[column] - gradient[column] / diagonal[column], 0, upper)
            change = better - found[column]
            most = float(np.abs(change).max())
            if most > 0:
                gradient += np.outer(normal[:, column], change)
                found[column] = better
                moved = max(moved, most)
        if moved <= _SETTLED:
            break
    return found


def _partners(normal: Floats, inverse: Floats, unknown: Floats) -> Ints:
    """Returns for each column the one that can replace it most easily, by their covariance."""
    count = len(normal)
    if not count:
        return np.empty(0, np.int64)
    loose = inverse + (unknown @ unknown.T) * (float(np.abs(inverse).max(initial=0)) + 1) * 1e3
    deviation = np.sqrt(np.maximum(np.diag(loose), 1e-300))
    correlation = np.abs(loose / deviation[:, None] / deviation[None, :])
    np.fill_diagonal(correlation, 0)
    best = correlation.argmax(axis=1)
    return np.where(correlation.max(axis=1) > 0.5, best, np.arange(count))


def attribute(context: Context, grouping: Grouping) -> tuple[DeviceCounters, ...]:
    """Returns the counters of each group on each GPU that has samples and ran any of them."""
    devices = sorted({track.device for track in context.get(sampled_counters)})
    found = [_of_device(context, grouping, device) for device in devices]
    return tuple(each for each in found if len(each.group))


def usable_samples(context: Context, track: SampledCounter) -> Flags:
    """Returns for each sample whether the trace has everything the GPU did during it."""
    trace = context.trace
    inside: Flags = (track.start >= trace.window_start_ns) & (track.end <= trace.window_end_ns)
    inside &= unrecorded(trace, GPU_TABLES).within(track.start, track.end) == 0
    return inside


def _of_device(context: Context, grouping: Grouping, device: int) -> DeviceCounters:
    activity, count, trace = context.get(gpu), len(grouping.names), context.trace
    own = (activity.device == device) & (grouping.number >= 0)
    start, end = activity.start[own], activity.end[own]
    kinds = _by_length(grouping.number[own], end - start)
    runs = GroupedActivities(start, end, kinds.number, len(kinds.group))
    tiles = device_tiles(runs, trace.window_start_ns, trace.window_end_ns)
    total, shared = (
        np.bincount(kinds.group, each, count).astype(np.int64) for each in (tiles.total_ns, tiles.shared_ns)
    )
    sums = grouping.sums
    if sums is not None:
        total, shared = (sums @ each for each in (total, shared))
    group = np.argsort(-total, kind="stable")[: int(np.count_nonzero(total))]
    of_column = kinds.group[tiles.groups]
    part = group[:, None] == of_column[None, :] if sums is None else sums[np.ix_(group, of_column)]
    tracks = tuple(tracks_of(context, device).values())
    shape = (len(group), len(tracks))
    value, error, residual = np.full((3, *shape), np.nan)
    found = DeviceCounters(
        device=device,
        tracks=tracks,
        group=group,
        total_ns=total[group],
        shared_pct=100 * shared[group] / np.maximum(total[group], 1),
        value=value,
        error=error,
        residual=residual,
        method=np.zeros(shape, np.int64),
        why=np.full(shape, _NO_SAMPLES, object),
    )
    for places in _grids(tracks):
        _fill(context, found, places, tiles, part, [grouping.names[at] for at in of_column.tolist()])
    return found


def _by_length(number: Ints, length: Ints) -> _Kinds:
    """Divides groups by the length of their activities, in powers of two.

    Kernels with the same name use the GPU differently above all if they differ in size. Rare kinds count as the most
    usual one of their group, and all do if there are more kinds than columns.
    """
    found = grouped([number, np.log2(np.maximum(length, 1)).astype(np.int64)]) if len(number) else None
    if found is None:
        return _Kinds(number, np.empty(0, np.int64))
    of_kind = number[found.first]
    took = found.sums(np.maximum(length, 0))
    total = np.bincount(of_kind, took)
    usual = np.zeros(len(total), np.int64)
    order = np.argsort(took, kind="stable")
    usual[of_kind[order]] = order  # the last one wins: that with the most time
    kept = took >= RARE * total[of_kind]
    if np.count_nonzero(kept) > MAX_GROUPS:
        kept[:] = False
    return _Kinds(np.where(kept, np.arange(len(took)), usual[of_kind])[found.number], of_kind)


def _grids(tracks: Sequence[SampledCounter]) -> list[list[int]]:
    """Groups the places of counters whose samples have the same times."""
    found: dict[tuple[bytes, bytes], list[int]] = {}
    for place, track in enumerate(tracks):
        found.setdefault((track.start.tobytes(), track.end.tobytes()), []).append(place)
    return list(found.values())


def _fill(
    context: Context,
    found: DeviceCounters,
    places: Sequence[int],
    tiles: DeviceTiles,
    part: Flags,
    names: Sequence[str],
) -> None:
    """Fills in the values of counters that were sampled at the same times.

    part: [group, column], the columns of each group.
    names: of the columns.
    """
    first = found.tracks[places[0]]
    rows = np.flatnonzero(usable_samples(context, first))
    if not len(rows):
        return
    start, end = first.start[rows], first.end[rows]
    length = float(np.median(end - start))
    value = np.stack([found.tracks[place].value[rows] for place in places], axis=1)
    percent = np.array([found.tracks[place].unit == PERCENT for place in places])
    scale = np.where(percent, 100.0, value.max(axis=0, initial=0))
    pieces = pieces_of(tiles, start, end)
    seen = np.bincount(pieces.column, pieces.share * (end - start)[pieces.sample], tiles.columns)
    chosen = np.flatnonzero(part.any(axis=1))[:MAX_COMBINATIONS]
    found.why[:, places] = _MANY
    weight = part[chosen] * seen[: len(tiles.groups)]
    alone = weight.sum(axis=1)
    combinations = np.zeros((tiles.columns, len(chosen)))
    combinations[: len(tiles.groups)] = (weight / np.maximum(alone, 1e-300)[:, None]).T
    upper = np.where(percent, 100.0, np.inf)
    solved = fit(FitSamples(pieces, value, (end - start) / length, upper, tiles.columns), combinations)
    for at, row in enumerate(chosen.tolist()):
        column = int((part[row] * seen[: len(tiles.groups)]).argmax())
        inside = float(solved.whole_length[at]) * length
        direct = int(solved.whole[at]) >= WHOLE_SAMPLES and inside >= WHOLE_SHARE * alone[at]
        reason = _shared(found, row) or ("" if direct else _evidence(solved, at, alone[at] / length))
        if reason == _COLLINEAR:
            reason = _partner(solved, column, tiles, names) or reason
        errors = NORMAL_95 * (solved.whole_error[at] if direct else solved.error[at])
        values = solved.whole_mean[at] if direct else solved.value[at]
        residuals = np.sqrt(combinations[:, at] @ solved.residual**2)
        for metric, place in enumerate(places):
            told = reason
            if not told and not direct:
                told = _width(float(errors[metric]), scale[metric], percent[metric])
                told = told or _misfit(float(residuals[metric]), scale[metric], percent[metric])
            found.why[row, place] = told
            if not told:
                found.value[row, place], found.error[row, place] = values[metric], errors[metric]
                found.residual[row, place] = residuals[metric]
                found.method[row, place] = DIRECT if direct else FIT


def _shared(found: DeviceCounters, row: int) -> str:
    """Returns a reason if a group hardly ran alone, else ""."""
    if found.shared_pct[row] <= 100 * (1 - ALONE):
        return ""
    return f"other work ran during {found.shared_pct[row]:.3g} % of its time"


def _evidence(solved: ShareFit, at: int, alone: float) -> str:
    """Reason for withholding the estimate; "" if the evidence suffices. alone: samples in which only these ran."""
    if alone < LEAST_SAMPLES:
        return f"not enough evidence: it ran alone for only {alone:.3g} samples; {LEAST_SAMPLES} are needed"
    return _COLLINEAR if solved.samples[at] < EVIDENCE else ""


def _partner(solved: ShareFit, column: int, tiles: DeviceTiles, names: Sequence[str]) -> str:
    """Returns a text that names the group, or idle time, with which a group is collinear, if there is just one."""
    other = int(solved.partner[column])
    if other >= len(names) and other != tiles.idle:
        return ""
    name = "idle time" if other == tiles.idle else names[other]
    if name == names[column]:
        return ""
    return f"not enough evidence: the samples cannot distinguish it from {name}"


def _width(error: float, scale: float, percent: float) -> str:
    """Returns why a value with a 95 % interval this wide is not stated; "" if it is narrow enough."""
    if error <= ERROR * scale:
        return ""
    shown = f"{error:.3g} points" if percent else f"{100 * error / max(scale, 1e-300):.3g} % of the largest sample"
    told = f"the 95 % interval is ± {shown}" if np.isfinite(error) else "the samples cannot separate it from other work"
    return f"not enough evidence: {told}"


def _misfit(residual: float, scale: float, percent: float) -> str:
    """Returns why a value that leaves so large a residual is not stated; "" if it fits the samples."""
    if residual <= RESIDUAL * scale:
        return ""
    shown = (
        f"{residual:.3g} points" if percent else f"{100 * residual / max(scale, 1e-300):.3g} % of the largest sample"
    )
    return f"not enough evidence: a single value does not fit the samples (residual: {shown})"


def device_tiles(runs: GroupedActivities, low: int, high: int) -> DeviceTiles:
    """Returns what runs when in [low, high). Activities are cut off at both ends; those without duration are
    ignored.
    """
    start, end = np.clip(runs.start, low, high), np.clip(runs.end, low, high)
    lasting = end > start
    start, end, number = start[lasting], end[lasting], runs.group[lasting]
    total = np.bincount(number, end - start, runs.groups).astype(np.int64)
    order = np.argsort(-total, kind="stable")[: int(np.count_nonzero(total))]
    groups = order[:MAX_GROUPS]
    dense = np.full(runs.groups, len(groups), np.int64)  # groups without a column of their own share the next one
    dense[groups] = np.arange(len(groups))
    dense = dense[number]
    tile_start, tile_end, column, running = _tiled(start, end, dense, len(groups) + 1, low, high)
    alone = (column >= 0) & (column < len(groups))
    unshared = np.bincount(column[alone], (tile_end - tile_start)[alone] * running[alone], len(groups))
    shared = total.copy()
    shared[groups] -= unshared.astype(np.int64)
    columns = int(column.max(initial=NOTHING)) + 1
    return DeviceTiles(tile_start, tile_end, column, groups, max(columns, len(groups) + 2), total, shared)


def _tiled(start: Ints, end: Ints, group: Ints, groups: int, low: int, high: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Returns starts, ends and columns of tiles, and how many activities run in each."""
    time = np.concatenate([[low], start, end])
    order = np.argsort(time, kind="stable")
    time = time[order]
    sign = np.concatenate([[0], np.ones(len(start), np.int64), -np.ones(len(start), np.int64)])[order]
    number = np.concatenate([[0], group, group])[order]
    until = np.append(time[1:], high)
    lasting = until > time
    count, total, squares = (np.cumsum(sign * each)[lasting] for each in (np.ones_like(number), number, number**2))
    key = np.random.default_rng(0).integers(1, 1 << 63, groups, np.int64).astype(np.uint64)
    signed = np.where(sign > 0, key[number], np.uint64(0) - key[number]) * (sign != 0).astype(np.uint64)
    several = (count > 0) & (count * squares != total**2)
    column = np.where(count > 0, total // np.maximum(count, 1), groups)
    places = np.cumsum(signed)[lasting][several]
    column[several] = groups + 1 + _sets(places, (until - time)[lasting][several])
    return time[lasting], until[lasting], column, count


def _sets(key: UInts64, length: Ints) -> Ints:
    """Numbers of the sets with these keys: the longest first, those behind them all the same."""
    interner = Interner()
    number: Ints = interner.intern(key).astype(np.int64)
    took = np.bincount(number, length, len(interner.keys()))
    rank = np.empty(len(took), np.int64)
    rank[np.argsort(-took, kind="stable")] = np.arange(len(took))
    found: Ints = np.minimum(rank, MAX_SETS)[number]
    return found


def pieces_of(tiles: DeviceTiles, start: Ints, end: Ints) -> SamplePieces:
    """Cuts ordered, disjoint samples at the borders of the tiles."""
    borders = np.concatenate([start, end])
    borders.sort(kind="stable")
    found = cut(tiles.start, tiles.end, borders)
    sample = np.searchsorted(start, found.start, side="right") - 1
    inside = (sample >= 0) & (found.start < np.append(end, 0)[sample])
    sample = sample[inside]
    share = (found.end - found.start)[inside] / (end - start)[sample]
    return SamplePieces(sample, tiles.column[found.owner[inside]], share)
