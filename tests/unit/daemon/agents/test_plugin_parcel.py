"""Agents that take plug-ins get them at once, and are introduced once they have said what they offer with them."""

import array
import asyncio
import os
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from kineto_agent.protocol import wire
from kinetod.agents.agent_hub import AgentHub
from kinetod.agents.link import Connection, LinkServer
from support.agent.plugins import sealed_bytes
from support.agent.scripted_agent import ScriptedAgent, hello_message
from support.waiting import soon

CONTENT = b"plug-ins"
MESSAGE = wire.Plugins("digest", ["toy"])


@dataclass
class Parcel:
    descriptor: int
    message: wire.Plugins = MESSAGE


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[AgentHub, LinkServer]]:
    parcel = Parcel(sealed_bytes(CONTENT))
    with tempfile.TemporaryDirectory(prefix="kinetod-link-") as folder:
        hub = AgentHub(parcel)
        server = LinkServer(Path(folder) / "agent.sock", hub, mode=0o600)
        server.start()
        try:
            yield hub, server
        finally:
            server.close()
            os.close(parcel.descriptor)


def received(agent: ScriptedAgent) -> tuple[wire.Message, list[int]]:
    space = socket.CMSG_SPACE(8)
    frame, ancillary, flags, _ = agent.sock.recvmsg(wire.MAX_FRAME_BYTES, space)
    assert not flags & socket.MSG_CTRUNC
    numbers = array.array("i")
    for _, _, data in ancillary:
        numbers.frombytes(data)
    return wire.decode(frame), list(numbers)


def test_the_agent_gets_them_behind_its_welcome_and_is_asked_what_it_offers_now() -> None:
    async def scenario() -> None:
        async with serving() as (hub, server):
            with ScriptedAgent(server.path) as agent:
                agent.send(hello_message(plugins=1))
                welcome, none = await asyncio.to_thread(received, agent)
                assert (isinstance(welcome, wire.Welcome), none) == (True, [])
                message, (descriptor,) = await asyncio.to_thread(received, agent)
                assert message == MESSAGE
                assert os.pread(descriptor, 99, 0) == CONTENT
                os.close(descriptor)
                assert await asyncio.to_thread(received, agent) == (wire.Describe(), [])
                agent.send(hello_message(plugins=1, sources={"toy": ["toy_kernel"]}))
                await soon(lambda: hub.agents()[0].activity_types() == ["toy_kernel"], "the answer is here")

    asyncio.run(scenario())


def test_an_agent_that_takes_none_gets_none() -> None:
    async def scenario() -> None:
        async with serving() as (hub, server):
            with ScriptedAgent(server.path) as agent:
                agent.send(hello_message())
                await asyncio.to_thread(agent.expect, wire.Welcome)
                assert not hub.agents()[0].is_asked()
                hub.agents()[0].connection.close("the test ends")
                assert await asyncio.to_thread(agent.receive) is None

    asyncio.run(scenario())


def test_an_attach_ends_when_the_agent_has_said_what_it_offers() -> None:
    async def scenario() -> None:
        async with serving() as (hub, server):
            with ScriptedAgent(server.path) as agent:
                agent.send(hello_message(plugins=1))
                await soon(lambda: len(hub) == 1, "it is known")
                (connected,) = hub.agents()
                connection: Connection = connected.connection
                waiting = hub.introduction(connection)
                await asyncio.sleep(0)
                assert not waiting.done()
                agent.send(hello_message(plugins=1, sources={"toy": ["toy_kernel"]}))
                assert (await waiting).activity_types() == ["toy_kernel"]

    asyncio.run(scenario())


def test_an_agent_that_ends_meanwhile_ends_the_attach() -> None:
    async def scenario() -> str:
        async with serving() as (hub, server):
            with ScriptedAgent(server.path) as agent:
                agent.send(hello_message(plugins=1))
                await soon(lambda: len(hub) == 1, "it is known")
                waiting = hub.introduction(hub.agents()[0].connection)
                agent.close()
                try:
                    await waiting
                except Exception as exc:
                    return str(exc)
        return ""

    assert "but did not start: " in asyncio.run(scenario())


def test_a_parcel_that_has_to_wait_keeps_its_descriptor(tmp_path: Path) -> None:
    """The agent does not read: the frame with the descriptor is queued."""

    async def scenario() -> None:
        async with serving() as (hub, server):
            with ScriptedAgent(server.path) as agent:
                agent.send(hello_message())
                await asyncio.to_thread(agent.expect, wire.Welcome)
                (connected,) = hub.agents()
                while not connected.connection._queue:
                    connected.send(wire.Cancel("x" * 60_000, False))
                connected.connection.send(MESSAGE, parcel := sealed_bytes(CONTENT))
                message, numbers = await asyncio.to_thread(received, agent)
                while isinstance(message, wire.Cancel):
                    assert numbers == []
                    message, numbers = await asyncio.to_thread(received, agent)
                assert message == MESSAGE
                assert os.pread(numbers[0], 99, 0) == CONTENT
                os.close(numbers[0])
                os.close(parcel)

    asyncio.run(scenario())
