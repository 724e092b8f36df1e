import contextlib

import pytest
from kinetod.base.errors import Exhausted, Reason
from kinetod.permissions.caller_limits import MAX_CALLERS, Full, RequestRate, Shares, check_captures, check_stored, full
from kinetod.permissions.role_policy import Role
from support.service.callers import ROOT, caller


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_caller_may_burst_and_then_asks_at_the_rate() -> None:
    clock = Clock()
    rate = RequestRate(lambda: 2, clock)
    for _ in range(8):
        rate.take("uid 1000", "ada")
    with pytest.raises(Exhausted, match=r"^ada is sending more than 2 requests per second \(access.requests_") as info:
        rate.take("uid 1000", "ada")
    assert info.value.reason == "TOO_MANY_REQUESTS"
    assert 0 < int(info.value.metadata["retry_after_ms"]) <= 501
    rate.take("uid 2000", "bob")
    clock.now += 0.5
    rate.take("uid 1000", "ada")
    with pytest.raises(Exhausted):
        rate.take("uid 1000", "ada")


def test_being_refused_costs_nothing() -> None:
    clock = Clock()
    rate = RequestRate(lambda: 1, clock)
    refused = 0
    for _ in range(100):
        try:
            rate.take("uid 1000", "ada")
        except Exhausted:
            clock.now += 0.01
            refused += 1
    assert refused > 50
    clock.now += 1
    rate.take("uid 1000", "ada")


def test_callers_that_are_gone_are_forgotten() -> None:
    rate = RequestRate(lambda: 1, Clock())
    for uid in range(MAX_CALLERS + 100):
        rate.take(f"uid {uid}", "somebody")
    assert len(rate._asked) == MAX_CALLERS


def test_a_request_that_costs_more_than_the_burst_is_granted_to_who_has_asked_for_nothing() -> None:
    rate = RequestRate(lambda: 1, Clock())
    rate.take("uid 1000", "ada", 8)
    with pytest.raises(Exhausted):
        rate.take("uid 1000", "ada", 1)


@pytest.mark.parametrize(
    ("held", "used", "admin", "expected"),
    [
        (0, 15, False, None),
        (3, 15, False, None),
        (4, 4, False, Full.OWN),
        (1, 16, False, Full.ALL),
        (0, 17, False, None),  # of the eighth for those who have none
        (0, 18, False, Full.ALL),
        (9, 19, True, None),  # of the eighth for administrators
        (0, 20, True, Full.ALL),
    ],
)
def test_of_every_limit_something_is_kept_for_newcomers_and_administrators(
    held: int, used: int, admin: bool, expected: Full | None
) -> None:
    assert full(held, used, own=4, in_all=16, admin=admin) is expected


def shares(own: int, in_all: int) -> Shares:
    return Shares(Reason.TOO_MANY_CALLS, "calls", "access.max", own=lambda: own, in_all=lambda: in_all)


def test_what_is_held_counts_until_its_end_and_a_refusal_names_the_setting() -> None:
    calls = shares(own=1, in_all=8)
    with calls.one("uid 1", "ada", admin=False):
        with pytest.raises(
            Exhausted, match=r"^ada already has as many calls in progress .* \(1, access.max\); end one"
        ) as info:
            calls.one("uid 1", "ada", admin=False).__enter__()
        assert info.value.reason == "TOO_MANY_CALLS"
        with calls.one("uid 2", "bob", admin=False):
            pass
    with calls.one("uid 1", "ada", admin=False):
        pass
    assert not calls._held


def test_the_end_of_one_of_several_leaves_the_others_counted() -> None:
    calls = shares(own=2, in_all=8)
    with calls.one("uid 1", "ada", admin=False):
        for _ in range(2):
            with calls.one("uid 1", "ada", admin=False), pytest.raises(Exhausted, match=r"many calls .* \(2, "):
                calls.one("uid 1", "ada", admin=False).__enter__()


def test_who_is_late_is_told_after_how_many_milliseconds_to_ask_again() -> None:
    now = [0.0]
    rate = RequestRate(lambda: 10, clock=lambda: now[0])
    with pytest.raises(Exhausted) as info:
        while True:
            rate.take("uid 1", "ada")
    wait_ms = int(info.value.metadata["retry_after_ms"])
    assert wait_ms - 1 <= rate.late_s("uid 1") * 1000 < wait_ms <= 101
    now[0] += wait_ms / 1000
    rate.take("uid 1", "ada")


def test_when_all_together_have_too_many_the_message_says_so() -> None:
    calls = shares(own=4, in_all=1)
    with (
        calls.one("uid 1", "ada", admin=False),
        pytest.raises(Exhausted, match="together have 1 calls in progress, and the limit is 1; wait a moment"),
    ):
        calls.one("uid 3", "eve", admin=False).__enter__()


def test_captures_of_one_user_are_counted_but_not_an_administrators() -> None:
    check_captures(caller(), 1, 1, most_own=2, most=16)
    check_captures(ROOT, 5, 5, most_own=2, most=16)
    with pytest.raises(Exhausted, match=r"user1000 \(uid 1000\) already has 2 running captures") as info:
        check_captures(caller(), 2, 2, most_own=2, most=16)
    assert info.value.reason == "TOO_MANY_CAPTURES"
    check_captures(caller(), 0, 16, most_own=2, most=16)
    with pytest.raises(Exhausted, match=r"this daemon already has 16 running captures, its limit"):
        check_captures(caller(), 1, 16, most_own=2, most=16)


@pytest.mark.parametrize(("stored", "quota", "is_full"), [(1, 2, False), (2, 2, True), (3, 2, True), (3, 0, False)])
def test_a_quota_is_full_once_it_is_reached_and_0_is_none(stored: int, quota: int, is_full: bool) -> None:
    with pytest.raises(Exhausted) if is_full else contextlib.nullcontext():
        check_stored(caller(), stored, quota)
    check_stored(caller(roles={Role.ADMIN}), stored, quota)


def test_a_quota_is_refused_with_both_figures() -> None:
    check_stored(caller(), 10**12, 0)
    check_stored(caller(), 1, 2)
    check_stored(caller(roles={Role.ADMIN}), 2, 2)
    with pytest.raises(
        Exhausted, match=r"occupy 3 GiB, but the limit for one user is 2 GiB \(access.quota_per_user\)"
    ) as info:
        check_stored(caller(), 3 << 30, 2 << 30)
    assert (info.value.reason, info.value.metadata["stored_bytes"]) == ("QUOTA_EXCEEDED", str(3 << 30))
