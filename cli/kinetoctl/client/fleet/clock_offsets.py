"""How far the clocks of hosts are from ours. Pure.

Theory of operation
    One round trip has four times: we send, the host receives, the host answers, we receive. No message arrives before
    it is sent: this bounds what is to be added to the host's times from both sides, and the bounds are as far apart as
    the time that the trip spent outside the host. The shortest of several round trips has the closest bounds; those of
    the others hold, too, and may be closer on one side. If no offset fits all of them, the clock has moved meanwhile.

    A capture is measured before its start and after its end. Two clocks drift apart by DRIFT_PPM at most, so that a
    measurement says the less the longer ago it is: the one counts that says more of the window. If both differ by more
    than they may, the clock was set or slewed in between, and the offset is somewhere between the two.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kineto_protos.units import format_duration

DRIFT_PPM = 100  # of two clocks, each within the 50 ppm of ordinary quartz
READING_NS = 1_000  # by which one reading of a clock may be wrong
SLACK_NS = 100_000  # what readings may contradict each other by: clocks are slewed, and read in steps
FAR_NS = 1_000_000_000  # an offset that is worth telling: no host that keeps time is that far off


class RoundTrip(NamedTuple):
    """One question for the time. sent_ns, returned_ns: by our clock; received_ns, answered_ns: by the host's."""

    sent_ns: int
    received_ns: int
    answered_ns: int
    returned_ns: int

    @property
    def travelled_ns(self) -> int:
        """The time that it spent outside the host."""
        return (self.returned_ns - self.sent_ns) - (self.answered_ns - self.received_ns)


@dataclass(frozen=True, slots=True)
class Offset:
    """Of a host's clock. offset_ns: what is to be added to its times; uncertainty_ns: how far that is off at most.

    at_ns: when it was measured, by our clock. trip_ns: the whole round trip.
    """

    offset_ns: int
    uncertainty_ns: int
    at_ns: int = 0
    trip_ns: int = 0

    def __str__(self) -> str:
        sign = "-" if self.offset_ns < 0 else "+"
        return f"{sign}{format_duration(abs(self.offset_ns))} ±{format_duration(self.uncertainty_ns)}"


class UnusableClock(Exception):
    """A clock that no start time can be given for. The text says why."""


def measured(trips: Sequence[RoundTrip]) -> Offset:
    """The offset by at least one round trip. Raises UnusableClock."""
    if any(trip.received_ns <= 0 or trip.answered_ns < trip.received_ns or trip.travelled_ns < 0 for trip in trips):
        raise UnusableClock("its clock went back, or stood, while it was read")
    low = max(trip.sent_ns - trip.received_ns for trip in trips)
    high = min(trip.returned_ns - trip.answered_ns for trip in trips)
    shortest = min(trips, key=lambda trip: trip.travelled_ns)
    if low > high + SLACK_NS + _drift_ns(trips[0].sent_ns, trips[-1].returned_ns):
        raise UnusableClock(f"its clock moved by {format_duration(low - high)} or more while it was read")
    uncertainty_ns = (abs(high - low) + 1) // 2 + READING_NS
    return Offset((low + high) // 2, uncertainty_ns, shortest.sent_ns, shortest.returned_ns - shortest.sent_ns)


def _drift_ns(first_ns: int, second_ns: int) -> int:
    """How far two clocks may drift apart between two moments."""
    return abs(second_ns - first_ns) * DRIFT_PPM // 1_000_000


def joined(before: Offset, after: Offset, at_ns: int) -> tuple[Offset, str]:
    """One offset for a moment between two measurements, and a warning if they contradict each other."""
    apart_ns = abs(after.offset_ns - before.offset_ns)
    if apart_ns <= before.uncertainty_ns + after.uncertainty_ns + _drift_ns(before.at_ns, after.at_ns):
        then = (
            replace(each, uncertainty_ns=each.uncertainty_ns + _drift_ns(each.at_ns, at_ns)) for each in (before, after)
        )
        return min(then, key=lambda offset: offset.uncertainty_ns), ""
    low = min(offset.offset_ns - offset.uncertainty_ns for offset in (before, after))
    high = max(offset.offset_ns + offset.uncertainty_ns for offset in (before, after))
    middle = Offset((low + high) // 2, (high - low + 1) // 2, before.at_ns, max(before.trip_ns, after.trip_ns))
    return middle, (
        f"its clock moved by {format_duration(apart_ns)} during the capture: its times may be wrong by "
        f"{format_duration(middle.uncertainty_ns)}"
    )
