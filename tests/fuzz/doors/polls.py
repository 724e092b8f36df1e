"""Datagrams to a real daemon that answers libkineto's polls, in a folder: from many processes, of another user as root.

A case is the datagrams of one process that ends after them; the first byte says how each is sent. Meanwhile a
well-behaved process polls, and must be answered each time.
"""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.peers import libkineto
from support.peers.libkineto import Libkineto
from support.service.daemon import Daemon, running_daemon

from fuzz import mutate
from fuzz.doors.link import Health
from fuzz.doors.loop import Case, Failure
from fuzz.doors.poll_senders import ABSTRACT, DESCRIPTORS, ELSEWHERE, LINKED, NAMED, UNNAMED, Senders

POLL_PERIOD_S = 0.3  # of the well-behaved process: more often is too often
LATE_S = 5.0  # this machine is busy with the campaign itself
TRIES = 3
LOOK_EVERY = 300  # cases
SETTINGS = """
[dynolog]
ipc = true
containers = false
socket_dirs = ["{folder}"]
[access]
requests_per_second = 100000
"""


class Polls:
    """The folder with the daemon's socket."""

    name = "polls"

    def __init__(self, daemon: Daemon, folder: Path, senders: Senders) -> None:
        self._senders = senders
        self._health = Health(daemon)
        self._polite = Libkineto(folder)
        self._played = 0
        self._polled_s = 0.0
        self.slowest_ms = 0.0

    def case(self, rng: random.Random) -> Case:
        """Up to 15 datagrams, most of them nearly right."""
        return [_step(rng) for _ in range(rng.randrange(1, 16))]

    def play(self, case: Case) -> str:
        """The sender gets well-formed answers or none; the well-behaved process gets its own."""
        self._played += 1
        outcome = self._senders.send(case)
        if time.monotonic() - self._polled_s >= POLL_PERIOD_S:
            self._poll()
        if self._played % LOOK_EVERY == 0:
            self._health.look()
        return outcome

    def _poll(self) -> None:
        # A poll that the daemon reads late gets no answer, and it may come late where this machine is very busy.
        answer = next((said for _ in range(TRIES) if (said := self._polite.poll(patience_s=LATE_S)) is not None), None)
        self._polled_s = time.monotonic()
        self.slowest_ms = max(self.slowest_ms, self._polite.waited_s * 1000)
        if answer != "":
            raise Failure(f"the well-behaved process was answered {answer!r}")

    def processes(self) -> dict[str, int]:
        """The daemon."""
        return self._health.processes()

    def settle(self) -> None:
        """The daemon is in order, and still answers."""
        self._poll()
        self._health.look()
        self._polite.close()


def _step(rng: random.Random) -> bytes:
    kind = rng.choice((NAMED,) * 12 + (UNNAMED, ELSEWHERE, ABSTRACT, LINKED, DESCRIPTORS))
    pids = [mutate.number(rng) & 0x7FFFFFFF for _ in range(rng.randrange(12))]
    if rng.random() < 0.8:
        datagram = libkineto.poll(rng.choice((0, 1, 2, 3, -1)), pids=pids, job=mutate.number(rng) & (1 << 63) - 1)
    else:
        datagram = libkineto.registration(rng.randrange(-1, 9), rng.randrange(1 << 31), rng.randrange(1 << 63))
    if rng.random() < 0.5:
        datagram = mutate.damaged(datagram, rng)
    if rng.random() < 0.03:
        datagram += bytes(rng.randrange(10_000))
    return kind + datagram


@contextmanager
def opened(folder: Path) -> Iterator[Polls]:
    """The door, opened with a running daemon."""
    folder.chmod(0o711)
    sockets = folder / "ipc"
    sockets.mkdir()
    sockets.chmod(0o1777)
    config = folder / "config.toml"
    config.write_text(SETTINGS.format(folder=sockets))
    with Senders(sockets) as senders, running_daemon("--config", str(config)) as daemon:
        door = Polls(daemon, sockets, senders)
        yield door
        print(f"  a well-behaved process was answered each time, within {door.slowest_ms:.1f} ms")
