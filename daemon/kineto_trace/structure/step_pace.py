"""Finds the complete steps that show the pace of the program: all means, shares and comparisons use these.

Theory of operation
    Two kinds of steps at the beginning of a recording last longer or shorter than the program takes:

    slow   First steps allocate memory, load modules, pick algorithms and compile. The steps at the beginning that last
           more than twice the median of all steps, and more than five deviations (median absolute deviation, as a
           standard deviation) above it, are warm-up. This takes at least three other steps.
    ahead  When a recording begins, the GPU has finished what the host had queued, or most of it. The host then queues
           step after step faster than the GPU works, until it waits for the GPU again: its steps are as short as its
           own work, and the program's pace is that of the GPU. The steps at the beginning (behind those of warm-up)
           that are shorter than what the GPU takes for their work are such steps, up to the first one that is not.

    The GPU time of a step lasts from when the GPU could begin with the step's work (the start of its first activity, or
    the end of the previous step on the GPU) to the end of its last activity. A step whose work was not recorded, since
    the recording ended before, counts with the median of the others. A program whose steps differ is not affected: a
    short step has less work on the GPU, too. Nor is one that waits for the GPU repeatedly, such as in every tenth step:
    the GPU's lag at the ends of the later steps must stay near the host's lead. Without GPU activities that are linked
    to calls, no step counts as ahead.
"""

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.base.array_types import NOTHING, Flags, Ints
from kineto_trace.base.quantities import format_duration
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import Steps, calls, gpu, whole_steps

MIN_STEPS = 3  # in addition to those of warm-up
LONGER = 2.0  # times the median
DEVIATIONS = 5.0
SETTLED = 0.95  # of the GPU time: a step of the host that lasts this long keeps the GPU's pace
GAINED = 0.5  # of a step of the GPU: the host's minimum lead over it in all steps together
RECORDED = 0.9  # of a step's launches, above which its work counts as recorded
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class StepPace:
    """One value per complete step.

    length: ns.
    slow: warm-up.
    ahead: the host ran ahead of the GPU.
    gpu_ns: GPU time of a step (median); 0 if unknown.
    recorded: whether the GPU work that it launched was recorded; also if it launched none.
    """

    number: Ints
    length: Ints
    slow: Flags
    ahead: Flags
    gpu_ns: int
    recorded: Flags

    @property
    def untypical(self) -> Flags:
        """Returns for each step whether its length does not show the pace."""
        return self.slow | self.ahead

    @property
    def left_out(self) -> Flags:
        """Returns for each step whether means leave it out. If the host ran ahead in all steps, none is left out."""
        return self.slow if self.untypical.all() else self.untypical

    def note(self, share: str = "") -> str | None:
        """Returns a note on steps that do not show the pace; None if all do. share: a text on their part."""
        told = []
        if self.slow.any():
            slow = self.number[self.slow].tolist()
            which = f"step{'s' if len(slow) > 1 else ''} {', '.join(map(str, slow))}"
            took, usual = int(self.length[self.slow].sum()), int(np.median(self.length[~self.left_out]))
            told.append(
                f"long first steps{share} are left out of means and savings: {which} ({format_duration(took)}; the "
                f"others take {format_duration(usual)})"
            )
        if self.ahead.any():
            told.append(self._ahead_note("" if told else share))
        return "; ".join(told) or None

    def _ahead_note(self, share: str) -> str:
        mine = float(self.length[self.ahead].mean())
        if self.untypical.all():
            return (
                "the host ran ahead of the GPU in every complete step, so step lengths do not show the pace: a step "
                f"takes {format_duration(mine)} on the host and {format_duration(self.gpu_ns)} on the GPU; record more "
                "steps"
            )
        count, listed = int(self.ahead.sum()), ", ".join(map(str, self.number[self.ahead][:_SHOWN].tolist()))
        which, plural = (f"{count} early steps{share} are", "s") if count > 1 else (f"1 early step{share} is", "")
        usual = float(self.length[~self.untypical].mean())
        return (
            f"{which} left out of means and savings, because the host ran ahead of the GPU until its queue was full: "
            f"step{plural} {listed}{', …' if count > _SHOWN else ''} ({format_duration(mine)} on average; the others "
            f"take {format_duration(usual)})"
        )


def step_pace(context: Context) -> StepPace:
    """Returns which of whole_steps show the pace."""
    found = context.get(whole_steps)
    length = found.end - found.start
    slow = is_warm_up(length)
    ahead, pace, launches = np.zeros(len(found), np.bool_), 0, _launches(context, found)
    if len(unique_values(found.thread)) == 1:  # steps of several loops at the same time cannot share a queue
        first = int(np.count_nonzero(slow))
        work = _gpu_work(context, found, first, launches)
        ahead[first:] = steps_ahead(length[first:], work)
        pace = int(np.median(work.took)) if len(work.took) else 0
    recorded = launches.recorded >= RECORDED * launches.launched
    return StepPace(found.number, length, slow, ahead, pace, recorded)


def paced_steps(context: Context) -> Steps:
    """Returns the complete steps that count for means; may be empty although there are steps."""
    found, keep = context.get(whole_steps), ~context.get(step_pace).left_out
    return Steps(**{field.name: getattr(found, field.name)[keep] for field in fields(Steps)})


def is_warm_up(length: Ints) -> Flags:
    """Returns for each step, given in order, whether it belongs to the warm-up."""
    if not len(length):
        return np.zeros(0, np.bool_)
    middle = np.median(length)
    deviation = 1.4826 * np.median(np.abs(length - middle))
    slow = (length > LONGER * middle) & (length > middle + DEVIATIONS * deviation)
    first: Flags = np.logical_and.accumulate(slow)
    return first if len(length) - int(first.sum()) >= MIN_STEPS else np.zeros(len(length), np.bool_)


class GpuWork(NamedTuple):
    """The work of the first steps, as many as were recorded on the GPU (ns).

    took: GPU time of each.
    behind: from the step's end on the host to its end on the GPU.
    """

    took: Ints
    behind: Ints


def steps_ahead(length: Ints, work: GpuWork) -> Flags:
    """Returns for each step, given in order, whether the host ran ahead of the GPU until some later step."""
    nothing = np.zeros(len(length), np.bool_)
    if not len(work.took):
        return nothing
    pace = float(np.median(work.took))
    expected = np.append(work.took, np.full(len(length) - len(work.took), pace))
    first: Flags = np.logical_and.accumulate(length < SETTLED * expected)
    count = int(np.count_nonzero(first))
    gained = float((expected - length)[:count].sum())
    if not count or gained < GAINED * pace:
        return nothing
    later = work.behind[count:]
    if len(later) and np.quantile(later, 0.25) < work.behind[count - 1] - gained / 2:
        return nothing  # the host waits for the GPU from time to time, and runs ahead in between
    return first


class _Launches(NamedTuple):
    """Calls that launch work.

    step: for each of Calls, and one more for no call, the step that it launches work in.
    launched: number in each step.
    recorded: number of those whose work is in the trace.
    """

    step: Ints
    launched: Ints
    recorded: Ints


def _launches(context: Context, found: Steps) -> _Launches:
    """Returns the calls that have the names of those with recorded work."""
    activity, called, count = context.get(gpu), context.get(calls), len(found)
    worked = np.zeros(len(called), np.bool_)
    worked[activity.call[activity.call >= 0]] = True
    launching = np.zeros(len(context.trace.strings), np.bool_)
    launching[called.name[worked]] = True
    rows = np.flatnonzero(launching[called.name])
    step = np.full(len(called) + 1, NOTHING, np.int64)
    step[rows] = found.at(called.start[rows])
    inside = rows[step[rows] >= 0]
    launched, recorded = (np.bincount(step[chosen], minlength=count) for chosen in (inside, inside[worked[inside]]))
    return _Launches(step, launched, recorded)


def _gpu_work(context: Context, found: Steps, first: int, launches: _Launches) -> GpuWork:
    """Returns the work of the steps from `first` on, by the calls that launched it while they ran."""
    activity, count = context.get(gpu), len(found)
    known = (launches.launched > 0) & (launches.recorded >= RECORDED * launches.launched)
    stop = first + int(np.argmin(np.append(known[first:], False)))
    step = launches.step[activity.call]
    inside = (step >= first) & (step < stop)
    begin, end = np.full(count, np.iinfo(np.int64).max), np.full(count, np.iinfo(np.int64).min)
    np.minimum.at(begin, step[inside], activity.start[inside])
    np.maximum.at(end, step[inside], activity.end[inside])
    begin, end = begin[first:stop], end[first:stop]
    free = np.maximum.accumulate(end)
    begin[1:] = np.maximum(begin[1:], free[:-1])
    return GpuWork(np.maximum(end - begin, 0), end - found.end[first:stop])
