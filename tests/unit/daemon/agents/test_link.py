"""The link in the test's own event loop, where its limits can be made small."""

import asyncio
import contextlib
import gc
import os
import socket
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from kineto_agent.protocol import wire
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.agents import agent_hub, link
from kinetod.agents.agent_hub import AgentHub
from kinetod.agents.link import LinkServer
from kinetod.base.errors import StartError
from kinetod.processes import identity
from support.agent.scripted_agent import RemoteAgent, ScriptedAgent, hello_message
from support.service.calls_as import plain_python
from support.waiting import soon


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[AgentHub, LinkServer]]:
    with tempfile.TemporaryDirectory(prefix="kinetod-link-") as folder:
        hub = AgentHub()
        server = LinkServer(Path(folder) / "agent.sock", hub, mode=0o600)
        server.start()
        try:
            yield hub, server
        finally:
            server.close()


def test_who_says_nothing_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "HANDSHAKE_S", 0.05)

    async def scenario() -> str:
        async with serving() as (_, server):
            with ScriptedAgent(server.path) as agent:
                refusal = await asyncio.to_thread(agent.expect, wire.Refuse)
                assert await asyncio.to_thread(agent.receive) is None
                return refusal.reason

    assert asyncio.run(scenario()) == "no Hello within 0.05 s"


def test_one_user_cannot_hold_all_silent_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "MAX_SILENT_PER_UID", 2)

    async def scenario() -> str:
        async with serving() as (_, server):
            with ScriptedAgent(server.path), ScriptedAgent(server.path), ScriptedAgent(server.path) as third:
                return (await asyncio.to_thread(third.expect, wire.Refuse)).reason

    assert asyncio.run(scenario()) == "too many connections"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as other users")
def test_users_who_hold_all_connections_make_room_for_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "MAX_CONNECTIONS", 4)

    async def scenario() -> None:
        async with serving() as (hub, server):
            server.path.chmod(0o666)
            server.path.parent.chmod(0o755)
            with contextlib.ExitStack() as stack:
                agents = []
                for uid in (61005, 61005, 61006, 61006, 61001):
                    agent = stack.enter_context(RemoteAgent(server.path, python=plain_python(uid)))
                    await asyncio.to_thread(agent.do, "hello")
                    agents.append(agent)
                first, _, *others = (agent.pid for agent in agents)
                assert {agent.identity.pid for agent in hub.agents()} == {first, *others}
                with ScriptedAgent(server.path) as again:  # root's: it has fewer than any but those with one
                    await asyncio.to_thread(again.hello)
                    assert len(hub) == 4
                    with ScriptedAgent(server.path) as more:
                        assert (await asyncio.to_thread(more.expect, wire.Refuse)).reason == "too many connections"

    asyncio.run(scenario())


def test_an_agent_that_does_not_read_is_cut_off() -> None:
    async def scenario() -> int:
        async with serving() as (hub, server):
            with ScriptedAgent(server.path) as agent:
                await asyncio.to_thread(agent.hello)
                (connected,) = hub.agents()
                sent = 0
                while connected.send(wire.Cancel("x" * 60_000, False)):
                    sent += 1
                assert len(hub) == 0
                return sent

    assert link.SEND_QUEUE_FRAMES <= asyncio.run(scenario()) < link.SEND_QUEUE_FRAMES + 100


def told_of(call: str, since_ns: int) -> wire.State:
    return wire.State("c1", "PROCESS", 1, {}, call, since_ns)


def test_a_call_that_stands_is_known_and_told_until_it_returns_or_the_process_ends() -> None:
    told: list[tuple[int, pb.StandingCall, str]] = []

    async def scenario() -> None:
        hub = AgentHub(tell=lambda agent, call, how: told.append((agent.key.pid, call, how)))
        with tempfile.TemporaryDirectory(prefix="kinetod-link-") as folder:
            server = LinkServer(Path(folder) / "agent.sock", hub, mode=0o600)
            server.start()
            with ScriptedAgent(server.path) as agent:
                await asyncio.to_thread(agent.hello)
                agent.send(told_of("cuptiSubscribe", time.time_ns()))  # not yet for long enough
                for since_ns in (5, 0, 7):
                    agent.send(told_of("cuptiFinalize", since_ns))
                    await soon(lambda: bool(hub.standing()) is (since_ns > 0), "it is known")  # noqa: B023
            await soon(lambda: not hub.agents(), "the agent is gone")
            server.close()

    asyncio.run(scenario())
    call, again = (pb.StandingCall(call="cuptiFinalize", since_ns=since, capture_id="c1") for since in (5, 7))
    pid = os.getpid()
    ends = [(pid, call, "stands"), (pid, call, "returned"), (pid, again, "stands"), (pid, again, "agent gone")]
    assert told == ends


def test_what_an_agent_says_of_a_call_is_bounded_and_not_in_the_future() -> None:
    async def scenario() -> None:
        async with serving() as (hub, server):
            with ScriptedAgent(server.path) as agent:
                await asyncio.to_thread(agent.hello)
                agent.send(told_of("a\n" * 500, 1))
                await soon(lambda: bool(hub.standing()), "it is known")
                (standing,) = hub.standing()
                assert standing.standing is not None
                assert len(standing.standing.call) <= 64
                assert "\n" not in standing.standing.call
                agent.send(told_of("x", 2**62))
                await soon(lambda: not hub.standing(), "another call has been entered, just now")

    asyncio.run(scenario())


async def answer(hub: AgentHub, agent: ScriptedAgent, iterations: int) -> None:
    """The hub asks the agent, waits for it, and is answered."""
    refreshed = asyncio.create_task(hub.refresh(hub.agents(), 60))
    await asyncio.to_thread(agent.expect, wire.Describe)
    agent.send(hello_message(iterations=iterations))
    await refreshed


def test_who_has_just_answered_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_hub, "FRESH_S", 1000)

    async def scenario() -> None:
        async with serving() as (hub, server):
            with ScriptedAgent(server.path) as agent:
                await asyncio.to_thread(agent.hello)
                await answer(hub, agent, 7)
                await hub.refresh(hub.agents(), 60)
                hub.agents()[0].send(wire.Release("next"))
                assert await asyncio.to_thread(agent.receive) == wire.Release("next")

    asyncio.run(scenario())


def test_who_has_lately_answered_is_asked_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_hub, "FRESH_S", -1)
    monkeypatch.setattr(agent_hub, "RECENT_S", 1000)

    async def scenario() -> None:
        async with serving() as (hub, server):
            with ScriptedAgent(server.path) as agent:
                await asyncio.to_thread(agent.hello)
                await answer(hub, agent, 7)
                async with asyncio.timeout(30):
                    await hub.refresh(hub.agents(), 60)
                assert await asyncio.to_thread(agent.expect, wire.Describe) == wire.Describe()

    asyncio.run(scenario())


def test_who_has_not_answered_lately_is_waited_for() -> None:
    async def scenario() -> int:
        async with serving() as (hub, server):
            with ScriptedAgent(server.path) as agent:
                await asyncio.to_thread(agent.hello)
                await answer(hub, agent, 7)
                (connected,) = hub.agents()
                return connected.hello.iterations

    assert asyncio.run(scenario()) == 7


def test_who_has_not_answered_the_last_time_holds_up_nobody_again() -> None:
    async def scenario() -> None:
        async with serving() as (hub, server):
            with ScriptedAgent(server.path) as agent:
                await asyncio.to_thread(agent.hello)
                await hub.refresh(hub.agents(), 0)
                async with asyncio.timeout(30):
                    await hub.refresh(hub.agents(), 60)
                await asyncio.to_thread(agent.expect, wire.Describe)
                agent.send(hello_message(iterations=7))
                await hub.agents()[0].ask()
                assert hub.agents()[0].hello.iterations == 7

    asyncio.run(scenario())


def test_who_works_at_a_capture_is_asked_and_not_waited_for() -> None:
    async def scenario() -> None:
        async with serving() as (hub, server):
            with ScriptedAgent(server.path) as agent:
                await asyncio.to_thread(agent.hello)
                hub.agents()[0].attach("c", Ignoring())
                async with asyncio.timeout(30):
                    await hub.refresh(hub.agents(), 60)
                assert await asyncio.to_thread(agent.expect, wire.Describe) == wire.Describe()

    asyncio.run(scenario())


class Ignoring:
    """Listens to a capture and does nothing."""

    def on_frame(self, message: agent_hub.CaptureFrame, fd: int | None) -> None:
        """One frame."""

    def on_gone(self, died: bool, reason: str) -> None:
        """The end of the link."""


def test_queued_frames_arrive_in_order_once_the_agent_reads() -> None:
    async def scenario() -> list[str]:
        async with serving() as (hub, server):
            with ScriptedAgent(server.path) as agent:
                await asyncio.to_thread(agent.hello)
                (connected,) = hub.agents()
                for number in range(40):
                    assert connected.send(wire.Cancel(str(number).ljust(60_000), False))
                received = [await asyncio.to_thread(agent.expect, wire.Cancel) for _ in range(40)]
                return [message.capture_id.strip() for message in received]

    assert asyncio.run(scenario()) == [str(number) for number in range(40)]


def test_without_pidfd_a_death_is_noticed_though_a_child_holds_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_peer_pidfd", lambda _sock, _pid: None)

    async def scenario() -> None:
        async with serving() as (hub, server):
            with RemoteAgent(server.path) as agent:
                await asyncio.to_thread(agent.do, "hello", "fork")
                hub.check_alive()
                assert len(hub) == 1
                agent.process.kill()
                agent.process.wait()
                hub.check_alive()
                assert len(hub) == 0

    asyncio.run(scenario())


def test_an_agent_that_sends_too_much_is_read_more_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "FRAMES_BURST", 20.0)
    monkeypatch.setattr(link, "FRAMES_PER_SECOND", 0.001)

    def flood(agent: ScriptedAgent) -> int:
        agent.sock.settimeout(0.2)
        for number in range(2000):
            try:
                agent.send(hello_message(iterations=number))
            except TimeoutError:
                return number
        return 2000

    async def scenario() -> int:
        async with serving() as (hub, server):
            with ScriptedAgent(server.path) as agent:
                await asyncio.to_thread(agent.hello)
                sent = await asyncio.to_thread(flood, agent)
                assert hub.agents()[0].hello.iterations < sent
                return sent

    assert asyncio.run(scenario()) < 2000  # its socket was full


def test_a_dead_incompatible_agent_is_forgotten() -> None:
    async def scenario() -> None:
        async with serving() as (hub, server):
            with ScriptedAgent(server.path) as agent:
                frame = bytearray(wire.encode(hello_message()))
                frame[4] += 1
                agent.send_raw(bytes(frame))
                await asyncio.to_thread(agent.expect, wire.Refuse)
            (key,) = hub.incompatible()
            assert key.pid == os.getpid()
            assert hub.incompatible_version(key) == 2
            with ScriptedAgent(server.path) as agent:  # upgraded
                await asyncio.to_thread(agent.hello)
                assert hub.incompatible() == []

    asyncio.run(scenario())


def test_a_path_that_cannot_be_bound_is_an_error_of_the_start() -> None:
    async def scenario() -> None:
        LinkServer(Path("/nowhere/agent.sock"), AgentHub(), mode=0o600).start()

    with pytest.raises(StartError, match=r"cannot listen on /nowhere/agent\.sock"):
        asyncio.run(scenario())


def test_who_does_not_listen_is_not_mended(tmp_path: Path) -> None:
    server = LinkServer(tmp_path / "agent.sock", AgentHub(), mode=0o600)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(server.path))
        assert (server.listening, server.mend()) == (False, [])


def test_connections_that_said_nothing_leave_no_descriptor_behind() -> None:
    async def scenario() -> int:
        async with serving() as (_, server):
            gc.collect()  # what other tests have left
            before = len(list(Path("/proc/self/fd").iterdir()))
            for _ in range(50):
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
                    silent.connect(str(server.path))
                    await soon(lambda: server._connections, "the server has the connection")
                await soon(lambda: not server._connections, "the server has closed it")
            return len(list(Path("/proc/self/fd").iterdir())) - before

    assert asyncio.run(scenario()) == 0


def test_a_socket_that_somebody_removed_is_made_again_and_who_is_connected_stays() -> None:
    async def scenario() -> tuple[list[str], int]:
        async with serving() as (hub, server):
            with ScriptedAgent(server.path) as first, RemoteAgent(server.path) as second:
                assert server.mend() == []
                await asyncio.to_thread(first.hello)
                server.path.unlink()
                said = server.mend()
                with RemoteAgent(server.path) as third:
                    await asyncio.to_thread(second.do, "hello")
                    await asyncio.to_thread(third.do, "hello")
                    return said, len(hub)

    assert asyncio.run(scenario()) == ([], 3)


def test_a_socket_that_cannot_be_made_again_is_a_problem() -> None:
    async def scenario() -> list[str]:
        async with serving() as (_, server):
            server.path.unlink()
            server.path.write_text("no socket")
            return server.mend()

    (problem,) = asyncio.run(scenario())
    assert problem.startswith("agents cannot connect: the socket ")
    assert problem.endswith("exists but is not a socket; move it away or choose another path")
