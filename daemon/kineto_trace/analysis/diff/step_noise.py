"""Separates real differences of time per step from noise. Pure: arrays in, arrays out.

Theory of operation
    Each row (an operator, a kernel, …) has one value per step in two traces. The variation of these values from step to
    step is the noise by which the difference of their means is judged.

    - A row that every step of both traces has is judged by Welch's test. From ten steps on, Yuen's variant of it is
      used: the slowest and the fastest tenth of the steps count in neither mean nor interval.
    - Few values can lie close together by chance. The variance of a row is therefore at least a weighted mean of its
      own and the median of the rows of a similar size, and at least that of the rounding of the trace's times.
    - Steps that follow each other resemble each other. From ten steps on, the correlation of neighbours widens the
      interval as if there were as many fewer steps (as for an autoregressive process of first order).
    - A row that only some steps of a trace have is judged by ranks alone (Wilcoxon's test, exact for few steps):
      means of such rows are far from normal. It has no interval.
    - A row that every step of one trace has and no step of the other may be such a row by chance. Its probability is
      that of the ranks times the share of rows that only some steps have.
    - Many rows are judged at once. Of the rows that are called changed, at most ERROR_RATE are so by chance (Benjamini
      and Hochberg); the intervals are widened accordingly (Benjamini and Yekutieli), so that they exclude 0 for those
      rows. One row alone has the usual 95 % interval.

    With fewer than two steps on a side the noise is unknown, so nothing is judged.

Two traces are compared by per-step samples of a trace, or of the ranks of a job.
    A row is a name with a kind of time (on the host, on the GPU). Host events belong to the step in which they begin,
    GPU work to the step in which it was launched. `compared_steps` alone decides which steps count. The sums over the
    whole recording are kept beside the steps, for traces that have none.

    The ranks of a job become one set of samples: the n-th step is the mean over the ranks of their n-th steps. Ranks
    that wait for each other are not independent, so that their steps must not be counted as separate samples.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations
from typing import Any

import numpy as np

from kineto_trace.arrays.row_groups import group
from kineto_trace.base.array_types import Flags, Floats, Ints
from kineto_trace.model.context import Context
from kineto_trace.model.trace import API_TABLES, GPU_TABLES, OP_TABLES, TRUNCATED
from kineto_trace.structure.activity_links import Steps, calls, gpu, steps
from kineto_trace.structure.nesting import unrecorded
from kineto_trace.structure.step_pace import step_pace

ERROR_RATE = 0.05
MANY_STEPS = 10  # from here on, steps can be trimmed and their correlation estimated
TRIMMED = 0.1  # of the steps, at each end
SIMILAR_ROWS = 15  # by their time: short rows vary more than long ones
PRIOR_STEPS = 1.0  # weight of the variance of similar rows, in degrees of freedom
MAX_CORRELATION = 0.8
_EXACT_ORDERS = 4096  # up to this many ways to divide the steps, the rank test is exact
_SMALLEST = 1e-300
HOST, GPU = "host", "gpu"
NS_PER_US = 1000
HOST_KINDS = (*OP_TABLES, *API_TABLES)
NEGLIGIBLE = 0.01  # share of a step; less unrecorded time is ignored
MAX_CELLS = 8_000_000  # of a matrix [row, step]: 64 MB
RAN_AHEAD = (
    "the host ran so far ahead that the GPU work of its steps is missing: GPU work counts for the step in which it ran"
)


@dataclass(frozen=True, slots=True)
class Differences:
    """One value per row.

    low, high: interval of other minus baseline.
    p: probability of no difference.
    NaN: unknown.
    """

    baseline: Floats
    other: Floats
    low: Floats
    high: Floats
    p: Floats
    changed: Flags


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One trace.

    us, calls: [row, step].
    resolution_us: rounding of the times; 0 for none.
    """

    us: Floats
    calls: Floats
    resolution_us: float = 0.0


@dataclass(frozen=True, slots=True)
class _Side:
    """Means over the steps, the variances of these means and their degrees of freedom."""

    mean: Floats
    variance: Floats
    freedom: Floats


@dataclass(frozen=True, slots=True)
class TimedEvents:
    """Events of one kind of time.

    key: number of the row's name.
    at: when each counts (Unix ns).
    took: ns.
    """

    time: str
    key: Ints
    at: Ints
    took: Ints


@dataclass(frozen=True, slots=True)
class StepSamples:
    """Rows (name, kind of time) of one trace.

    us, calls: [row, step].
    total_us, total_calls: of the whole window.
    steps: numbers of the whole steps.
    step_us: their durations.
    resolution_us: rounding of the times.
    left_out: number of incomplete steps.
    pace_note: why others do not count, if there are any.
    inside: the same and further rows with nested work included; None if not requested.
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
        """Returns the samples with one column: the sums per second of the window."""
        seconds = self.window_s or float("nan")
        us, counted = ((values / seconds)[:, np.newaxis] for values in (self.total_us, self.total_calls))
        return replace(self, us=us, calls=counted, steps=(), step_us=np.empty(0))


@dataclass(frozen=True, slots=True)
class GpuMoments:
    """For each GPU activity the moment that decides its step (Unix ns). launched: whether it is its launch."""

    at: Ints
    launched: bool


def differences(baseline: StepTimes, other: StepTimes, error_rate: float = ERROR_RATE) -> Differences:
    """Judges each row of two traces."""
    count, pair = len(baseline.us), (baseline, other)
    if min(side.us.shape[1] for side in pair) < 2 or not count:
        unknown = np.full(count, np.nan)
        nothing = np.zeros(count, np.bool_)
        return Differences(_mean(baseline.us), _mean(other.us), unknown, unknown, unknown, nothing)
    always: list[Flags] = [np.all(side.calls > 0, axis=1) for side in pair]
    never: list[Flags] = [np.all(side.calls == 0, axis=1) for side in pair]
    regular = always[0] & always[1]
    apart = (always[0] & never[1]) | (never[0] & always[1])
    first, second = (_side(side, whole) for side, whole in zip(pair, always, strict=True))
    difference = second.mean - first.mean
    error, freedom = _welch(first, second)
    exact = np.where(difference == 0, 0.0, np.inf)  # without any noise
    chance = two_sided(np.divide(np.abs(difference), error, out=exact, where=error > 0), freedom)
    ranks = np.ones(count)
    ranks[~regular] = rank_test(baseline.us[~regular], other.us[~regular])
    irregular = float(np.count_nonzero(~regular & ~apart) + 1) / (count + 2)
    chance = np.where(regular, chance, np.where(apart, np.maximum(chance, irregular * ranks), ranks))
    changed, level = discoveries(chance, error_rate)
    reach = quantile(level, freedom) * error
    known = regular | (apart & changed)
    low, high = (np.where(known, end, np.nan) for end in (difference - reach, difference + reach))
    return Differences(first.mean, second.mean, low, high, chance, changed)


def typical_mean(values: Floats) -> float:
    """Returns the mean of one value per step, trimmed as for rows that every step has."""
    return float(_spread(values[np.newaxis], np.ones(1, np.bool_))[0][0]) if len(values) > 1 else float(values.mean())


def discoveries(chance: Floats, error_rate: float) -> tuple[Flags, float]:
    """Returns which rows differ by the rule of Benjamini and Hochberg, and the error rate of each interval."""
    count = len(chance)
    if not count:
        return np.zeros(0, np.bool_), error_rate
    ordered = np.sort(chance)
    good = np.flatnonzero(ordered <= error_rate * np.arange(1, count + 1) / count)
    found = int(good[-1]) + 1 if len(good) else 0
    changed = chance <= ordered[found - 1] if found else np.zeros(count, np.bool_)
    return changed, error_rate * max(found, 1) / count


def _mean(values: Floats) -> Floats:
    return values.mean(1) if values.shape[1] else np.zeros(len(values))


def _side(times: StepTimes, whole: Flags) -> _Side:
    """Returns means and their variances, which are at least those of similar rows. whole: rows that every step has."""
    steps = times.us.shape[1]
    mean, variance, kept = _spread(times.us, whole)
    freedom = np.maximum(kept - 1.0, 1.0)
    usual = _typical_variance(mean, variance, whole & (mean > 0))
    variance = np.maximum(variance, (PRIOR_STEPS * usual + freedom * variance) / (PRIOR_STEPS + freedom))
    variance = np.maximum(variance, times.calls.mean(1) * times.resolution_us**2 / 6)  # both ends are rounded
    # Yuen: the winsorized variance of all steps, for a mean of those that are kept.
    of_mean = variance * (steps - 1) / (kept * np.maximum(kept - 1, 1))
    repeated = _repetition(times.us)
    return _Side(mean, of_mean * repeated, np.maximum(kept / repeated - 1.0, 1.0))


def _typical_variance(mean: Floats, variance: Floats, whole: Flags) -> Floats:
    """Returns for each row the typical variance of rows of a similar size, by the median of their relative ones."""
    found = np.zeros(len(mean))
    rows = np.flatnonzero(whole)
    if not len(rows):
        return found
    rows = rows[np.argsort(mean[rows], kind="stable")]
    relative = variance[rows] / mean[rows] ** 2
    width = min(SIMILAR_ROWS, len(rows))
    middles = np.median(np.lib.stride_tricks.sliding_window_view(relative, width), axis=1)
    place = np.clip(np.arange(len(rows)) - width // 2, 0, len(middles) - 1)
    found[rows] = middles[place] * mean[rows] ** 2
    return found


def _spread(values: Floats, trim: Flags) -> tuple[Floats, Floats, Floats]:
    """Returns trimmed mean, winsorized variance and number of the steps kept; plain ones for rows not to be trimmed."""
    steps = values.shape[1]
    cut = int(steps * TRIMMED) if steps >= MANY_STEPS else 0
    ordered = np.sort(values, axis=1)
    clipped = np.clip(values, ordered[:, [cut]], ordered[:, [steps - 1 - cut]])
    mean = np.where(trim, ordered[:, cut : steps - cut].mean(1), values.mean(1))
    variance = np.where(trim, clipped.var(1, ddof=1), values.var(1, ddof=1))
    return mean, variance, np.where(trim, steps - 2.0 * cut, float(steps))


def _repetition(values: Floats) -> Floats:
    """Returns how many steps are worth one independent step: 1 or more."""
    steps = values.shape[1]
    if steps < MANY_STEPS:
        return np.ones(len(values))
    apart = values - values.mean(1, keepdims=True)
    power = (apart**2).sum(1)
    together = (apart[:, 1:] * apart[:, :-1]).sum(1)
    found = np.divide(together, power, out=np.zeros(len(values)), where=power > 0) + 1 / steps
    correlation = np.clip(found, 0, MAX_CORRELATION)
    repeated: Floats = (1 + correlation) / (1 - correlation)
    return repeated


def _welch(first: _Side, second: _Side) -> tuple[Floats, Floats]:
    """Returns the standard error of the difference and its degrees of freedom."""
    together = first.variance + second.variance
    parts = first.variance**2 / first.freedom + second.variance**2 / second.freedom
    freedom = np.divide(together**2, parts, out=np.ones(len(together)), where=parts > 0)
    return np.sqrt(together), np.maximum(freedom, 1.0)


def rank_test(baseline: Floats, other: Floats) -> Floats:
    """Returns the two-sided p-value of the rank sums of each row of [row, step], with ties; exact for few steps."""
    first, steps = baseline.shape[1], baseline.shape[1] + other.shape[1]
    found = np.ones(len(baseline))
    chosen = None
    if math.comb(steps, first) <= _EXACT_ORDERS:
        chosen = np.array(list(combinations(range(steps), first)), np.int64)
    for row, values in enumerate(np.concatenate([baseline, other], axis=1)):
        _, place, sizes = np.unique(values, return_inverse=True, return_counts=True)
        ranks = (np.cumsum(sizes) - (sizes - 1) / 2)[place]
        expected = first * (steps + 1) / 2
        apart = abs(float(ranks[:first].sum()) - expected)
        if chosen is not None:
            found[row] = float(np.mean(np.abs(ranks[chosen].sum(1) - expected) >= apart - 1e-9))
            continue
        ties = float((sizes.astype(np.float64) ** 3 - sizes).sum()) / (steps * (steps - 1))
        spread = first * (steps - first) / 12 * (steps + 1 - ties)
        if spread > 0:
            found[row] = math.erfc(max(apart - 0.5, 0.0) / math.sqrt(2 * spread))
    return found


def two_sided(t: Floats, freedom: Floats) -> Floats:
    """Returns the probability that |Student's t| is at least this large."""
    finite = np.where(np.isfinite(t), t, 1e150)
    return _beta(freedom / (freedom + finite**2), freedom / 2)


def quantile(probability: float, freedom: Floats) -> Floats:
    """Returns the t that |Student's t| exceeds with this probability; its relative error is below 1 %."""
    # 1 / degrees of freedom; between these points t is nearly linear in its logarithm
    inverse = np.linspace(1.0, 1e-6, 128)
    low, high = np.zeros(len(inverse)), np.full(len(inverse), 350.0)
    for _ in range(45):
        middle = (low + high) / 2
        above = two_sided(np.exp(middle) - 1, 1 / inverse) > probability
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    found: Floats = np.exp(np.interp(1 / freedom, inverse[::-1], low[::-1])) - 1
    return found


def _beta(x: Floats, a: Floats) -> Floats:
    """The regularized incomplete beta function I_x(a, 1/2), by its continued fraction (Lentz)."""
    b = np.full(len(x), 0.5)
    swap = x > (a + 1) / (a + b + 2)
    x, a, b = np.where(swap, 1 - x, x), np.where(swap, b, a), np.where(swap, a, b)
    logarithm = np.frompyfunc(math.lgamma, 1, 1)
    constant = (logarithm(a + b) - logarithm(a) - logarithm(b)).astype(np.float64)
    inner = np.clip(x, _SMALLEST, 1 - 1e-16)
    front = np.exp(constant + a * np.log(inner) + b * np.log1p(-inner)) / a
    c = np.ones(len(x))
    d = 1 / _away(1 - (a + b) * x / (a + 1))
    total = d.copy()
    for m in range(1, 200):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / _away(1 + numerator * d)
            c = _away(1 + numerator / c)
            total = total * d * c
        if np.all(np.abs(d * c - 1) < 1e-12):
            break
    value = np.where(x <= 0, 0.0, front * total)
    found: Floats = np.clip(np.where(swap, 1 - value, value), 0.0, 1.0)
    return found


def _away(values: Floats) -> Floats:
    return np.where(np.abs(values) < 1e-30, 1e-30, values)


def compared_steps(context: Context) -> Steps:
    """Returns the steps that show the pace of the program. Every diff chooses its steps here.

    These are the measured steps of all views (structure/step_pace.py), without those that a source did not cover.
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
    """Returns for each step the time (ns) that the sources of these tables did not record."""
    return unrecorded(context.trace, kinds).within(found.start, found.end)


def gpu_moments(context: Context) -> GpuMoments:
    """Returns when GPU work was launched, or when it ran if work that was launched in the compared steps is missing.

    The GPU lags behind a host that runs ahead: the recording ends before the work of the last steps has run. What ran
        in the first steps was launched before them; if the host is ahead by more than the recorded steps, so was
        everything.
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
    return GpuMoments(activity.start if ahead else launch, not ahead)


def _step(chosen: Steps, at: Ints) -> Ints:
    """Returns for each moment the place of the step around it, or -1."""
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
    told = [*notes, *(note for note in context.trace.notes if note.startswith(TRUNCATED))]
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
    """Returns how many steps are not compared because they were not recorded completely."""
    every, chosen = len(context.get(steps)), len(context.get(compared_steps))
    return every - chosen - int(np.count_nonzero(context.get(step_pace).untypical))


def resolution_us(parts: Sequence[TimedEvents]) -> float:
    """Returns 1 if all durations are whole microseconds, as older versions of Kineto wrote them, else 0.001."""
    return 0.001 if any(np.any(part.took % NS_PER_US) for part in parts) else 1.0


def window_s(context: Context) -> float:
    """Returns the length of the recording in seconds."""
    return max(context.trace.window_end_ns - context.trace.window_start_ns, 0) / 1e9


def align_rows(sides: Sequence[StepSamples]) -> list[StepSamples]:
    """Returns the sides with the same rows in the same order; rows that a side lacks are 0."""
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
    sides = align_rows(ranks)
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
