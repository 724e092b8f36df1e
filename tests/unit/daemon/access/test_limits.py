import pytest
from kinetod.access.limits import MAX_CALLERS, RequestRate, check_captures, check_stored
from kinetod.access.policy import Role
from kinetod.errors import Exhausted
from support.callers import ROOT, caller


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_caller_may_burst_and_then_asks_at_the_rate() -> None:
    clock = Clock()
    rate = RequestRate(lambda: 2, clock)
    for _ in range(8):
        rate.take(caller())
    with pytest.raises(Exhausted, match=r"sends more than 2 requests a second \(access.requests_per_second\)") as info:
        rate.take(caller())
    assert info.value.reason == "TOO_MANY_REQUESTS"
    assert 0 < int(info.value.metadata["retry_after_ms"]) <= 501
    rate.take(caller(2000))
    clock.now += 0.5
    rate.take(caller())
    with pytest.raises(Exhausted):
        rate.take(caller())


def test_being_refused_costs_nothing() -> None:
    clock = Clock()
    rate = RequestRate(lambda: 1, clock)
    for _ in range(100):
        try:
            rate.take(caller())
        except Exhausted:
            clock.now += 0.01
    clock.now += 1
    rate.take(caller())


def test_callers_that_are_gone_are_forgotten() -> None:
    rate = RequestRate(lambda: 1, Clock())
    for uid in range(MAX_CALLERS + 100):
        rate.take(caller(uid))
    assert len(rate._asked) == MAX_CALLERS


def test_captures_of_one_user_are_counted_but_not_an_administrators() -> None:
    check_captures(caller(), 1, 2)
    check_captures(ROOT, 5, 2)
    with pytest.raises(Exhausted, match=r"2 captures of user1000 \(uid 1000\) are running") as info:
        check_captures(caller(), 2, 2)
    assert info.value.reason == "TOO_MANY_CAPTURES"


def test_a_quota_is_refused_with_both_figures() -> None:
    check_stored(caller(), 10**12, 0)
    check_stored(caller(), 1, 2)
    check_stored(caller(roles={Role.ADMIN}), 2, 2)
    with pytest.raises(Exhausted, match=r"take 3 GiB, and one user may have 2 GiB \(access.quota_per_user\)") as info:
        check_stored(caller(), 3 << 30, 2 << 30)
    assert (info.value.reason, info.value.metadata["stored_bytes"]) == ("QUOTA_EXCEEDED", str(3 << 30))
