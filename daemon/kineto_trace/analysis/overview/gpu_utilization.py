"""How busy each GPU was: utilization, estimated SM efficiency, estimated occupancy, and their course over time.

The definitions are those of the TensorBoard profiler plug-in. Utilization: the share of a span in which at least one
kernel ran. Estimated SM efficiency: the mean over a span of min(blocks per multiprocessor of all running kernels, 1).
Estimated occupancy: the mean of the kernels' estimates, weighted by how long each ran inside the span.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.intervals import Union, difference

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

MAX_BUCKETS = 100
US = 1000  # ns


class Course(NamedTuple):
    """A value for each of some stretches of time, which are in order; Unix ns."""

    start: Ints
    end: Ints
    value: Floats

    def mean(self, low: int, high: int, missing: Union | None = None) -> float:
        """Its mean over [low, high); 0 outside of its stretches and in `missing`. NaN: an empty span, or no stretch."""
        start = np.clip(self.start, low, max(low, high))
        end = np.clip(self.end, start, max(low, high))
        inside = end - start if missing is None else end - start - missing.within(start, end)
        if high <= low or not inside.any():
            return float("nan")
        return float((inside * self.value).sum() / (high - low))


def busy_share(busy: Union, low: int, high: int) -> float:
    """The share of [low, high) that the union covers; NaN: an empty span."""
    if high <= low:
        return float("nan")
    return int(busy.within(np.array([low]), np.array([high]))[0]) / (high - low)


def weighted_mean(value: Floats, start: Ints, end: Ints, low: int, high: int) -> float:
    """The mean of the kernels' values, weighted by their time in [low, high); NaN: none has a value there."""
    weight = (np.minimum(end, high) - np.maximum(start, low)).clip(0)
    known = value >= 0  # NaN is not
    total = int(weight[known].sum())
    return float((weight[known] * value[known]).sum() / total) if total else float("nan")


def sm_efficiency(blocks_per_sm: Floats, start: Ints, end: Ints) -> Course:
    """min(sum of `blocks per SM` of the running kernels, 1) over time, where any such kernel runs.

    Kernels whose value is unknown or not positive do not count.
    """
    known = blocks_per_sm > 0
    start, end, value = start[known], end[known], blocks_per_sm[known]
    time = np.concatenate([start, end])
    order = np.argsort(time, kind="stable")  # starts before ends of the same time
    time = time[order]
    running = np.cumsum(np.repeat([1, -1], len(start))[order])
    total = np.cumsum(np.concatenate([value, -value])[order])
    lasting = np.flatnonzero((np.diff(time) > 0) & (running[:-1] > 0))
    return Course(time[lasting], time[lasting + 1], np.minimum(total[lasting], 1.0))


def utilization_course(busy: Union, low: int, high: int, us: int = US, missing: Union | None = None) -> Course:
    """The busy share of each bucket of [low, high). us: how many units of these make a microsecond.

    Buckets are 1, 10, 100, … µs long, the shortest of these that gives at most 100 buckets; the last one takes what
    is left over. Of a bucket only the time outside of `missing` counts; NaN: there is none.
    """
    length = us
    while (high - low) / length > MAX_BUCKETS:
        length *= 10
    count = max((high - low) // length, 1)
    start = low + np.arange(count, dtype=np.int64) * length
    end = np.append(start[1:], max(high, low))
    if missing is None or not len(missing.start):
        return Course(start, end, busy.within(start, end) / np.maximum(end - start, 1))
    known = end - start - missing.within(start, end)
    share = np.full(count, np.nan)
    np.divide(difference(busy, missing).within(start, end), known, out=share, where=known > 0)
    return Course(start, end, share)
