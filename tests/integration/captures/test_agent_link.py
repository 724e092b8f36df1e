"""What a broken or hostile agent can do to the daemon: nothing but lose its own connection."""

import contextlib
import os
import signal
import socket
import subprocess
import sys

import pytest
from fuzz.doors.strange_descriptors import pass_lingering, silent_file
from kineto_agent.protocol import wire
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.agents.link import LOG_BURST
from support.agent.scripted_agent import RemoteAgent, ScriptedAgent, hello_message
from support.machine.descriptors import open_files
from support.service.daemon import Daemon
from support.waiting import scaled, until


def agents(daemon: Daemon) -> int:
    count: int = daemon.stub().GetHost(pb.GetHostRequest(), timeout=scaled(10)).agents
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
        (HELLO.replace(b'"rank":null', b'"rank":"no"'), "Hello.rank has the wrong type"),
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
        (process,) = daemon.stub().ListProcesses(pb.ListProcessesRequest(), timeout=scaled(10)).processes
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
        assert "Arena without a file descriptor" in refusal(agent)


def test_an_arena_for_no_capture_is_closed_and_ignored(daemon: Daemon) -> None:
    with ScriptedAgent(daemon.agent_socket) as agent:
        agent.hello()
        for fd in (os.memfd_create("stray"), os.memfd_create("stray")):
            agent.send(wire.Arena("capture", "cupti", "cupti/1", {}), [fd])
            os.close(fd)
        assert agents(daemon) == 1
        until(lambda: not any("stray" in each for each in open_files(daemon.pid).values()), "the daemon closes them")


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


def test_a_descriptor_whose_close_never_returns_holds_nobody_up(daemon: Daemon) -> None:
    arena = wire.Arena("capture", "cupti", "cupti/1", {})
    with silent_file() as file:
        for message in (arena, hello_message()):
            with ScriptedAgent(daemon.agent_socket) as agent:
                agent.hello()
                agent.send(message, [file.fd])
                assert "file descriptor" in refusal(agent)
        assert file.asked_to_close.wait(60)
        assert agents(daemon) == 0
    with ScriptedAgent(daemon.agent_socket) as agent:
        agent.hello()
        assert agents(daemon) == 1


def test_descriptors_that_linger_when_they_go_hold_nobody_up(daemon: Daemon) -> None:
    with contextlib.ExitStack() as stack:
        agent = stack.enter_context(ScriptedAgent(daemon.agent_socket))
        os.kill(daemon.pid, signal.SIGSTOP)
        for _ in range(3):  # it reads the first, and hangs up with the others unread
            stack.enter_context(pass_lingering(agent.sock, HELLO))
        os.kill(daemon.pid, signal.SIGCONT)
        assert agents(daemon) == 0


def test_a_lingering_descriptor_in_a_call_holds_nobody_up(daemon: Daemon) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(daemon.rpc_socket))
        with pass_lingering(client, b"PRI * HTTP/2.0"):
            assert agents(daemon) == 0


def test_connections_of_the_dead_are_few_lines_of_the_log(daemon: Daemon) -> None:
    connect = "import socket, sys\nfor _ in range(200): s = socket.socket(1, 5); s.connect(sys.argv[1]); s.detach()"
    os.kill(daemon.pid, signal.SIGSTOP)
    subprocess.run([sys.executable, "-c", connect, str(daemon.agent_socket)], check=True)
    os.kill(daemon.pid, signal.SIGCONT)
    with ScriptedAgent(daemon.agent_socket) as agent:
        agent.hello()
    assert 1 <= daemon.log().count("ended right after connecting") <= LOG_BURST


def test_agents_that_greet_and_leave_hold_no_descriptors(daemon: Daemon) -> None:
    def held() -> int:
        return sum("pidfd" in name or "socket" in name for name in open_files(daemon.pid).values())

    before = held()
    for _ in range(200):
        with ScriptedAgent(daemon.agent_socket) as agent:
            agent.hello()
    until(lambda: agents(daemon) == 0, "all connections have ended")
    assert held() < before + 20
