"""How far clocks are apart, by round trips."""

import pytest
from kinetoctl.client.fleet.host_run import READING_NS, Offset, RoundTrip, UnusableClock, joined, measured

MS = 1_000_000
S = 1000 * MS


def trip(sent_ns: int, there_ns: int, back_ns: int, *, behind_ns: int = 0, at_host_ns: int = 0) -> RoundTrip:
    """A question to a host whose clock is behind ours by so much, with these times on both ways."""
    received_ns = sent_ns + there_ns - behind_ns
    answered_ns = received_ns + at_host_ns
    return RoundTrip(sent_ns, received_ns, answered_ns, answered_ns + behind_ns + back_ns)


def test_equal_ways_give_the_offset_and_half_the_trip_as_its_uncertainty() -> None:
    found = measured([trip(50 * S, MS, MS, behind_ns=3 * S, at_host_ns=7 * MS)])
    assert (found.offset_ns, found.trip_ns) == (3 * S, 9 * MS)
    assert found.uncertainty_ns == MS + READING_NS


@pytest.mark.parametrize(("there_ns", "back_ns"), [(0, 2 * MS), (2 * MS, 0), (17, 333_334), (1, 0), (0, 0)])
def test_the_truth_is_never_outside_the_uncertainty(there_ns: int, back_ns: int) -> None:
    found = measured([trip(50 * S, there_ns, back_ns, behind_ns=-5 * S)])
    assert abs(found.offset_ns - -5 * S) <= found.uncertainty_ns


def test_a_longer_round_trip_adds_nothing() -> None:
    trips = [trip(50 * S, 9 * MS, 8 * MS), trip(50 * S + 20 * MS, MS, MS), trip(50 * S + 30 * MS, 5 * MS, 40 * MS)]
    assert measured(trips) == measured(trips[1:2])


def test_bounds_of_several_round_trips_hold_together() -> None:
    found = measured([trip(50 * S, 0, 8 * MS, behind_ns=S), trip(50 * S + 20 * MS, 6 * MS, 0, behind_ns=S)])
    assert (found.offset_ns, found.uncertainty_ns) == (S, READING_NS)


def test_a_clock_that_moves_between_readings_cannot_be_used() -> None:
    with pytest.raises(UnusableClock, match=r"its clock moved by 2 s or more while it was being read"):
        measured([trip(50 * S, MS, MS, behind_ns=S), trip(50 * S + 5 * MS, MS, MS, behind_ns=-S)])


@pytest.mark.parametrize("broken", [RoundTrip(S, 9, 8, S + MS), RoundTrip(S, 0, 0, S + MS), RoundTrip(S, 5, 9, S)])
def test_a_clock_that_says_the_impossible_cannot_be_used(broken: RoundTrip) -> None:
    with pytest.raises(UnusableClock, match="went backwards or stopped"):
        measured([broken])


def test_of_two_measurements_that_agree_the_one_counts_that_says_more_of_the_moment() -> None:
    before, after = Offset(400, 1000, at_ns=0), Offset(0, 300, at_ns=60 * S)
    found, warning = joined(before, after, S)
    assert (found.offset_ns, found.uncertainty_ns, warning) == (400, 1000 + 100_000, "")  # drift of a second
    found, warning = joined(before, after, 59 * S)
    assert (found.offset_ns, found.uncertainty_ns, warning) == (0, 300 + 100_000, "")


def test_measurements_that_contradict_each_other_are_both_covered_and_told() -> None:
    before, after = Offset(0, MS, at_ns=S), Offset(50 * MS, 2 * MS, at_ns=2 * S)
    found, warning = joined(before, after, S)
    assert found.offset_ns - found.uncertainty_ns <= -MS
    assert found.offset_ns + found.uncertainty_ns >= 52 * MS
    assert warning == "its clock moved by 50 ms during the capture: its times may be off by 26.5 ms"


def test_an_offset_is_written_with_its_sign_and_uncertainty() -> None:
    assert [str(Offset(-1500 * MS, 200_000)), str(Offset(12, 1))] == ["-1.5 s ±200 µs", "+12 ns ±1 ns"]
