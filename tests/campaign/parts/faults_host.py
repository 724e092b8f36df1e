"""One random moment of captures under load at which the host goes wrong: its disk, its folders, its clock."""

import contextlib
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
from campaign.parts.faults import SERVES_S, SETTLED_S, Grounds, Site, check_verdicts, site, slower_than_idle
from campaign.parts.faults_kills import BUSY, LONGEST_S, pause
from kineto_protos.v1 import profiler_pb2 as pb
from support.machine.shifted_clock import ShiftedClock
from support.service.daemon import watch_to_end
from support.small_disk import small_disk
from support.waiting import until

DISK_MIB = 48
LONGEST_FULL_S = 8.0  # the daemon tries for 5 s to store a verdict before it goes on to try later
LONGEST_JUMP_S = 30 * 24 * 3600
ROOM = ("--min-free-bytes", "0")
CANNOT_WRITE = frozenset({"DISK_FULL", "STORE_IO"})
DISK_FULL = Grounds(reasons=CANNOT_WRITE, refusals=BUSY | {"LOW_DISK"})


@contextlib.contextmanager
def on_small_disk(agents: int = 2) -> Iterator[Site]:
    """Runs a host whose store lies on a small disk."""
    with small_disk(f"size={DISK_MIB}m") as disk, site(*ROOM, agents=agents, state_dir=disk / "state") as host:
        yield host


def fill_disk(host: Site, chance: random.Random, *, longest_full_s: float = LONGEST_FULL_S) -> None:
    """Fills the disk to the last byte, and frees space again some seconds later."""
    host.begin(*host.pids())
    pause(chance.uniform(0, LONGEST_S))
    filler = host.daemon.state_dir.parent / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    filled = time.monotonic()
    host.serves_again(filled)
    host.begin(*host.pids())  # refused, or it finds every process busy
    pause(chance.uniform(0, longest_full_s))
    filler.unlink()
    host.serves_again(time.monotonic())
    captures = host.settle(DISK_FULL)
    host.tally.hits += any(target.reason_code for capture in captures for target in capture.targets)


def remove_store(host: Site, chance: random.Random) -> None:
    """Removes the whole state folder: running captures are told, and the next ones are stored as usual."""
    host.begin(*host.pids())
    ends: list[pb.Capture] = []
    watching = threading.Thread(target=_watch, args=(host, ends))
    watching.start()
    pause(chance.uniform(0, LONGEST_S))
    while host.daemon.state_dir.exists():  # the daemon may make files while others are removed
        shutil.rmtree(host.daemon.state_dir, ignore_errors=True)
    host.serves_again(time.monotonic())
    watching.join()
    grounds = Grounds(reasons=CANNOT_WRITE)
    for capture in ends:
        host.tally.verdicts.update(check_verdicts(capture, grounds))
    assert len(ends) == 1
    host.tally.hits += any(target.reason_code for target in ends[0].targets)
    until(lambda: _begun_anew(host), "captures are taken again", SERVES_S * max(1.0, slower_than_idle()))
    stub = host.daemon.stub()
    for capture in stub.ListCaptures(pb.ListCapturesRequest(), timeout=10).captures:
        if capture.id != host.begun[-1].id:  # those of before, whose files are gone
            stub.DeleteCapture(pb.DeleteCaptureRequest(id=capture.id), timeout=10)
    host.settle(Grounds())


def _begun_anew(host: Site) -> bool:
    host.begun.clear()
    begun = host.begin(*host.pids())
    assert begun.refusal in {"", "STORE_NOT_WRITABLE"} | BUSY, begun
    return not begun.refusal


def _watch(host: Site, ends: list[pb.Capture]) -> None:
    """From the beginning: what is in the store may be gone."""
    with contextlib.suppress(grpc.RpcError):
        ends.append(watch_to_end(host.daemon.stub(), host.begun[-1].id, SETTLED_S))


@contextlib.contextmanager
def with_own_clock(agents: int = 2) -> Iterator[tuple[Site, ShiftedClock]]:
    """Runs a host whose clock can be set."""
    with tempfile.TemporaryDirectory(prefix="kinetod-clock-") as folder:
        clock = ShiftedClock(Path(folder))
        with site(agents=agents, environ=clock.environ()) as host:
            yield host, clock


def set_clock(host: Site, clock: ShiftedClock, chance: random.Random) -> None:
    """Sets the clock forward or back by up to a month; no stored capture may be removed for that."""
    host.begin(*host.pids())
    pause(chance.uniform(0, LONGEST_S))
    clock.set_forward(chance.choice((-1, 1)) * chance.randrange(1, LONGEST_JUMP_S))
    host.serves_again(time.monotonic())
    captures = host.settle(Grounds(reasons=frozenset({"CLOCK_SET"})))
    host.tally.hits += any(target.reason_code for capture in captures for target in capture.targets)


def remove_sockets(host: Site, chance: random.Random) -> None:
    """Removes the sockets of agents and clients; existing connections stay, and new ones are possible again soon."""
    host.begin(*host.pids())
    pause(chance.uniform(0, LONGEST_S))
    for path in (host.daemon.agent_socket, host.daemon.rpc_socket):
        path.unlink()
    removed = time.monotonic()
    newcomer = host.add_agent()
    host.daemon.disconnect()
    host.serves_again(removed)
    host.settle(Grounds())
    host.tally.hits += 1
    host.remove_agent(newcomer)
