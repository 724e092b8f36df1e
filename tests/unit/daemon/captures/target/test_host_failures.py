import pytest
from kinetod.base.errors import VerdictReason
from kinetod.captures.result.verdict import DONE, Ending, EndState
from kinetod.captures.target import host_failures
from kinetod.captures.target.host_failures import after_clock, ending_of_disk
from kinetod.captures.target.record_spool import DiskFull, StoreLost

SECOND_NS = 10**9
CANCELLED = Ending(EndState.CANCELLED, VerdictReason.CANCELLED, "cancelled")
GONE = Ending(EndState.PARTIAL, VerdictReason.TARGET_EXITED, "gone")


@pytest.mark.parametrize(("set_by_ns", "how"), [(3600 * SECOND_NS, "forward by 1 h"), (-2 * SECOND_NS, "back by 2 s")])
def test_a_trace_over_a_clock_that_was_set_is_partial(set_by_ns: int, how: str) -> None:
    ending = after_clock(DONE, set_by_ns)
    assert (ending.outcome, ending.code) == (EndState.PARTIAL, VerdictReason.CLOCK_SET)
    assert ending.reason.startswith(f"this host's clock was set {how} during the capture; ")


@pytest.mark.parametrize("set_by_ns", [0, 200_000_000, -200_000_000])
def test_a_clock_that_is_adjusted_a_little_changes_nothing(set_by_ns: int) -> None:
    assert after_clock(DONE, set_by_ns) is DONE


@pytest.mark.parametrize("ending", [CANCELLED, GONE])
def test_what_went_wrong_before_stays_the_reason(ending: Ending) -> None:
    assert after_clock(ending, 3600 * SECOND_NS) is ending


def test_two_readings_of_a_clock_that_nobody_sets_agree() -> None:
    assert abs(host_failures.clock_offset_ns() - host_failures.clock_offset_ns()) < host_failures.CLOCK_SET_NS


def test_only_a_full_disk_is_called_full() -> None:
    assert ending_of_disk(DiskFull("the disk is full: /x")).code == VerdictReason.DISK_FULL
    lost = ending_of_disk(StoreLost("writing failed (No such file or directory): /x"))
    assert (lost.code, lost.reason) == (VerdictReason.STORE_IO, "writing failed (No such file or directory): /x")
