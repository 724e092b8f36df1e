"""One user floods the door for Dynolog's clients; another one, and gRPC's callers, are answered as before."""

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz.mutate import damaged
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.base.logs import PERIOD_S
from support.agent.scripted_agent import RemoteAgent
from support.dynolog import client, recorded
from support.dynolog.door import door_of, trace_request
from support.service.calls_as import OK, CallsAs, plain_python
from support.service.daemon import Daemon, as_user
from support.waiting import scaled

ADA, BOB = 61001, 61002
FLOOD = Path(__file__).with_name("flood.py")
MOST_S = 3.0  # for an answer beside the flood, on a quiet machine
FUZZ_SECONDS = float(os.environ.get("DYNOLOG_FUZZ_SECONDS", "10"))
pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.getuid() != 0, reason="users are played by root")]


@contextlib.contextmanager
def flooded(door: str) -> Iterator["subprocess.Popen[str]"]:
    """A flood by ADA for the block."""
    command = [*as_user(ADA), sys.executable, "-S", str(FLOOD), door]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def test_who_floods_the_door_keeps_no_other_user_out(daemon: Daemon, door: str) -> None:
    agent = RemoteAgent(daemon.agent_socket, python=plain_python(BOB))
    try:
        agent.do("hello")
        with flooded(door) as flood, CallsAs(BOB) as bob:
            slowest_s, flooded_s = 0.0, time.monotonic()
            for _ in range(20):
                began = time.monotonic()
                assert client.asked_as(BOB, door, recorded.STATUS) == {"status": 1}
                slowest_s = max(slowest_s, time.monotonic() - began)
            assert slowest_s < scaled(MOST_S)
            told = client.asked_as(BOB, door, trace_request(pids=[agent.pid]))
            assert told["processesMatched"] == [agent.pid], told
            assert bob.call(daemon.address, "GetHost", pb.GetHostRequest()).code == OK
            assert client.asked(door, recorded.STATUS) == {"status": 1}  # root's
            assert flood.stdin is not None and flood.stdout is not None
            flood.stdin.close()
            counts = json.loads(flood.stdout.readline())
            periods = 2 + (time.monotonic() - flooded_s) / PERIOD_S
    finally:
        agent.kill()
    assert counts["hang_up"] > 100 and counts["silent"] > 100, counts
    refused = [line for line in daemon.log().splitlines() if f"(uid {ADA}) was refused" in line]
    unanswered = [line for line in daemon.log().splitlines() if f"(uid {ADA}) was not answered" in line]
    assert 1 <= len(refused) < 20 * periods  # counted, not listed
    assert len(unanswered) < 5 * periods
    assert client.asked_as(BOB, door, recorded.STATUS) == {"status": 1}


def test_damaged_requests_leave_a_daemon_that_works_and_has_no_error(daemon: Daemon, door: str) -> None:
    rng = random.Random(7)
    seeds = [recorded.STATUS, recorded.PAUSE, recorded.JOB, recorded.MEMORY, recorded.QUOTE, recorded.ITERATIONS]
    end, count = time.monotonic() + FUZZ_SECONDS, 0
    before = len(daemon.log())
    while time.monotonic() < end:
        sent = damaged(rng.choice(seeds), rng)
        with contextlib.suppress(OSError), client.connected(door_of(daemon)) as sock:
            sock.sendall(sent)
            sock.shutdown(1)
            sock.recv(65536)
        count += 1
    assert count > 20
    assert client.asked(door, recorded.STATUS) == {"status": 1}
    assert "Traceback" not in daemon.log()[before:]
