from kinetod.kineto_ipc import poll_limits
from kinetod.kineto_ipc.poll_limits import PROCESS_BURST, USER_BURST, PollLimits


def test_a_libkineto_that_polls_every_5_s_is_never_limited() -> None:
    limits = PollLimits()
    assert all(limits.allows(1000, 7, now_s) for now_s in range(0, 3600, 5))


def test_a_process_that_floods_uses_up_only_what_is_its_own() -> None:
    limits = PollLimits()
    assert sum(limits.allows(1000, 7, 0.0) for _ in range(100_000)) == PROCESS_BURST
    assert limits.allows(1000, 8, 0.0)
    assert limits.allows(1001, 9, 0.0)


def test_a_user_with_many_processes_is_limited_and_others_are_not() -> None:
    limits = PollLimits()
    assert sum(limits.allows(1000, pid, 0.0) for pid in range(1, 10_000)) == USER_BURST
    assert limits.allows(1001, 20_000, 0.0)


def test_a_thousand_processes_may_start_at_once() -> None:
    limits = PollLimits()
    assert all(limits.allows(1000, pid, 0.0) for pid in range(1, 1001))


def test_a_limited_process_is_heard_again_after_a_while() -> None:
    limits = PollLimits()
    while limits.allows(1000, 7, 0.0):
        pass
    assert limits.allows(1000, 7, 0.3)


def test_what_is_remembered_is_bounded() -> None:
    limits = PollLimits()
    assert all(limits.allows(number, 1, 0.0) for number in range(1, 3 * poll_limits.MAX_USERS))
    assert len(limits._users) == poll_limits.MAX_USERS


def test_who_has_been_quiet_is_forgotten() -> None:
    limits = PollLimits()
    limits.allows(1000, 7, 0.0)
    limits.forget_quiet(60.0)
    assert limits._users == {}
