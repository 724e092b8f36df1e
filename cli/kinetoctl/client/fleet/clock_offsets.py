"""Offsets of the clocks of hosts from ours. Pure.

Theory of operation
    A round trip has four times: we send, the host receives, the host answers, we receive. No message arrives before it
    is sent. This bounds the offset, which is to be added to the host's times, from both sides; the distance between the
    bounds is the time that the trip spent outside the host. The shortest of several round trips has the tightest
    bounds; those of the others hold too, and may be tighter on one side. If no offset fits all of them, the clock has
    moved meanwhile.

    The clocks are measured before the start of a capture and after its end. Two clocks drift apart by at most
    DRIFT_PPM, so a measurement loses precision with its age: the one that is more precise for the window is used. If
    the two differ by more than that allows, the clock was set or slewed in between, and the offset is between the two.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kineto_trace.base.quantities import format_duration

DRIFT_PPM = 100  # of two clocks, each within the 50 ppm of ordinary quartz
READING_NS = 1_000  # error of one reading of a clock
SLACK_NS = 100_000  # allowed contradiction between readings: clocks are slewed, and read in steps
FAR_NS = 1_000_000_000  # a larger offset is reported: no host with a synchronised clock is that far off


class RoundTrip(NamedTuple):
    """One reading of a host's clock. sent_ns, returned_ns: by our clock; received_ns, answered_ns: by the host's."""

    sent_ns: int
    received_ns: int
    answered_ns: int
    returned_ns: int

    @property
    def travelled_ns(self) -> int:
        """The time that the trip spent outside the host, in ns."""
        return (self.returned_ns - self.sent_ns) - (self.answered_ns - self.received_ns)


@dataclass(frozen=True, slots=True)
class Offset:
    """The offset of a host's clock. offset_ns: to be added to the host's times; uncertainty_ns: its largest error.

    at_ns: when it was measured, in Unix ns by our clock. trip_ns: the complete round trip.
    """

    offset_ns: int
    uncertainty_ns: int
    at_ns: int = 0
    trip_ns: int = 0

    def __str__(self) -> str:
        sign = "-" if self.offset_ns < 0 else "+"
        return f"{sign}{format_duration(abs(self.offset_ns))} ±{format_duration(self.uncertainty_ns)}"


class UnusableClock(Exception):
    """A clock for which no start time can be computed; the message says why."""


def measured(trips: Sequence[RoundTrip]) -> Offset:
    """The offset from at least one round trip. Raises UnusableClock."""
    if any(trip.received_ns <= 0 or trip.answered_ns < trip.received_ns or trip.travelled_ns < 0 for trip in trips):
        raise UnusableClock("its clock went backwards or stood still while it was read")
    low = max(trip.sent_ns - trip.received_ns for trip in trips)
    high = min(trip.returned_ns - trip.answered_ns for trip in trips)
    shortest = min(trips, key=lambda trip: trip.travelled_ns)
    if low > high + SLACK_NS + _drift_ns(trips[0].sent_ns, trips[-1].returned_ns):
        raise UnusableClock(f"its clock moved by {format_duration(low - high)} or more while it was read")
    uncertainty_ns = (abs(high - low) + 1) // 2 + READING_NS
    return Offset((low + high) // 2, uncertainty_ns, shortest.sent_ns, shortest.returned_ns - shortest.sent_ns)


def _drift_ns(first_ns: int, second_ns: int) -> int:
    """How far two clocks may drift apart between two times, in ns."""
    return abs(second_ns - first_ns) * DRIFT_PPM // 1_000_000


def joined(before: Offset, after: Offset, at_ns: int) -> tuple[Offset, str]:
    """One offset for a time between two measurements, and a warning if they contradict each other."""
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
