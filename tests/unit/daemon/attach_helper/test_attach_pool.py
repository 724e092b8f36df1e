"""The warm helpers, with little ones that crash, hang and babble."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from kineto_protos import unix_peer
from kinetod.attach.attach_types import AttachCode, Attached, AttachError
from kinetod.attach_helper import attach_pool as module
from kinetod.attach_helper import attempt
from kinetod.attach_helper.attach_pool import AttachHelpers
from kinetod.attach_helper.folder_queries import FOLDER, NOTHING
from kinetod.attach_helper.worker_queries import DEVICE_GRAPHS
from kinetod.base.fair_slots import fair_share_key
from kinetod.processes.identity import ProcessKey, identify, start_time_ns
from kinetod.supervise.child import WarmChild
from support.service import scripted_helper, subjects
from support.service.approvals import APPROVAL
from support.waiting import scaled, until

T = TypeVar("T")
KEY = ProcessKey(4242, 1)


def peer_pid(channel: socket.socket) -> int:
    """Of the helper that made the channel, which may have ended."""
    pid: int = unix_peer.credentials(channel)[0]
    return pid


@asynccontextmanager
async def started(script: str, count: int = 1) -> AsyncIterator[AttachHelpers]:
    helpers = AttachHelpers(count, command=scripted_helper.command(script))
    await helpers.start()
    try:
        yield helpers
    finally:
        await helpers.stop()
        assert helpers.pids() == set()


def with_helpers(script: str, scenario: Callable[[AttachHelpers], Awaitable[T]], count: int = 1) -> T:
    async def run() -> T:
        async with started(script, count) as helpers:
            return await scenario(helpers)

    return asyncio.run(run())


def failure(script: str, deadline_s: float = 20) -> AttachError:
    async def scenario(helpers: AttachHelpers) -> AttachError:
        before = helpers.pids()
        with pytest.raises(AttachError) as caught:
            await helpers.attach(KEY, APPROVAL, deadline_s=deadline_s)
        if caught.value.code is not AttachCode.TRACED:
            assert not helpers.pids() & before
        return caught.value

    return with_helpers(script, scenario)


def test_the_channel_comes_with_what_the_attach_took() -> None:
    async def scenario(helpers: AttachHelpers) -> None:
        (pid,) = helpers.pids()
        key = ProcessKey(pid, start_time_ns(pid))
        attached, channel = await helpers.attach(key, APPROVAL, deadline_s=scaled(20))
        with channel:
            assert attached == Attached(method="scripted", stopped_ns=250_000, latency_ns=3_000_000)
            assert not channel.get_inheritable()
            peer = identify(channel)
            assert peer.key == key
            peer.close()
        assert helpers.pids() == {pid}

    with_helpers("agent", scenario)


def test_a_refusal_has_the_helpers_code_and_words() -> None:
    error = failure("refuse")
    assert (error.code, error.reason) == (AttachCode.TRACED, "process 1 is traced by process 2 (gdb); end that one")


@pytest.mark.parametrize(
    ("script", "why"),
    [("crash", "crashed (exit status 7)"), ("babble", "crashed"), ("channel-missing", "gave no reason")],
)
def test_a_helper_that_fails_is_a_failed_attach(script: str, why: str) -> None:
    async def scenario(helpers: AttachHelpers) -> AttachError:
        with pytest.raises(AttachError) as caught:
            await helpers.attach(KEY, APPROVAL, deadline_s=scaled(20))
        return caught.value

    error = with_helpers(script, scenario)
    assert error.code is AttachCode.FAILED
    assert why in error.reason
    assert "4242" in error.reason


def test_another_helper_tries_again_until_six_have_been_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSE_S", 0.0)
    assert failure("killed").code is AttachCode.TRACED
    error = failure("killed-always")
    assert error.code is AttachCode.FAILED
    assert "too little CPU time" in error.reason


def test_a_helper_that_overruns_its_deadline_is_killed_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KILL_GRACE_S", 0.05)
    error = failure("attach-hangs", deadline_s=0.05)
    assert error.code is AttachCode.TIMEOUT
    assert "process 4242 could not be attached to within 50 ms" in error.reason


def test_a_helper_that_does_not_start_is_not_blamed_on_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "START_S", 0.05)
    error = failure("hang", deadline_s=0.05)
    assert error.code is AttachCode.FAILED
    assert "process 4242 was not touched: the daemon's attach helper did not start within 0.05 s" in error.reason


def test_an_attach_waits_for_the_start_of_its_helper_as_long_as_it_may_take_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    within, awaited = WarmChild.within, []

    async def noted(child: WarmChild, seconds: float, answer: Awaitable[T]) -> T:
        awaited.append(seconds)
        return await within(child, seconds, answer)

    monkeypatch.setattr(WarmChild, "within", noted)
    monkeypatch.setattr(module, "START_S", 1.0)
    deadline_s = scaled(20)
    failure("refuse", deadline_s=deadline_s)
    assert awaited == [deadline_s, deadline_s + module.KILL_GRACE_S]


def test_a_helper_has_time_to_withdraw_what_it_has_begun_and_to_say_why_before_it_is_killed() -> None:
    assert module.KILL_GRACE_S >= 2 * attempt.LET_GO_S


def test_the_start_of_a_helper_does_not_count_for_a_question_that_allows_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    question = {"do": FOLDER, "step": NOTHING}
    start_s, deadline_s = scaled(60), scaled(20)
    within, awaited = WarmChild.within, []

    async def noted(child: WarmChild, seconds: float, answer: Awaitable[T]) -> T:
        awaited.append(seconds)
        return await within(child, seconds, answer)

    async def scenario() -> None:
        helpers = AttachHelpers(1)
        await helpers.start()
        for _ in range(2):
            assert (await helpers.ask(question, deadline_s=deadline_s, start_s=start_s))["ok"]
        await helpers.stop()

    monkeypatch.setattr(WarmChild, "within", noted)
    asyncio.run(scenario())
    assert awaited == [start_s, deadline_s, deadline_s]


def test_a_warm_helper_that_was_killed_is_passed_over() -> None:
    async def scenario(helpers: AttachHelpers) -> None:
        (pid,) = helpers.pids()
        os.kill(pid, signal.SIGKILL)
        until(lambda: subjects.state(pid) in ("", "Z"), "it has ended")  # of which the loop has not heard meanwhile
        _attached, channel = await helpers.attach(KEY, APPROVAL, deadline_s=scaled(20))
        with channel:
            assert peer_pid(channel) != pid

    with_helpers("agent", scenario)


def test_an_idle_helper_that_has_ended_is_replaced_with_the_next_attach() -> None:
    async def scenario(helpers: AttachHelpers) -> None:
        before = helpers.pids()
        longest_idle = helpers._idle[0].process
        longest_idle.kill()
        await longest_idle.wait()
        _attached, channel = await helpers.attach(KEY, APPROVAL, deadline_s=scaled(20))
        channel.close()
        while helpers._background:
            await asyncio.wait(helpers._background)
        assert helpers.pids() & before == before - {longest_idle.pid}
        assert len(helpers.pids()) == 2

    with_helpers("agent", scenario, count=2)


def test_a_caller_that_hangs_up_leaves_no_helper_behind() -> None:
    async def scenario(helpers: AttachHelpers) -> None:
        (before,) = helpers.pids()
        caller = asyncio.create_task(helpers.attach(KEY, APPROVAL, deadline_s=scaled(20)))
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        assert not Path(f"/proc/{before}").exists()

    with_helpers("hang", scenario)


def test_who_has_all_helpers_look_keeps_no_other_user_from_an_attach() -> None:
    async def scenario(helpers: AttachHelpers) -> None:
        fair_share_key.set("hog")
        look = {"do": DEVICE_GRAPHS}
        looks = [asyncio.create_task(helpers.ask(look, deadline_s=1000)) for _ in range(2 * module.MAX_HELPERS)]
        await asyncio.sleep(0)
        fair_share_key.set("ada")
        _, channel = await helpers.attach(KEY, APPROVAL, deadline_s=scaled(20))
        channel.close()
        assert not any(each.done() for each in looks)
        for each in looks:
            each.cancel()
        await asyncio.gather(*looks, return_exceptions=True)

    with_helpers("look-hangs", scenario)


@pytest.mark.parametrize(("wait_s", "helpers_used"), [(0, 3), (1000, 1)])
def test_many_attaches_at_once_wait_for_a_warm_helper_and_then_get_more(
    monkeypatch: pytest.MonkeyPatch, wait_s: float, helpers_used: int
) -> None:
    monkeypatch.setattr(module, "WAIT_FOR_WARM_S", wait_s)

    async def scenario(helpers: AttachHelpers) -> None:
        tasks = [asyncio.create_task(helpers.attach(KEY, APPROVAL, deadline_s=scaled(20))) for _ in range(3)]
        channels = [channel for _, channel in await asyncio.gather(*tasks)]
        assert len({peer_pid(channel) for channel in channels}) == helpers_used
        for channel in channels:
            channel.close()
        assert len(helpers.pids()) == 1

    with_helpers("agent", scenario)
