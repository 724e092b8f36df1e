"""What a broken or hostile agent can do to the daemon: nothing but lose its own connection."""

import os
import socket

import pytest
from kineto_agent.protocol import wire
from kineto_protos.v1 import profiler_pb2 as pb
from support.agent.scripted_agent import RemoteAgent, ScriptedAgent, hello_message
from support.service.daemon import Daemon


def agents(daemon: Daemon) -> int:
    count: int = daemon.stub().GetHost(pb.GetHostRequest(), timeout=10).agents
    return count


def refusal(agent: ScriptedAgent) -> str:
    """The reason, and the end of the connection behind it."""
    reason = agent.expect(wire.Refuse).reason
    assert agent.receive() is None
    return reason


HELLO = wire.encode(hello_message())


@pytest.mark.parametrize(
    ("frame", "problem"),
    [
        (b"x", "no header"),
        (b"HTTP/1.1 GET /index.html", "not a kineto frame"),
        (HELLO[:-1], "payload bytes"),
        (HELLO[:8] + (0).to_bytes(4, "little") + HELLO[12:], "payload bytes"),
        (HELLO[:6] + b"\xff\xff" + HELLO[8:], "unknown message type"),
        (HELLO.replace(b'"rank":null', b'"rank":"no"'), "Hello.rank has a wrong type"),
        (HELLO.replace(b"null", b"nul]", 1), "not JSON"),
        (wire.encode(wire.Welcome("0.1.0")), "not expected"),
        (wire.encode(wire.State("capture", "COLLECT", 1)), "not expected"),
    ],
)
def test_a_frame_that_the_protocol_does_not_allow_ends_the_connection(
    daemon: Daemon, frame: bytes, problem: str
) -> None:
    with ScriptedAgent(daemon.agent_socket) as agent:
        agent.send_raw(frame)
        assert problem in refusal(agent)
    assert agents(daemon) == 0


def test_a_truncated_frame_ends_only_that_connection(daemon: Daemon) -> None:
    with RemoteAgent(daemon.agent_socket) as other, ScriptedAgent(daemon.agent_socket) as agent:
        other.do("hello")
        agent.hello()
        agent.send_raw(HELLO[: wire.HEADER_BYTES + 5])
        assert "payload bytes" in refusal(agent)
        (process,) = daemon.stub().ListProcesses(pb.ListProcessesRequest(), timeout=10).processes
        assert process.pid == other.pid


def test_an_oversized_frame_ends_the_connection(daemon: Daemon) -> None:
    with ScriptedAgent(daemon.agent_socket) as agent:
        agent.send_raw(HELLO + bytes(wire.MAX_FRAME_BYTES))
        assert "longer than 65536 bytes" in refusal(agent)


@pytest.mark.parametrize("count", [1, 2, 4, 16])
def test_descriptors_that_nobody_asked_for_are_closed(daemon: Daemon, count: int) -> None:
    ends = [socket.socketpair() for _ in range(count)]
    with ScriptedAgent(daemon.agent_socket) as agent:
        agent.send_raw(HELLO, [theirs.fileno() for _, theirs in ends])
        assert "file descriptor" in refusal(agent)
    for ours, theirs in ends:
        theirs.close()
        assert ours.recv(1) == b""  # nobody else holds the other end
        ours.close()


def test_an_arena_without_descriptor_ends_the_connection(daemon: Daemon) -> None:
    with ScriptedAgent(daemon.agent_socket) as agent:
        agent.hello()
        agent.send(wire.Arena("capture", "cupti", "cupti/1", {}))
        assert "Arena with 0 file descriptors" in refusal(agent)


def test_an_arena_for_no_capture_is_closed_and_ignored(daemon: Daemon) -> None:
    ours, theirs = socket.socketpair()
    with ScriptedAgent(daemon.agent_socket) as agent:
        agent.hello()
        agent.send(wire.Arena("capture", "cupti", "cupti/1", {}), [theirs.fileno()])
        theirs.close()
        assert ours.recv(1) == b""
        ours.close()
        assert agents(daemon) == 1


def test_nobody_can_hold_others_up_by_saying_nothing(daemon: Daemon) -> None:
    silent = [ScriptedAgent(daemon.agent_socket) for _ in range(200)]
    for each in silent:
        each.connect()
    with ScriptedAgent(daemon.agent_socket) as agent:
        agent.hello()
        assert agents(daemon) == 1
    for each in silent:
        each.close()


def test_a_flood_of_frames_does_not_hold_others_up(daemon: Daemon) -> None:
    with RemoteAgent(daemon.agent_socket) as flooder, ScriptedAgent(daemon.agent_socket) as agent:
        flooder.do("hello")
        flooder.tell("flood 20000")
        agent.hello()
        everything = pb.ListProcessesRequest(selector=pb.Selector(helpers=True))
        pids = {each.pid for each in daemon.stub().ListProcesses(everything, timeout=5).processes}
        assert os.getpid() in pids


def test_an_agent_from_a_capture_of_an_older_daemon_is_told_to_stop(daemon: Daemon) -> None:
    with ScriptedAgent(daemon.agent_socket, busy_capture_id="gone") as agent:
        agent.hello()
        assert agent.expect(wire.Cancel) == wire.Cancel("gone", False)


def test_the_same_process_connecting_again_replaces_its_first_connection(daemon: Daemon) -> None:
    with ScriptedAgent(daemon.agent_socket) as first, ScriptedAgent(daemon.agent_socket) as second:
        first.hello()
        second.hello()
        assert first.receive() is None
        assert agents(daemon) == 1
