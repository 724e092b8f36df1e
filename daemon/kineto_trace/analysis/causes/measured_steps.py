"""The ranges over which figures are averaged: complete steps that show the pace, or the window without warm-up.

Theory of operation
    structure/steps/step_pace.py has the rules by which first steps are left out.

    A trace without complete steps has one range, the whole window. There, a gap of a GPU (the time before its first
    activity too) of at least 100 ms that takes more than a quarter of the window, in the first half of the GPU's
    activities and longer than all gaps after these together, is what happens once, such as initialising CUDA or loading
    modules: the window up to its end is warm-up, and the rest is looked at in the same way.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.idle.idle_gaps import IdleGaps, idle_gaps, idle_window
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import gpu, whole_steps
from kineto_trace.structure.steps.step_pace import StepPace, length_text, step_pace

ONCE_SHARE = 0.25  # of the window
ONCE_NS = 100_000_000
MIN_ACTIVITIES = 3  # after warm-up: less than that tells nothing of how the program goes on

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Ranges (Unix ns) in order.

    number: of the step; -1: the trace has none that is complete. left_out: not in means and savings. pace: of the
    steps; None without any.
    """

    number: Ints
    start: Ints
    end: Ints
    left_out: Flags
    pace: StepPace | None = None

    @property
    def length(self) -> Ints:
        """Returns the length of each range, in ns."""
        return self.end - self.start

    @property
    def measured_ns(self) -> int:
        """Returns the length of all ranges but those that are left out."""
        return int(self.length[~self.left_out].sum())

    @property
    def steps(self) -> int:
        """Returns how many steps are measured; 0: the trace has none that is complete."""
        return int(np.count_nonzero(~self.left_out & (self.number >= 0)))

    def note(self) -> str | None:
        """Returns what is to be said about what is left out; None if nothing is."""
        if self.pace is not None:
            return self.pace.note()
        if not self.length[self.left_out].any():
            return None
        took = length_text(int(self.length[self.left_out].sum()))
        return f"the first {took}, up to the end of a gap that does not recur, are warm-up and left out"


def measured_steps(context: Context) -> MeasuredSteps:
    """Returns the complete steps of a trace, or its window if it has none."""
    found = context.get(whole_steps)
    if len(found):
        pace = context.get(step_pace)
        return MeasuredSteps(found.number, found.start, found.end, pace.left_out, pace)
    low, high = context.get(idle_window)
    first = _after_warm_up(context, low, high)
    borders = np.array([low, first, high] if low < first < high else [low, high], np.int64)
    return MeasuredSteps(np.full(len(borders) - 1, -1), borders[:-1], borders[1:], borders[1:] <= first)


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
