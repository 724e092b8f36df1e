"""Per-step samples of one trace, or of the ranks of a job: what two traces are compared by.

Theory of operation
    A row is a name with a kind of time (on the host, on the GPU). Host events belong to the step in which they begin,
    GPU work to the step in which it was launched. `compared_steps` alone decides which steps count. The sums over the
    whole recording are kept beside the steps, for traces that have none.

    The ranks of a job become one set of samples: the n-th step is the mean over the ranks of their n-th steps. Ranks
    that wait for each other are not independent, so that their steps must not be counted as separate samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.row_groups import group
from kineto_trace.model.context import Context
from kineto_trace.model.trace import API_TABLES, GPU_TABLES, OP_TABLES
from kineto_trace.structure.activity_links import Steps, calls, gpu, steps
from kineto_trace.structure.recorded_time import unrecorded
from kineto_trace.structure.steps.step_pace import step_pace

HOST, GPU = "host", "gpu"
NS_PER_US = 1000
HOST_KINDS = (*OP_TABLES, *API_TABLES)
NEGLIGIBLE = 0.01  # of a step, that a source did not record
MAX_CELLS = 8_000_000  # of a matrix [row, step]: 64 MB

RAN_AHEAD = "the host ran ahead so far that GPU work of its steps is missing: it counts for the step in which it ran"

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TimedEvents:
    """Events of one kind of time. key: number of the row's name; at: when each counts (Unix ns); took: ns."""

    time: str
    key: Ints
    at: Ints
    took: Ints


@dataclass(frozen=True, slots=True)
class StepSamples:
    """Rows (name, kind of time) of one trace. us, calls: [row, step]; total_us, total_calls: of the whole window.

    steps: numbers of the whole steps. step_us: their durations. resolution_us: to which times are rounded.
    left_out: how many steps are not whole. pace_note: why others do not count, if there are any.
    inside: the same rows, and others, with what is inside of them; None: not asked for.
    """

    names: tuple[tuple[str, str], ...]
    us: Floats
    calls: Floats
    total_us: Floats
    total_calls: Floats
    steps: tuple[int, ...]
    step_us: Floats
    window_s: float
    resolution_us: float = 0.0
    left_out: int = 0
    pace_note: str = ""
    notes: tuple[str, ...] = ()
    inside: "StepSamples | None" = None

    def per_second(self) -> "StepSamples":
        """Returns the same with one column: the sums per second of the window."""
        seconds = self.window_s or float("nan")
        us, counted = ((values / seconds)[:, np.newaxis] for values in (self.total_us, self.total_calls))
        return replace(self, us=us, calls=counted, steps=(), step_us=np.empty(0))


def compared_steps(context: Context) -> Steps:
    """Returns the steps that show the pace of the program. Every diff chooses its steps here.

    These are the measured steps of all views (structure/steps/step_pace.py), without those that a source did not cover.
    If the host ran ahead in all of them, there are none.
    """
    found = context.get(steps)
    missing = sum(_uncovered(context, found, kinds) for kinds in (GPU_TABLES, HOST_KINDS))
    keep = found.complete.copy()
    keep[keep] = ~context.get(step_pace).untypical
    keep &= missing <= NEGLIGIBLE * (found.end - found.start)
    threads, counts = np.unique(found.thread[keep], return_counts=True)
    if len(threads) > 1:  # another loop on another thread would count the same time twice
        keep &= found.thread == threads[np.argmax(counts)]
    return Steps(**{field.name: getattr(found, field.name)[keep] for field in fields(Steps)})


def _uncovered(context: Context, found: Steps, kinds: Sequence[str]) -> Ints:
    """How long (ns) sources of these tables did not record in each step."""
    return unrecorded(context.trace, kinds).within(found.start, found.end)


@dataclass(frozen=True, slots=True)
class Moments:
    """For each GPU activity the moment that decides about its step (Unix ns). launched: whether it is its launch."""

    at: Ints
    launched: bool


def gpu_moments(context: Context) -> Moments:
    """Returns when GPU work was launched, or when it ran if work that was launched in the compared steps is missing.

    The GPU is behind a host that runs ahead: the recording ends before the work of the last steps has run. What ran in
    the first steps was launched before them, and if the host is ahead by more than the recorded steps, so was all.
    """
    activity, called, chosen = context.get(gpu), context.get(calls), context.get(compared_steps)
    own = np.append(context.trace.table("cpu_op")["start"], 0)
    start = np.where(activity.op >= 0, own[activity.op], activity.start)
    launch = np.where(activity.call >= 0, np.append(called.start, 0)[activity.call], start)
    took = activity.end - activity.start
    covered = [int(took[_step(chosen, at) >= 0].sum()) for at in (launch, activity.start)]
    pace = context.get(step_pace)
    lost = bool((~pace.recorded[np.isin(pace.number, chosen.number)])[-1:].any())
    ahead = lost or 2 * covered[0] < covered[1]
    return Moments(activity.start if ahead else launch, not ahead)


def _step(chosen: Steps, at: Ints) -> Ints:
    """For each moment the place of the step around it; -1: none."""
    found = np.searchsorted(chosen.start, at, "right") - 1
    inside = found >= 0
    inside[inside] = at[inside] < chosen.end[found[inside]]
    return np.where(inside, found, -1)


def samples(
    context: Context, parts: Sequence[TimedEvents], names: Sequence[str], notes: Sequence[str] = ()
) -> StepSamples:
    """Sums the events of each part by name and step. names: by the numbers in `key`."""
    chosen = context.get(compared_steps)
    count = len(chosen)
    made: list[tuple[list[tuple[str, str]], Floats, Floats, Floats, Floats]] = []
    for part in parts:
        groups = group([part.key]) if len(part.key) else None
        if groups is None:
            continue
        rows = len(groups)
        keep = np.arange(rows)
        total = np.bincount(groups.number, part.took, rows) / NS_PER_US
        if rows * max(count, 1) > MAX_CELLS:
            keep = np.sort(np.argsort(-total, kind="stable")[: MAX_CELLS // count])
        place = np.full(rows, -1)
        place[keep] = np.arange(len(keep))
        at = _step(chosen, part.at)
        inside = (at >= 0) & (place[groups.number] >= 0)
        cell = place[groups.number[inside]] * count + at[inside]
        shape = len(keep), count
        made.append(
            (
                [(names[number], part.time) for number in part.key[groups.first[keep]].tolist()],
                (np.bincount(cell, part.took[inside], shape[0] * count) / NS_PER_US).reshape(shape),
                np.bincount(cell, minlength=shape[0] * count).astype(np.float64).reshape(shape),
                total[keep],
                groups.sizes()[keep].astype(np.float64),
            )
        )
    told = list(notes)
    if any(part.time == GPU for part in parts) and not context.get(gpu_moments).launched:
        told.append(RAN_AHEAD)
    empty = np.empty((0, count))
    return StepSamples(
        names=tuple(name for part in made for name in part[0]),
        us=np.concatenate([empty, *(part[1] for part in made)]),
        calls=np.concatenate([empty, *(part[2] for part in made)]),
        total_us=np.concatenate([np.empty(0), *(part[3] for part in made)]),
        total_calls=np.concatenate([np.empty(0), *(part[4] for part in made)]),
        steps=tuple(chosen.number.tolist()),
        step_us=(chosen.end - chosen.start) / NS_PER_US,
        window_s=window_s(context),
        resolution_us=resolution_us(parts),
        left_out=_not_whole(context),
        pace_note=context.get(step_pace).note() or "",
        notes=tuple(told),
    )


def _not_whole(context: Context) -> int:
    """How many steps are not compared because they were not recorded completely."""
    every, chosen = len(context.get(steps)), len(context.get(compared_steps))
    return every - chosen - int(np.count_nonzero(context.get(step_pace).untypical))


def resolution_us(parts: Sequence[TimedEvents]) -> float:
    """Returns 1 if all durations are whole microseconds, as older versions of Kineto wrote them, else 0.001."""
    return 0.001 if any(np.any(part.took % NS_PER_US) for part in parts) else 1.0


def window_s(context: Context) -> float:
    """Returns the length of the recording in seconds."""
    return max(context.trace.window_end_ns - context.trace.window_start_ns, 0) / 1e9


def aligned(sides: Sequence[StepSamples]) -> list[StepSamples]:
    """Returns the same with the same rows in the same order; what a side does not have is 0 there."""
    names = tuple(dict.fromkeys(name for side in sides for name in side.names))
    place = {name: row for row, name in enumerate(names)}
    found = []
    for side in sides:
        at = np.array([place[name] for name in side.names], np.int64)
        full: dict[str, Any] = {}
        for key in ("us", "calls", "total_us", "total_calls"):
            values = getattr(side, key)
            full[key] = np.zeros((len(names), *values.shape[1:]))
            full[key][at] = values
        found.append(replace(side, names=names, **full))
    return found


def mean_of_ranks(ranks: Sequence[StepSamples]) -> StepSamples:
    """Returns the samples of a job: the n-th step is the mean over its ranks of their n-th steps."""
    if len(ranks) == 1:
        return ranks[0]
    sides = aligned(ranks)
    count = min(len(side.steps) for side in sides)
    first = sides[0]
    return StepSamples(
        names=first.names,
        us=np.mean([side.us[:, :count] for side in sides], axis=0),
        calls=np.mean([side.calls[:, :count] for side in sides], axis=0),
        total_us=np.mean([side.total_us for side in sides], axis=0),
        total_calls=np.mean([side.total_calls for side in sides], axis=0),
        steps=first.steps[:count],
        step_us=np.mean([side.step_us[:count] for side in sides], axis=0),
        window_s=float(np.mean([side.window_s for side in sides])),
        resolution_us=first.resolution_us,
        left_out=max(side.left_out for side in sides),
        pace_note=next((side.pace_note for side in sides if side.pace_note), ""),
        notes=tuple(dict.fromkeys(note for side in sides for note in side.notes)),
        inside=mean_of_ranks(inside) if (inside := [side.inside for side in sides if side.inside]) else None,
    )
