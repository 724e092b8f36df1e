"""One moment at which the daemon's peers do not do their part: readers do not read, connections are silent."""

import contextlib
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from campaign.parts.faults import CALL_S, SETTLED_S, Begun, Grounds, Site, site
from campaign.parts.faults_kills import pause
from kineto_protos.v1 import profiler_pb2 as pb
from support.waiting import scaled_option, until

SILENT = 1000
STREAMS = 8
UNREAD_S = 4.0
AGENT_DEADLINE_S = 2.0  # on a quiet machine
NOT_READING = frozenset({"AGENT_SILENT", "AGENT_STUCK"})
# Opens streams that never end, then is stopped: nobody takes what comes out of its sockets.
_CLIENT = """
import sys
import grpc
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_protos.services import ProfilerStub
stub = ProfilerStub(grpc.insecure_channel(sys.argv[1]))
streams = [
    stub.WatchHost(pb.WatchHostRequest(interval_ns=500_000_000))
    for _ in range(int(sys.argv[2]))
]
for stream in streams:
    next(stream)
print("ready", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def with_short_deadline(agents: int = 2) -> Iterator[Site]:
    """Runs a host whose daemon does not wait long for agents."""
    with site("--agent-deadline", scaled_option(AGENT_DEADLINE_S), agents=agents) as host:
        yield host


def slow_client(host: Site, _chance: random.Random, *, unread_s: float = UNREAD_S) -> None:
    """Adds a client that requests streams and reads none; others are served, and its death frees everything."""
    command = [sys.executable, "-c", _CLIENT, host.daemon.address, str(STREAMS)]
    with subprocess.Popen(
        command, env=host.daemon.client_environ(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as client:
        try:
            assert client.stdout is not None
            assert client.stdout.readline() == "ready\n"
            client.send_signal(signal.SIGSTOP)
            host.serves_again(time.monotonic())
            host.begin(*host.pids())
            pause(unread_s)
            host.settle(Grounds())
        finally:
            client.kill()
    host.tally.hits += 1


def slow_agent(host: Site, chance: random.Random) -> None:
    """Makes an agent read nothing for a while: its target fails, the others are traced, and it comes back."""
    victim = chance.choice(host.agents)
    victim.send_signal(signal.SIGSTOP)
    try:
        host.serves_again(time.monotonic())
        begun = host.begin(*host.pids())
        until(lambda: _has_verdict(host, begun, victim.pid), "its target has failed", SETTLED_S, state=host.daemon.log)
    finally:
        victim.send_signal(signal.SIGCONT)
    captures = host.settle(Grounds(reasons_of={victim.pid: NOT_READING}))
    host.tally.hits += any(target.reason_code for capture in captures for target in capture.targets)


def _has_verdict(host: Site, begun: Begun, pid: int) -> bool:
    capture = host.daemon.stub().GetCapture(pb.GetCaptureRequest(id=begun.id), timeout=CALL_S)
    (target,) = (each for each in capture.targets if each.pid == pid)
    return bool(target.verdict)


def silent_connections(host: Site, _chance: random.Random, *, count: int = SILENT, hang_up: bool = False) -> None:
    """Opens silent connections to agents' and clients' sockets; they close themselves (hang_up), or the daemon does."""
    _raise_file_limit(2 * count + 256)
    before = host.measure()
    with contextlib.ExitStack() as stack:
        links = [stack.enter_context(_silent(host.daemon.agent_socket, socket.SOCK_SEQPACKET)) for _ in range(count)]
        for _ in range(count):
            stack.enter_context(_silent(host.daemon.rpc_socket, socket.SOCK_STREAM))
        host.daemon.disconnect()
        host.serves_again(time.monotonic())
        host.begin(*host.pids())
        host.settle(Grounds())
        if not hang_up:
            for each in links:
                while each.recv(1 << 16):  # it is told why
                    pass
    until(lambda: host.measure().descriptors <= before.descriptors, "their descriptors are closed", state=host.measure)
    host.tally.hits += 1


def _silent(path: Path, kind: socket.SocketKind) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, kind)
    connection.settimeout(30)
    connection.connect(os.fspath(path))
    return connection


def _raise_file_limit(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
