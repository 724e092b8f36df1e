"""Tells differences of time per step from noise. Pure: arrays in, arrays out.

Theory of operation
    Each row (an operator, a kernel, …) has one value per step in two traces. How much such values differ from step to
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

    With fewer than two steps on a side nothing is known about the noise, and so nothing is judged.
"""

import math
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

ERROR_RATE = 0.05
MANY_STEPS = 10  # from here on, steps can be trimmed and their correlation be estimated
TRIMMED = 0.1  # of the steps, at each end
SIMILAR_ROWS = 15  # by their time: short rows vary more than long ones
PRIOR_STEPS = 1.0  # weight of the variance of similar rows, in degrees of freedom
MAX_CORRELATION = 0.8
_EXACT_ORDERS = 4096  # ways to divide steps, up to which ranks are judged exactly
_SMALLEST = 1e-300

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Differences:
    """One value per row. low, high: interval of other less baseline; p: of no difference. NaN: not known."""

    baseline: Floats
    other: Floats
    low: Floats
    high: Floats
    p: Floats
    changed: Flags


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One trace. us, calls: [row, step]. resolution_us: to which times were rounded, 0 for none."""

    us: Floats
    calls: Floats
    resolution_us: float = 0.0


@dataclass(frozen=True, slots=True)
class _Side:
    """Means over the steps, the variances of these means and their degrees of freedom."""

    mean: Floats
    variance: Floats
    freedom: Floats


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


def typical(values: Floats) -> float:
    """Returns the mean of one value per step, as rows have it that every step has."""
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
    """Means and their variances, which are at least those of similar rows. whole: rows that every step has."""
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
    """For each row the variance that rows of a similar size have: by the median of their relative ones."""
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
    """Trimmed mean, winsorized variance and number of the steps kept; rows that are not to be trimmed: plain."""
    steps = values.shape[1]
    cut = int(steps * TRIMMED) if steps >= MANY_STEPS else 0
    ordered = np.sort(values, axis=1)
    clipped = np.clip(values, ordered[:, [cut]], ordered[:, [steps - 1 - cut]])
    mean = np.where(trim, ordered[:, cut : steps - cut].mean(1), values.mean(1))
    variance = np.where(trim, clipped.var(1, ddof=1), values.var(1, ddof=1))
    return mean, variance, np.where(trim, steps - 2.0 * cut, float(steps))


def _repetition(values: Floats) -> Floats:
    """How many steps say as much as one that is independent: 1 or more."""
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
    """Standard error of the difference and its degrees of freedom."""
    together = first.variance + second.variance
    parts = first.variance**2 / first.freedom + second.variance**2 / second.freedom
    freedom = np.divide(together**2, parts, out=np.ones(len(together)), where=parts > 0)
    return np.sqrt(together), np.maximum(freedom, 1.0)


def rank_test(baseline: Floats, other: Floats) -> Floats:
    """Two-sided probability of the rank sums of each row of [row, step], with ties; exact for few steps."""
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
    """Probability that |Student's t| is at least this large."""
    finite = np.where(np.isfinite(t), t, 1e150)
    return _beta(freedom / (freedom + finite**2), freedom / 2)


def quantile(probability: float, freedom: Floats) -> Floats:
    """The t that |Student's t| exceeds with this probability; its relative error is below 1 %."""
    inverse = np.linspace(1.0, 1e-6, 128)  # 1 / degrees of freedom, between which t is nearly linear in its logarithm
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
