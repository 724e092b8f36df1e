"""The steps over which figures are averaged: those that were recorded as a whole, but for warm-up.

Theory of operation
    First steps allocate memory, load modules, pick algorithms and compile. What they take says nothing of the steps
    after them, so it must neither enter a mean nor be promised as a saving. The steps at the beginning that last more
    than twice the median of all steps, and more than five deviations (median absolute deviation, as a standard
    deviation) above it, are warm-up. This takes at least three other steps.

    A trace without complete steps has one range, the whole window. There, a gap of a GPU (the time before its first
    activity too) of at least 100 ms that takes more than a quarter of the window, in the first half of the GPU's
    activities and longer than all gaps after these together, is what happens once, such as initialising CUDA or loading
    modules: the window up to its end is warm-up, and the rest is looked at in the same way.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.idle.idle_gaps import IdleGaps, idle_gaps, idle_window
from kineto_trace.base.quantities import ms
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import gpu, whole_steps

MIN_STEPS = 3  # beside those of warm-up
LONGER = 2.0  # times the median
DEVIATIONS = 5.0
ONCE_SHARE = 0.25  # of the window
ONCE_NS = 100_000_000
MIN_ACTIVITIES = 3  # after warm-up: less than that tells nothing of how the program goes on

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Ranges (Unix ns) in order.

    number: of the step; -1: the trace has none that is complete. warm_up: not in means and savings.
    """

    number: Ints
    start: Ints
    end: Ints
    warm_up: Flags

    @property
    def length(self) -> Ints:
        """Returns the length of each range, in ns."""
        return self.end - self.start

    @property
    def measured_ns(self) -> int:
        """Returns the length of all ranges but those of warm-up."""
        return int(self.length[~self.warm_up].sum())

    @property
    def steps(self) -> int:
        """Returns how many steps are measured; 0: the trace has none that is complete."""
        return int(np.count_nonzero(~self.warm_up & (self.number >= 0)))

    def note(self) -> str | None:
        """Returns what is to be said about warm-up; None if there is none."""
        if not self.length[self.warm_up].any():
            return None
        took = _seconds(int(self.length[self.warm_up].sum()))
        if (self.number < 0).all():
            return f"the first {took}, up to the end of a gap that does not recur, are warm-up and left out"
        usual = _seconds(int(np.median(self.length[~self.warm_up])))
        listed = ", ".join(map(str, self.number[self.warm_up].tolist()))
        return f"warm-up is left out of means and savings: step {listed} ({took}; the others take {usual})"


def _seconds(ns: int) -> str:
    return f"{ns / 1e9:.3g} s" if ns >= 1e9 else ms(ns)


def measured_steps(context: Context) -> MeasuredSteps:
    """Returns the complete steps of a trace, or its window if it has none."""
    found = context.get(whole_steps)
    if len(found):
        return MeasuredSteps(found.number, found.start, found.end, warm_up_steps(found.end - found.start))
    low, high = context.get(idle_window)
    first = _after_warm_up(context, low, high)
    borders = np.array([low, first, high] if low < first < high else [low, high], np.int64)
    return MeasuredSteps(np.full(len(borders) - 1, -1), borders[:-1], borders[1:], borders[1:] <= first)


def warm_up_steps(length: Ints) -> Flags:
    """Tells for each step, given in order, whether it belongs to the warm-up."""
    middle = np.median(length)
    deviation = 1.4826 * np.median(np.abs(length - middle))
    slow = (length > LONGER * middle) & (length > middle + DEVIATIONS * deviation)
    first: Flags = np.logical_and.accumulate(slow)
    return first if len(length) - int(first.sum()) >= MIN_STEPS else np.zeros(len(length), np.bool_)


def _after_warm_up(context: Context, low: int, high: int) -> int:
    """Returns when the last gap that happens once ends, or `low` if there is none. Unix ns."""
    gaps = context.get(idle_gaps)
    end = _once(context, gaps, low, high) if len(gaps.windows) == 1 else None
    while end is not None:
        low, end = end, _once(context, gaps, end, high)
    return low


def _once(context: Context, gaps: IdleGaps, low: int, high: int) -> int | None:
    """Returns the end of the last gap since `low` that happens once; None if there is none."""
    activity = context.get(gpu)
    inside = np.sort(activity.start[(activity.start > low) & (activity.start < high)])
    if len(inside) < MIN_ACTIVITIES:
        return None
    followed = (gaps.start >= low) & (gaps.after >= 0)
    early = gaps.end <= inside[len(inside) // 2]
    later = int(gaps.length[followed & ~early].sum())
    least = max(ONCE_NS, ONCE_SHARE * (high - low), later)
    once = followed & early & (gaps.length > least)
    return int(gaps.end[once].max()) if once.any() else None
