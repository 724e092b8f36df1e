"""When steps begin and end, on the host and on the device.

Theory of operation
    The ends of steps move from the host to the device by the rule of the TensorBoard profiler plug-in:

    - A call belongs to the step in which it lies as a whole. Calls go by their starts, and a step is left behind for
      good by the first call that starts after its end.
    - A step ends with the last device event that its calls launched, but not before its host end. It starts when
      the step before it ends, but not before its host start. Before the first one lies the last device event of no
      step that ended before the first one of step 0 started.
    - Steps after the last one with device events are dropped, and that one as well if it launched less than 0.8
      times what the one before it did: the recording may have ended before its kernels did.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.structure.activity_links import NOTHING

Ints = npt.NDArray[np.int64]

INCOMPLETE = 0.8  # of the device events of the step before


@dataclass(frozen=True, slots=True)
class StepRanges:
    """Steps in their order. start, end: in any one unit of time. launched: device events of each.

    dropped: names of the last ones that are left out. cut: places of those that the recording cut off. aside: places of
    others that means leave out, since they do not show the pace (structure/steps/step_pace.py).
    """

    name: tuple[str, ...]
    start: Ints
    end: Ints
    launched: Ints
    dropped: tuple[str, ...] = ()
    cut: tuple[int, ...] = ()
    aside: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.name)

    def span(self) -> tuple[int, int] | None:
        """Returns the start of the first step and the end of the last one; None without steps."""
        return (int(self.start[0]), int(self.end[-1])) if len(self) else None

    def measured(self) -> "StepRanges":
        """Returns the steps that means are taken over: without those that were cut off, and those put aside."""
        if not self.cut and not self.aside:
            return self
        rows = np.delete(np.arange(len(self)), (*self.cut, *self.aside))
        names = tuple(self.name[row] for row in rows.tolist())
        return StepRanges(names, self.start[rows], self.end[rows], self.launched[rows], self.dropped)


@dataclass(frozen=True, slots=True)
class DeviceLaunches:
    """Device events with the calls that launched them. call: number of the call, NOTHING: none."""

    call_start: Ints
    call_end: Ints
    call: Ints
    start: Ints
    end: Ints


def on_device(host: StepRanges, launched: DeviceLaunches) -> StepRanges:
    """The steps with the ends that the device gives them, by the rule above."""
    if not len(host):
        return host
    step = _step_of_calls(host, launched.call_start, launched.call_end)
    owner = np.where(launched.call >= 0, step[launched.call], NOTHING) if len(step) else np.full_like(launched.call, -1)
    matched = owner >= 0
    if not matched.any():
        return host
    count = len(host)
    events = np.bincount(owner[matched], minlength=count)
    last, first = np.full(count, np.iinfo(np.int64).min), np.full(count, np.iinfo(np.int64).max)
    np.maximum.at(last, owner[matched], launched.end[matched])
    np.minimum.at(first, owner[matched], launched.start[matched])
    previous = int(host.start[0])
    if events[0]:
        early = launched.end[~matched & (launched.end < first[0])]
        previous = max(previous, int(early.max(initial=previous)))
    start, end = host.start.copy(), host.end.copy()
    for number in range(count):
        start[number] = max(previous, int(start[number]))
        previous = end[number] = max(int(end[number]), int(start[number]), int(last[number]))
    keep = _complete(events.tolist())
    cut, aside = (tuple(place for place in places if place < keep) for places in (host.cut, host.aside))
    dropped = host.name[keep:]
    return StepRanges(host.name[:keep], start[:keep], end[:keep], events[:keep], dropped, cut, aside)


def _step_of_calls(host: StepRanges, start: Ints, end: Ints) -> Ints:
    """For each call the step in which it lies as a whole; NOTHING: none."""
    reach = np.maximum.accumulate(host.end)
    step = np.searchsorted(reach, start, "right")
    lasting_not = end == start  # one without duration still belongs to a step that ends with it
    step[lasting_not] = np.searchsorted(reach, start[lasting_not], "left")
    place = np.minimum(step, len(reach) - 1)
    inside = (step < len(reach)) & (host.start[place] <= start) & (end <= host.end[place])
    return np.where(inside, place, NOTHING)


def _complete(events: list[int]) -> int:
    """Returns how many steps remain."""
    if len(events) < 2:
        return len(events)
    last = max(number for number, count in enumerate(events) if count)
    if last > 0 and events[last - 1] * INCOMPLETE > events[last]:
        return last
    return last + 1
