import pytest
from kinetod.base.notify import watchdog_s


def test_the_watchdogs_time_is_for_the_process_it_means() -> None:
    assert watchdog_s({"WATCHDOG_USEC": "500000"}) == 0.5
    assert watchdog_s({"WATCHDOG_USEC": "5000000", "WATCHDOG_PID": "7"}, 7) == 5
    assert watchdog_s({"WATCHDOG_USEC": "5000000", "WATCHDOG_PID": "7"}, 8) is None


@pytest.mark.parametrize("environ", [{}, {"WATCHDOG_USEC": ""}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "soon"}])
def test_without_a_time_there_is_no_watchdog(environ: dict[str, str]) -> None:
    assert watchdog_s(environ) is None
