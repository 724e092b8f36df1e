"""The clock by which the agent's thread tells the times of a capture."""

import time
from itertools import count

import pytest
from kineto_agent.control import runner

S = 1_000_000_000


@pytest.mark.parametrize("stopped_before", [1, 2])
def test_a_thread_that_is_put_aside_while_it_looks_at_the_clocks_shifts_no_window(
    monkeypatch: pytest.MonkeyPatch, stopped_before: int
) -> None:
    looks, now_ns = count(), 1000 * S

    def look(ahead_ns: int) -> int:
        nonlocal now_ns
        now_ns += S if next(looks) == stopped_before else 50
        return now_ns + ahead_ns

    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic_ns", lambda: look(0))
        patch.setattr(time, "time_ns", lambda: look(7 * S))
        found_ns = runner._clock_ahead_ns()
    assert found_ns == 7 * S
