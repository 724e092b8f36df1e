"""HTA's stragglers in the view stragglers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.distributed.straggler_views import Steps, stragglers, wanted_steps
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.compat.hta.hta_frame import hta_frame
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from kineto_trace.view_api.view import Answer, Compat

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
_HTA_PREFIX = "ncclKernel"  # not ncclDevKernel: HTA finds no stragglers in traces of newer versions of NCCL
_SHARE = 0.01  # of an iteration: what is shorter cannot make a rank late
_COLUMNS = ("rank", "candidate", "late_steps", "late_collectives", "caused_us", "mean_late_us", "uncertainty_us")


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


def _rank(context: Context) -> HtaRank:
    frame, texts = context.get(hta_frame), context.trace.strings
    iterations, group = np.unique(frame.iteration, return_inverse=True)
    first, last = np.full(len(iterations), np.inf), np.full(len(iterations), -np.inf)
    np.minimum.at(first, group, frame.start / 1000.0)
    np.maximum.at(last, group, frame.end / 1000.0)
    communicates = np.array([text.startswith(_HTA_PREFIX) for text in texts], np.bool_)
    rows = np.flatnonzero(communicates[frame.name] & (frame.stream > 0) & (frame.iteration > 0))
    numbers = [
        texts[number][len("ProfilerStep") :]
        for number in unique_values(frame.name).tolist()
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


def _rows(partials: Sequence[tuple[int, HtaRank]], *, steps: Steps = None, num_candidates: int = 2) -> Answer:
    wanted, candidates = wanted_steps(steps), max(1, num_candidates)
    available = {number for _, part in partials for number in part.steps}
    valid = available if wanted is None else wanted & available
    if not valid and wanted is None:
        return Answer({name: [] for name in _COLUMNS}, ["HTA fails here: the traces have no steps (ProfilerStep#N)"])
    if not valid:
        raise ViewError(
            f"none of the steps {sorted(wanted or ())} is in the traces as HTA loads them: {sorted(available)}"
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


@stragglers.variant(Compat.HTA, reduce=_rows)
def hta_stragglers(context: Context) -> HtaRank:
    """compat=hta: the figures of get_potential_stragglers.

    HTA looks at kernels whose names begin with ncclKernel (not ncclDevKernel) and that last at least 1 % of a mean
    iteration, and of these at the last one per rank, stream, iteration and name. It keeps the stream and name whose
    durations differ most between ranks (standard deviation, averaged over iterations). In every iteration the
    num_candidates ranks that start this kernel last are late; the candidates are the ranks that are late in most
    iterations. HTA takes the clocks as they are, and leaves out the last step.
    """
    return context.get(_rank)
