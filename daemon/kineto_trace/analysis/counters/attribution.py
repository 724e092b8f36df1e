"""The counters of groups of GPU activities: measured where they run alone for several samples, else worked out.

Theory of operation
    Each GPU is looked at alone, and so are counters that were not sampled at the same times. Only samples count that
    lie in the window of the trace as a whole and in time for which the GPU's activities were recorded.

    direct   At least WHOLE_SHARE of the time in which the group runs alone lies in samples that lie in it as a whole,
             and these are WHOLE_SAMPLES or more: the value is their mean by time. So it is for activities that last
             three samples or longer.
    fit      Otherwise least squares over all samples (share_fit.py). The value is stated if the group ran alone for
             LEAST_SAMPLES samples' length, if the fit has the evidence of EVIDENCE samples in it alone, and if the 95 %
             interval of the value is at most plus or minus ERROR of the scale (100 % of a percentage, of another
             counter its largest sample), and if the fit leaves at most RESIDUAL of the scale of the samples in which
             the group ran: more says that groups have no one value, which shifts those of the others as well.

    Activities of a group that last twice as long as others have a column of their own in the fit; the group's value is
    the mean of its columns by their time. What is not stated says why. A group of which less than ALONE of the time is
    its own has no value: that of the GPU would be somebody else's as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.counters.device_tiles import MAX_GROUPS, DeviceTiles, Runs, device_tiles, pieces_of
from kineto_trace.analysis.counters.sampled_counters import PERCENT, SampledCounter, sampled_counters, tracks_of
from kineto_trace.analysis.counters.share_fit import Observed, ShareFit, fit
from kineto_trace.arrays.row_groups import group as grouped
from kineto_trace.model.context import Context
from kineto_trace.model.trace import GPU_TABLES
from kineto_trace.structure.activity_links import gpu
from kineto_trace.structure.recorded_time import unrecorded

NOT_STATED, DIRECT, FIT = range(3)
METHODS = ("not stated", "direct", "fit")
WHOLE_SHARE, WHOLE_SAMPLES = 0.6, 3
LEAST_SAMPLES = 50  # lengths: 50 ms at 1 ms
EVIDENCE = 2.0  # samples
ERROR = 0.10  # of the scale
RESIDUAL = 0.08  # of the scale: what one value for each group leaves of samples, if it is a good description
ALONE = 0.2  # of the group's time
NORMAL_95 = 1.96  # deviations
RARE = 0.05  # of a group's time
MAX_COMBINATIONS = 512  # groups that are looked at, those with the most time
_NO_SAMPLES = "no sample lies in the time of the trace"
_MANY = "not enough evidence: too many others take more time"
_COLLINEAR = "not enough evidence: it ran in the same proportion to others in every sample"

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Grouping:
    """number: of each GPU activity (parts.gpu) its group, 0 to len(names) - 1; below 0: it is left out, as if idle.

    sums: [group, part], of which groups each one consists; None: of itself alone.
    """

    number: Ints
    names: Sequence[str]
    sums: npt.NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True)
class DeviceCounters:
    """The counters of groups on one GPU: [group, track]. group: numbers, those with the most time first.

    value: NaN: not stated. error: 95 % interval, plus or minus. residual: what the value leaves of samples (root mean
    square). method: number into METHODS; why: what is missing for a value, "" if there is one. total_ns: time of the
    activities; shared_pct: how much of it others ran as well.
    """

    device: int
    tracks: tuple[SampledCounter, ...]
    group: Ints
    total_ns: Ints
    shared_pct: Floats
    value: Floats
    error: Floats
    residual: Floats
    method: npt.NDArray[np.int64]
    why: npt.NDArray[np.object_]

    def of(self, label: str) -> Floats:
        """Returns the values of the counter with this label; NaN if there is none."""
        place = next((at for at, track in enumerate(self.tracks) if track.label == label), -1)
        return self.value[:, place] if place >= 0 else np.full(len(self.group), np.nan)

    def error_of(self, label: str) -> Floats:
        """Returns the 95 % intervals of the counter with this label, plus or minus; NaN if there is none."""
        place = next((at for at, track in enumerate(self.tracks) if track.label == label), -1)
        return self.error[:, place] if place >= 0 else np.full(len(self.group), np.nan)


def attribute(context: Context, grouping: Grouping) -> tuple[DeviceCounters, ...]:
    """Returns the counters of each group on each GPU that has samples and ran any of them."""
    devices = sorted({track.device for track in context.get(sampled_counters)})
    found = [_of_device(context, grouping, device) for device in devices]
    return tuple(each for each in found if len(each.group))


def usable(context: Context, track: SampledCounter) -> npt.NDArray[np.bool_]:
    """Tells for each sample whether all that the GPU did meanwhile is in the trace."""
    trace = context.trace
    inside: npt.NDArray[np.bool_] = (track.start >= trace.window_start_ns) & (track.end <= trace.window_end_ns)
    inside &= unrecorded(trace, GPU_TABLES).within(track.start, track.end) == 0
    return inside


def _of_device(context: Context, grouping: Grouping, device: int) -> DeviceCounters:
    activity, count, trace = context.get(gpu), len(grouping.names), context.trace
    own = (activity.device == device) & (grouping.number >= 0)
    start, end = activity.start[own], activity.end[own]
    kinds = _by_length(grouping.number[own], end - start)
    runs = Runs(start, end, kinds.number, len(kinds.group))
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


class _Kinds(NamedTuple):
    """number: of each activity its kind; group: of each kind."""

    number: Ints
    group: Ints


def _by_length(number: Ints, length: Ints) -> _Kinds:
    """Divides groups by how long their activities last, each time twice as long.

    Kernels of one name differ in how they use the GPU most of all if they differ in size. Rare kinds count as the most
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
    usual[of_kind[order]] = order  # the last one counts: that with the most time
    kept = took >= RARE * total[of_kind]
    if np.count_nonzero(kept) > MAX_GROUPS:
        kept[:] = False
    return _Kinds(np.where(kept, np.arange(len(took)), usual[of_kind])[found.number], of_kind)


def _grids(tracks: Sequence[SampledCounter]) -> list[list[int]]:
    """Places of counters whose samples have the same times."""
    found: dict[tuple[bytes, bytes], list[int]] = {}
    for place, track in enumerate(tracks):
        found.setdefault((track.start.tobytes(), track.end.tobytes()), []).append(place)
    return list(found.values())


def _fill(
    context: Context,
    found: DeviceCounters,
    places: Sequence[int],
    tiles: DeviceTiles,
    part: npt.NDArray[np.bool_],
    names: Sequence[str],
) -> None:
    """Puts the values of counters that were sampled at the same times in their places.

    part: [group, column], of which columns each group consists. names: of the columns.
    """
    first = found.tracks[places[0]]
    rows = np.flatnonzero(usable(context, first))
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
    solved = fit(Observed(pieces, value, (end - start) / length, upper, tiles.columns), combinations)
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
    """Says that a group hardly ran alone; "": it did."""
    if found.shared_pct[row] <= 100 * (1 - ALONE):
        return ""
    return f"other work ran during {found.shared_pct[row]:.3g} % of its time"


def _evidence(solved: ShareFit, at: int, alone: float) -> str:
    """Why nothing is stated of a combination that ran alone for so many samples' length; "": something may be."""
    if alone < LEAST_SAMPLES:
        return f"not enough evidence: it ran alone for {alone:.3g} samples, and {LEAST_SAMPLES} are needed"
    return _COLLINEAR if solved.samples[at] < EVIDENCE else ""


def _partner(solved: ShareFit, column: int, tiles: DeviceTiles, names: Sequence[str]) -> str:
    """Says with what a group is collinear, if that is one other group or idle time."""
    other = int(solved.partner[column])
    if other >= len(names) and other != tiles.idle:
        return ""
    name = "idle time" if other == tiles.idle else names[other]
    if name == names[column]:
        return ""
    return f"not enough evidence: samples do not tell it from {name}"


def _width(error: float, scale: float, percent: float) -> str:
    """Why a value is not stated whose 95 % interval is this wide; "": it is narrow enough."""
    if error <= ERROR * scale:
        return ""
    shown = f"{error:.3g} points" if percent else f"{100 * error / max(scale, 1e-300):.3g} % of the largest sample"
    return f"not enough evidence: ± {shown}" if np.isfinite(error) else "not enough evidence: others tell it as well"


def _misfit(residual: float, scale: float, percent: float) -> str:
    """Why a value is not stated that leaves so much of the samples; "": it describes them."""
    if residual <= RESIDUAL * scale:
        return ""
    shown = (
        f"{residual:.3g} points" if percent else f"{100 * residual / max(scale, 1e-300):.3g} % of the largest sample"
    )
    return f"not enough evidence: samples differ from what one value for each would make them by {shown}"
