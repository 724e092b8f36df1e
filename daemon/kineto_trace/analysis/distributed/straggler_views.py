"""Which ranks the others wait for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.collectives.rank_clocks import RankCollectives
from kineto_trace.collectives.rank_matching import instances, match, rank_collectives, skew_uncertainty
from kineto_trace.compat.hta.hta_frame import hta_frame
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import NOTHING
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, Compat, view

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Steps = int | str | Sequence[int] | None
_HTA_PREFIX = "ncclKernel"  # not ncclDevKernel: HTA finds no stragglers in traces of newer versions of NCCL
_SHARE = 0.01  # of an iteration: what is shorter cannot make a rank late
_COLUMNS = ("rank", "candidate", "late_steps", "late_collectives", "caused_us", "mean_late_us", "uncertainty_us")


def _wanted(given: Steps) -> set[int] | None:
    """The numbers of the steps; None: all. Raises ViewError."""
    if given is None:
        return None
    if isinstance(given, str):
        parts = [part.strip() for part in given.split(",")]
        if not all(part.isdecimal() for part in parts):
            raise ViewError(f"option steps: {given!r} is no list of numbers like 3,4,5")
        return {int(part) for part in parts}
    return {given} if isinstance(given, int) else set(given)


@dataclass(frozen=True, slots=True)
class HtaRank:
    """HTA's candidates of one rank: communication kernels in steps. Times in µs.

    steps: numbers of the steps in the trace. first, last: per number of `iterations`, of all events in it.
    """

    steps: tuple[int, ...]
    iterations: Ints
    first: Floats
    last: Floats
    name: tuple[str, ...]
    stream: Ints
    iteration: Ints
    start: Floats
    duration: Floats


def _hta_rank(context: Context) -> HtaRank:
    frame, texts = context.get(hta_frame), context.trace.strings
    iterations, group = np.unique(frame.iteration, return_inverse=True)
    first, last = np.full(len(iterations), np.inf), np.full(len(iterations), -np.inf)
    np.minimum.at(first, group, frame.start / 1000.0)
    np.maximum.at(last, group, frame.end / 1000.0)
    communicates = np.array([text.startswith(_HTA_PREFIX) for text in texts], np.bool_)
    rows = np.flatnonzero(communicates[frame.name] & (frame.stream > 0) & (frame.iteration > 0))
    numbers = [
        texts[number][len("ProfilerStep") :]
        for number in np.unique(frame.name).tolist()
        if texts[number].startswith("ProfilerStep")
    ]
    return HtaRank(
        steps=tuple(int(text.strip(" #")) for text in numbers if text.strip(" #").isdecimal()),
        iterations=iterations,
        first=first,
        last=last,
        name=tuple(texts[number] for number in frame.name[rows].tolist()),
        stream=frame.stream[rows],
        iteration=frame.iteration[rows],
        start=frame.start[rows] / 1000.0,
        duration=frame.duration[rows] / 1000.0,
    )


def _last_kernels(
    partials: Sequence[tuple[int, HtaRank]], valid: set[int], begin: float, mean: float
) -> dict[tuple[int, str, int], dict[int, tuple[float, float]]]:
    """(stream, kernel, iteration): for each rank the last long kernel's start and duration, in mean iterations."""
    last: dict[tuple[int, str, int], dict[int, tuple[float, float]]] = {}
    for rank, part in partials:
        rows = np.flatnonzero(np.isin(part.iteration, list(valid)) & (part.duration >= _SHARE * mean))
        names, name = np.unique(np.array(part.name, object)[rows].astype(str), return_inverse=True)
        keys = np.stack([part.stream[rows], name, part.iteration[rows]])[:, ::-1]
        found, at = np.unique(keys, axis=1, return_index=True)  # of the reversed rows the first: the last one
        for (stream, number, iteration), row in zip(found.T.tolist(), rows[::-1][at].tolist(), strict=True):
            entry = ((float(part.start[row]) - begin) / mean, float(part.duration[row]) / mean)
            last.setdefault((stream, str(names[number]), iteration), {})[rank] = entry
    return last


def _hta_rows(partials: Sequence[tuple[int, HtaRank]], wanted: set[int] | None, candidates: int) -> Answer:
    available = {number for _, part in partials for number in part.steps}
    valid = available if wanted is None else wanted & available
    if not valid and wanted is None:
        return Answer({name: [] for name in _COLUMNS}, ["HTA fails here: the traces have no steps (ProfilerStep#N)"])
    if not valid:
        raise ViewError(
            f"none of the steps {sorted(wanted or ())} is in the traces as HTA keeps them: {sorted(available)}"
        )
    spans = [
        (part.first[at], part.last[at], part.iterations[at])
        for _, part in partials
        for at in np.flatnonzero(np.isin(part.iterations, list(valid))).tolist()
    ]
    begin = min((low for low, _, _ in spans), default=0.0)
    mean = (max((high for _, high, _ in spans), default=0.0) - begin) / max(1, len({number for _, _, number in spans}))
    last = _last_kernels(partials, valid, begin, mean)
    spread: dict[tuple[int, str], list[float]] = {}
    for (stream, name, _), of_ranks in last.items():
        if len(of_ranks) > 1:
            spread.setdefault((stream, name), []).append(float(np.std([d for _, d in of_ranks.values()], ddof=1)))
    if not spread:
        return Answer(
            {name: [] for name in _COLUMNS},
            [
                "HTA finds no stragglers here: it looks for kernels called ncclKernel…, of at least 1 % of an "
                "iteration, on several ranks"
            ],
        )
    chosen = max(sorted(spread), key=lambda key: float(np.mean(spread[key])))
    times = {number: of_ranks for (stream, name, number), of_ranks in last.items() if (stream, name) == chosen}
    late = dict.fromkeys(sorted({rank for of_ranks in times.values() for rank in of_ranks}), 0)
    for of_ranks in times.values():
        threshold = sorted((start for start, _ in of_ranks.values()), reverse=True)[min(candidates, len(of_ranks)) - 1]
        for rank, (start, _) in of_ranks.items():
            late[rank] += start >= threshold
    ordered = sorted(late, key=lambda rank: -late[rank])
    values: dict[str, Any] = {
        "rank": ordered,
        "candidate": [place < candidates for place in range(len(ordered))],
        "late_steps": [late[rank] for rank in ordered],
        "late_collectives": [None] * len(ordered),
        "caused_us": [None] * len(ordered),
        "mean_late_us": [None] * len(ordered),
        "uncertainty_us": [None] * len(ordered),
    }
    return Answer(values, [f"by the starts of {chosen[1]} on stream {chosen[0]}"])


def _rows(
    partials: Sequence[tuple[int, Any]],
    *,
    compat: Compat = Compat.NONE,
    steps: Steps = None,
    num_candidates: int = 2,
    align: str = "auto",
) -> Answer:
    wanted, candidates = _wanted(steps), max(1, num_candidates)
    if compat is Compat.HTA:
        return _hta_rows(partials, wanted, candidates)
    matched = match(partials, align)
    found = instances(matched)
    step = matched.step[np.unique(matched.instance, return_index=True)[1]]  # as its first rank counts
    several = found.seen > 1
    if wanted is not None:
        if not wanted & set(step.tolist()):
            known = sorted(set(step.tolist()) - {NOTHING})
            raise ViewError(f"no collective was launched in the steps {sorted(wanted)}; there are: {known}")
        several &= np.isin(step, list(wanted))
    count = len(matched.ranks)
    late = matched.start - found.start[matched.instance]
    # what the last one costs: its start less that of the one before it
    other = np.full(len(found.seen), np.iinfo(np.int64).min)
    rest = np.ones(len(matched), np.bool_)
    rest[found.row] = False
    np.maximum.at(other, matched.instance[rest], matched.start[rest])
    caused = np.where(several, found.last_start - other, 0)
    own = several[matched.instance]
    blamed = matched.rank[found.row[several]]
    caused_by = np.bincount(blamed, caused[several], count)
    times = np.bincount(blamed[caused[several] > 0], minlength=count)
    seen = np.bincount(matched.rank[own], minlength=count)
    lateness = np.bincount(matched.rank[own], late[own], count)
    mean_late = lateness / np.maximum(seen, 1)
    apart = skew_uncertainty(matched)[matched.instance[own]]
    uncertainty = np.bincount(matched.rank[own], apart, count) / np.where(seen > 0, seen, np.nan)
    numbers, place = np.unique(step, return_inverse=True)
    by_step = np.zeros((len(numbers), count), np.int64)
    np.add.at(by_step, (place[several], blamed), caused[several])
    order = np.argsort(-caused_by, kind="stable")
    ranks = np.array(matched.ranks, np.int64)
    values = {
        "rank": ranks[order],
        "candidate": (np.arange(count) < candidates) & (caused_by[order] > 0),
        "late_steps": _late_steps(by_step, candidates)[order],
        "late_collectives": times[order],
        "caused_us": caused_by[order] / 1000.0,
        "mean_late_us": mean_late[order] / 1000.0,
        "uncertainty_us": uncertainty[order] / 1000.0,
    }
    notes = [*matched.notes, *matched.clock_notes]
    doubtful = [str(matched.ranks[at]) for at in order[:candidates] if 0 < mean_late[at] < uncertainty[at]]
    if doubtful:
        notes.append(
            f"rank {', '.join(doubtful)}: mean_late_us is less than it may be off by the clocks; the view rank_waits "
            "needs none"
        )
    if not several.any():
        notes.append("no collective is seen on several ranks: nobody waited for anybody as far as the traces tell")
    return Answer(values, notes)


def _late_steps(by_step: Ints, candidates: int) -> Ints:
    """For each rank: in how many steps it is among those that cost the others most."""
    if not by_step.size:
        return np.zeros(by_step.shape[1], np.int64)
    rank_of = np.argsort(np.argsort(-by_step, axis=1, kind="stable"), axis=1, kind="stable")
    found: Ints = ((rank_of < candidates) & (by_step > 0)).sum(0)
    return found


@view(
    "stragglers",
    columns(
        ("rank", "int", "", "rank of the process in its job"),
        ("candidate", "bool", "", "it is among the ranks that the others waited for most"),
        ("late_steps", "int", "", "steps in which it was among these"),
        ("late_collectives", "int", "", "collectives that it began last"),
        ("caused_us", "float", "us", "sum over these: how much later it began than the last but one"),
        ("mean_late_us", "float", "us", "how much later than the first rank it began a collective, on average"),
        ("uncertainty_us", "float", "us", "how far mean_late_us may be off by the clocks, on either side"),
    ),
    compat=(Compat.HTA,),
    reduce=_rows,
)
def stragglers(context: Context, *, compat: Compat = Compat.NONE) -> RankCollectives | HtaRank:
    """The ranks that the others wait for, those first that cost most.

    All collectives that several ranks have count, matched by process group and sequence number. Whoever begins one
    last is late; that costs the group what lies between its begin and that of the last but one.

    steps: numbers of steps ("3,4,5"), all if not given. num_candidates: how many ranks are marked as candidates.
    align: how the clocks of the ranks are compared, as in view collectives.

    compat "hta": get_potential_stragglers. Of the kernels called ncclKernel… (not ncclDevKernel…) that last at least
    1 % of a mean iteration, the last one per rank, stream, iteration and name; of these the stream and name whose
    durations differ most between ranks (mean over iterations of the standard deviation); in every iteration the
    num_candidates ranks that begin it last are late; candidates are those that are late in most iterations. Clocks
    are taken for right, and the last step is left out.
    """
    return context.get(_hta_rank) if compat is Compat.HTA else context.get(rank_collectives)
