"""Kills the helper process, or the daemon that asked it, at random moments of an attach.

Theory of operation
    Each moment has a helper of its own, which has imported everything (it has answered a request that it refuses). A
    first, undisturbed attach shows how long one takes; the others are killed at a random point of that time and a
    little beyond. Between them the target must go on; at the end an ordinary attach must succeed.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from campaign.attach_targets.control import LAPS
from campaign.parts.attach_harness import Attempt, Ended, Row, RunningTarget, version_of
from kinetod.attach_helper.attach_pool import COMMAND
from kinetod.processes import credentials
from kinetod.processes.identity import BOOT_TIME_NS, PROC, start_time_ns
from support.targets.attachers import HelperAttacher
from support.waiting import scaled, until

ANSWER_S = 20.0
BEYOND = 1.3
MOST_MS = 20.0  # an attach that waited for its target is not what is to be cut


class LoneHelper:
    """One attach helper process, driven by the test."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen([*COMMAND], stdin=theirs.fileno())
        self._socket.settimeout(scaled(ANSWER_S))

    def warm(self) -> None:
        """Waits until the helper has answered once."""
        self.ask(os.getpid())
        self.answer()

    def ask(self, pid: int) -> None:
        """Sends the request for an attach."""
        request = {
            "id": 1,
            "pid": pid,
            "start_time_ns": start_time_ns(pid, PROC),
            "boot_time_ns": BOOT_TIME_NS,
            "approved": credentials.read(pid).to_dict(),
            "deadline_s": 10.0,
            "token": time.time_ns(),
        }
        self._socket.send(json.dumps(request).encode())

    def answer(self) -> None:
        """Waits for the answer; closes a channel that comes with it."""
        _data, descriptors, _flags, _address = socket.recv_fds(self._socket, 16384, 4)
        for descriptor in descriptors:
            os.close(descriptor)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.process.kill()
        self.process.wait()
        self._socket.close()

    def lose(self) -> None:
        """Has it find its daemon dead, and waits for its end, which its watchdog may hasten on a busy machine."""
        self._socket.close()
        status = self.process.wait(scaled(ANSWER_S))
        assert status in (0, -signal.SIGKILL), f"the helper ended with {status}"


def kill_moments(kind: str, count: int, python: str | Path = sys.executable, *, daemon: bool = False) -> Row:
    """A Row of one ordinary attach after the given number of killed ones. A killed attach counts as refused.

    daemon: it is what dies, not the helper.
    """
    row = Row(kind, version_of(python), "kill -9")
    chance = random.Random()
    with RunningTarget(kind, python) as target:
        try:
            target.wait_ready()
            taken_ms = _usual_ms(target)
            for _ in range(count):
                helper = LoneHelper()
                helper.warm()
                moment_ms = chance.uniform(0, taken_ms * BEYOND)
                helper.ask(target.pid)
                end = time.perf_counter_ns() + moment_ms * 1e6
                while time.perf_counter_ns() < end:
                    pass
                (helper.lose if daemon else helper.kill)()
                row.attempts.append(Attempt(outcome="refused", reason="the helper was killed"))
                laps = target.words[LAPS]
                until(lambda since=laps: target.words[LAPS] > since or target.process.poll() is not None, "it goes on")  # type: ignore[misc]
                target.check()
            with_helper = HelperAttacher()
            try:
                row.attempts.append(with_helper.attach(target.pid))
            finally:
                with_helper.close()
            row.ends += [Attempt(outcome="wrong", reason=wrong) for wrong in target.finish()]
        except Ended as exc:
            row.ends.append(Attempt(outcome=exc.outcome, reason=exc.reason))
        except AssertionError as exc:
            row.ends.append(Attempt(outcome="hung", reason=str(exc)))
    return row


def _usual_ms(target: RunningTarget) -> float:
    times = []
    for _ in range(2):
        helper = LoneHelper()
        helper.warm()
        begin = time.perf_counter()
        helper.ask(target.pid)
        helper.answer()
        times.append((time.perf_counter() - begin) * 1e3)
        helper.kill()
    return min(MOST_MS, max(times))
