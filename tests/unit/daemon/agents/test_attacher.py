"""From an attach to an agent that leaves again, with a helper that is itself the target."""

import asyncio
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.agents.agent_hub import AgentHub, ConnectedAgent
from kinetod.agents.attacher import Attacher
from kinetod.agents.link import LinkServer
from kinetod.attach.attach_types import Approval, AttachCode, Attached, AttachError
from kinetod.attach_helper.attach_pool import AttachHelpers
from kinetod.processes.identity import ProcessKey, start_time_ns
from kinetod.selection.process_registry import Registry, checked_selector
from support.agent.scripted_agent import RemoteAgent
from support.service import scripted_helper
from support.service.approvals import APPROVAL, approval_of
from support.service.callers import ROOT
from support.waiting import scaled, soon

SECOND_NS = 10**9
DAY_NS = 86_400 * SECOND_NS
DEADLINE_S = 20


class Parts(NamedTuple):
    helpers: AttachHelpers
    link: LinkServer
    hub: AgentHub
    attacher: Attacher

    def helper_key(self) -> ProcessKey:
        """The only helper, which is the target."""
        (pid,) = self.helpers.pids()
        return ProcessKey(pid, start_time_ns(pid))

    def approval(self) -> Approval:
        """Of the only helper, as it is."""
        return approval_of(self.helper_key().pid)


@asynccontextmanager
async def started(script: str, deadline_ns: int, keep_ns: int) -> AsyncIterator[Parts]:
    with tempfile.TemporaryDirectory(prefix="kinetod-attach-") as folder:
        hub = AgentHub()
        link = LinkServer(Path(folder) / "agent.sock", hub, mode=0o600)
        link.start()
        helpers = AttachHelpers(1, command=scripted_helper.command(script))
        await helpers.start()
        attacher = Attacher(helpers, link, hub, deadline_ns=deadline_ns, keep_ns=keep_ns)
        try:
            yield Parts(helpers, link, hub, attacher)
        finally:
            await attacher.stop()
            await helpers.stop()
            link.close()


def run(
    scenario: Callable[[Parts], Awaitable[None]],
    script: str = "agent",
    *,
    deadline_ns: int = DEADLINE_S * SECOND_NS,
    keep_ns: int = DAY_NS,
) -> None:
    async def main() -> None:
        async with started(script, deadline_ns, keep_ns) as parts, asyncio.timeout(scaled(DEADLINE_S * 2)):
            await scenario(parts)

    asyncio.run(main())


async def until_gone(hub: AgentHub, key: ProcessKey) -> None:
    await soon(lambda: hub.get(key) is None, "the agent has left", DEADLINE_S)


async def a_few_turns() -> None:
    """Enough for what is due now to happen."""
    for _ in range(5):
        await asyncio.sleep(0)


class Listener:
    def on_frame(self, message: object, fd: int | None) -> None: ...

    def on_gone(self, died: bool, reason: str) -> None: ...


def test_an_attached_agent_is_listed_as_one() -> None:
    async def scenario(parts: Parts) -> None:
        key = parts.helper_key()
        agent = await parts.attacher.attach(key, approval_of(key.pid))
        assert parts.hub.get(key) is agent
        assert agent.attached == Attached(method="scripted", stopped_ns=250_000, latency_ns=3_000_000)
        match = checked_selector(pb.Selector(pids=[key.pid]))
        (process,) = await Registry(parts.hub).processes(match, ROOT, include_without_agent=False)
        assert (process.attached, process.agent_state) == (True, pb.AGENT_STATE_READY)

    run(scenario)


def test_who_wants_the_same_process_shares_one_attempt() -> None:
    async def scenario(parts: Parts) -> None:
        key = parts.helper_key()
        agents = await asyncio.gather(*(parts.attacher.attach(key, approval_of(key.pid)) for _ in range(5)))
        assert len(set(agents)) == 1
        assert parts.helpers.pids() == {key.pid}

    run(scenario)


def test_a_caller_that_hangs_up_does_not_end_the_attempt_of_the_others() -> None:
    async def scenario(parts: Parts) -> None:
        first = asyncio.create_task(parts.attacher.attach(parts.helper_key(), parts.approval()))
        second = asyncio.create_task(parts.attacher.attach(parts.helper_key(), parts.approval()))
        await asyncio.sleep(0)
        first.cancel()
        assert isinstance(await second, ConnectedAgent)
        assert first.cancelled()

    run(scenario)


def test_an_agent_that_nobody_wants_leaves_after_its_time() -> None:
    async def scenario(parts: Parts) -> None:
        key = parts.helper_key()
        await parts.attacher.attach(key, approval_of(key.pid))
        await until_gone(parts.hub, key)

    run(scenario, keep_ns=SECOND_NS // 50)


def test_an_agent_that_is_not_kept_is_there_for_all_who_asked_for_it() -> None:
    async def scenario(parts: Parts) -> None:
        key = parts.helper_key()

        async def one() -> ConnectedAgent:
            agent = await parts.attacher.attach(key, approval_of(key.pid))
            with agent.held():
                await a_few_turns()
                assert parts.hub.get(key) is agent
            return agent

        assert len(set(await asyncio.gather(*(one() for _ in range(3))))) == 1
        await until_gone(parts.hub, key)

    run(scenario, keep_ns=0)


def test_an_agent_whose_callers_have_hung_up_leaves(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(parts: Parts) -> None:
        key = parts.helper_key()
        caller = asyncio.create_task(parts.attacher.attach(key, approval_of(key.pid)))
        await asyncio.sleep(0)
        caller.cancel()
        await soon(lambda: "was injected by scripted" in caplog.text, "the agent has come")
        await until_gone(parts.hub, key)

    caplog.set_level(logging.INFO)
    run(scenario, keep_ns=0)


def test_an_agent_stays_while_it_is_held_or_captures_and_leaves_after_the_last_capture() -> None:
    async def scenario(parts: Parts) -> None:
        key = parts.helper_key()
        agent = await parts.attacher.attach(key, approval_of(key.pid))
        agent.keep_ns = 0
        with agent.held():
            await a_few_turns()
            agent.attach("c1", Listener())
        await a_few_turns()
        assert parts.hub.get(key) is agent
        agent.detach("c1")
        await until_gone(parts.hub, key)

    run(scenario)


def test_a_process_whose_agent_left_can_be_attached_to_again() -> None:
    async def scenario(parts: Parts) -> None:
        key = parts.helper_key()
        first = await parts.attacher.attach(key, approval_of(key.pid))
        first.keep_ns = 0
        with first.held():
            pass
        await until_gone(parts.hub, key)
        assert await parts.attacher.attach(key, approval_of(key.pid)) is not first

    run(scenario)


def test_an_agent_that_came_by_itself_never_leaves_by_itself() -> None:
    async def scenario(parts: Parts) -> None:
        with RemoteAgent(parts.link.path) as remote:
            await asyncio.to_thread(remote.do, "hello")
            (agent,) = parts.hub.agents()
            with agent.held():
                pass
            await a_few_turns()
            assert parts.hub.agents() == [agent]

    run(scenario)


@pytest.mark.slow
def test_an_agent_that_does_not_introduce_itself_in_time_is_sent_away() -> None:
    async def scenario(parts: Parts) -> None:
        with pytest.raises(AttachError) as caught:
            await parts.attacher.attach(parts.helper_key(), parts.approval())
        assert caught.value.code in (AttachCode.TIMEOUT, AttachCode.FAILED)
        assert len(parts.hub) == 0

    run(scenario, "mute", deadline_ns=SECOND_NS // 100)


def test_a_channel_of_another_process_is_refused() -> None:
    async def scenario(parts: Parts) -> None:
        own = ProcessKey(os.getppid(), start_time_ns(os.getppid()))
        with pytest.raises(AttachError, match=f"the channel belongs to .*, not to process {own.pid};") as caught:
            await parts.attacher.attach(own, approval_of(own.pid))
        assert caught.value.code is AttachCode.FAILED
        assert len(parts.hub) == 0

    run(scenario)


def test_a_channel_of_another_user_is_refused() -> None:
    async def scenario(parts: Parts) -> None:
        approved = replace(parts.approval().credentials, uids=(12345,) * 4)
        with pytest.raises(AttachError, match="its channel was created by uid") as caught:
            await parts.attacher.attach(parts.helper_key(), Approval(approved))
        assert caught.value.code is AttachCode.REPLACED
        assert len(parts.hub) == 0

    run(scenario)


def test_who_decided_about_another_program_makes_an_attempt_of_its_own() -> None:
    async def scenario(parts: Parts) -> None:
        key, approval = parts.helper_key(), parts.approval()
        other = Approval(replace(approval.credentials, uids=(12345,) * 4))
        first, second = await asyncio.gather(
            parts.attacher.attach(key, approval), parts.attacher.attach(key, other), return_exceptions=True
        )
        assert isinstance(first, ConnectedAgent) and isinstance(second, AttachError)

    run(scenario)


def test_the_daemon_never_attaches_to_itself() -> None:
    async def scenario(parts: Parts) -> None:
        with pytest.raises(AttachError, match="is this daemon itself") as caught:
            await parts.attacher.attach(ProcessKey(os.getpid(), start_time_ns(os.getpid())), APPROVAL)
        assert caught.value.code is AttachCode.UNSUITABLE

    run(scenario)


def test_a_refusal_of_the_helper_reaches_the_caller() -> None:
    async def scenario(parts: Parts) -> None:
        with pytest.raises(AttachError, match="is traced by process 2") as caught:
            await parts.attacher.attach(parts.helper_key(), parts.approval())
        assert caught.value.code is AttachCode.TRACED

    run(scenario, "refuse")
