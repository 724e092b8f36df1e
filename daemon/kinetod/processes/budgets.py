"""The resources that an attach and a capture take from a process, and whether its limits leave enough: one table.

Theory of operation
    Using up a budget makes the program's own next call fail, or the kernel kill it. So each row says what an attach
    with a small trace needs, with room for the program itself, and what a capture needs in a process that has an agent;
    the daemon refuses before it touches the process if a limit leaves less. tests/integration/attach/test_budgets.py
    measures live programs and fails if a row asks for less than was used, or for more than four times that.

    The buffers of a capture come on top: buffer_memory.py fits them into what `buffers` rows leave.
"""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kinetod.processes.cgroups import groups
from kinetod.processes.identity import PROC
from kinetod.processes.memory_limits import (
    Room,
    address_room,
    capabilities,
    data_room,
    file_room,
    locked_room,
    locks_memory,
    memory_room,
    soft_limits,
    stack_bytes,
)
from kinetod.processes.proc_folder import lines

_MIB = 1 << 20
_EXEMPT = 1 << 21 | 1 << 24  # CAP_SYS_ADMIN, CAP_SYS_RESOURCE
_MAX_HEAD_BYTES = 4096
_FEW_DESCRIPTORS = 64  # so few are counted one by one
_USUAL_DESCRIPTORS = 1024
_CHUNK_BYTES = 64 << 10


# How many threads, descriptors and mappings a process may still create. None: no limit is visible, or none is near.
# RLIMIT_NPROC counts the threads of all processes of the same real user, and does not apply to root or with
# CAP_SYS_RESOURCE or CAP_SYS_ADMIN. All of /proc has to be read to count them, so that is done only where the host has
# so many threads in all (/proc/loadavg) that the limit could be reached.
def thread_room(pid: int, needed: int, proc: Path = PROC) -> Room | None:
    """The first limit that leaves fewer threads than are needed."""
    for group in groups(pid, "pids", proc):
        most, now = group.number("pids.max"), group.number("pids.current")
        if most is not None and now is not None and most - now < needed:
            advice = "raise that limit (docker run --pids-limit, systemd TasksMax=, podPidsLimit)"
            return Room(most - now, f"pids.max ({most}) of the control group {group.path}", advice, "threads")
    status = _head(proc / str(pid) / "status")
    limit = soft_limits(proc / str(pid) / "limits").get("Max processes")
    uid = (status.get("Uid") or ["0"])[0]
    if limit is None or uid == "0" or capabilities((status.get("CapEff") or [""])[0]) & _EXEMPT:
        return None
    if _all_threads(proc) + needed <= limit:
        return None
    used = _threads_of(uid, proc)
    if limit - used >= needed:
        return None
    advice = f"raise it, as root: `prlimit --pid {pid} --nproc=unlimited:unlimited`"
    return Room(limit - used, f"its limit RLIMIT_NPROC of {limit} threads of uid {uid}", advice, "threads")


def descriptor_room(pid: int, needed: int, proc: Path = PROC) -> Room | None:
    """Below RLIMIT_NOFILE. Numbers at or above it (it may have been lowered) leave those below it free."""
    folder = proc / str(pid)
    limit, hard = (soft_limits(folder / "limits", hard=each).get("Max open files") for each in (False, True))
    if limit is None:
        return None
    with contextlib.suppress(OSError):
        used = (folder / "fd").stat().st_size  # Linux 6.2 and later; otherwise 0
        if not used or limit - used < max(needed, _FEW_DESCRIPTORS):
            used = sum(int(name) < limit for name in os.listdir(folder / "fd"))  # noqa: PTH208
        wanted = max(2 * limit, _USUAL_DESCRIPTORS)
        advice = f"raise both of its limits, as root: `prlimit --pid {pid} --nofile={wanted}:{wanted}`"
        if hard is None or wanted <= hard:  # only root may raise the hard limit
            advice = f"raise its limit: `prlimit --pid {pid} --nofile={wanted}:`"
        return Room(max(limit - used, 0), f"its limit RLIMIT_NOFILE of {limit}", advice, "descriptors")
    return None


def mapping_room(pid: int, needed: int, proc: Path = PROC) -> Room | None:
    """Below vm.max_map_count: beyond it mmap, mprotect and munmap fail, and with them malloc and new threads."""
    with contextlib.suppress(OSError, ValueError):
        most = int((proc / "sys/vm/max_map_count").read_text())
        used = 0
        with (proc / str(pid) / "maps").open("rb", buffering=0) as file:
            while chunk := file.read(_CHUNK_BYTES):
                used += chunk.count(b"\n")
        if used:  # a zombie has none
            advice = f"raise it, as root: `sysctl vm.max_map_count={max(2 * most, most + needed)}`"
            return Room(most - used, f"the host's vm.max_map_count of {most}", advice, "mappings")
    return None


def _all_threads(proc: Path) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int((proc / "loadavg").read_text().split()[3].partition("/")[2])
    return 1 << 31


def _threads_of(uid: str, proc: Path) -> int:
    total = 0
    for folder in proc.iterdir():
        if folder.name.isdecimal():
            status = _head(folder / "status")
            if (status.get("Uid") or [""])[0] == uid:
                total += int((status.get("Threads") or ["0"])[0])
    return total


def _head(path: Path) -> dict[str, list[str]]:
    with contextlib.suppress(OSError), path.open("rb") as file:
        head = lines(file.read(_MAX_HEAD_BYTES))
        return {name: value.split() for name, _, value in (line.partition(":") for line in head)}
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """One kind of limit. check: the check of `kinetoctl doctor` that shows it."""

    check: str
    what: str  # what the resource is needed for
    room: Callable[[int, int, Path], Room | None]  # returns the room of a process that needs this much
    attach: int = 0
    capture: int = 0
    attach_stacks: int = 0  # plus this many stacks of new threads
    attach_locked: int = 0  # if mappings are locked: resident at once, including stacks
    capture_locked: int = 0
    buffers: bool = False  # the buffers of a capture are taken from it, too

    def needed(self, stack: int, *, attached: bool, locked: bool) -> int:
        """How much an attach, or a capture of an attached process, needs. stack: size of a new thread's."""
        if attached:
            return self.capture_locked + stack if locked and self.capture_locked else self.capture
        if locked and self.attach_locked:
            return self.attach_locked + _LOCKED_STACKS * stack
        return self.attach + self.attach_stacks * stack


@dataclass(frozen=True, slots=True)
class BudgetRoom:
    """How much one budget leaves a process, and how much is needed."""

    budget: Budget
    room: Room
    needed: int

    @property
    def short(self) -> bool:
        """Whether too little is left."""
        return self.room.left < self.needed

    def text(self, who: str = "an attach with a small trace") -> str:
        """Describes what is left, below which limit, and what is needed."""
        return f"{self.room}; {who} needs {self.room.amount(self.needed)}{self.budget.what}"


_LOCKED_STACKS = 3
# Measured maxima, with stacks of 8 MiB: 54 mappings, 5 descriptors, 5 threads, 7 MiB of memory (79 MiB if it is
# locked), 445 MiB of addresses (heaps of 64 MiB, one for each thread), 69 MiB of data segments. CUPTI is not measured.
BUDGETS = (
    Budget(check="descriptors", what="", room=descriptor_room, attach=16, capture=8),
    Budget(check="mappings", what="", room=mapping_room, attach=128, capture=48),
    Budget(
        check="memory",
        what=" of memory",
        room=lambda pid, _, proc: memory_room(pid, proc),
        attach=12 * _MIB,
        attach_locked=72 * _MIB,
        capture_locked=16 * _MIB,
        buffers=True,
    ),
    Budget(
        check="memory",
        what=" of address space, mostly reserved and unused",
        room=lambda pid, _, proc: address_room(pid, proc),
        attach=512 * _MIB,
        attach_stacks=3,
        buffers=True,
    ),
    Budget(
        check="memory",
        what=" of data segments",
        room=lambda pid, _, proc: data_room(pid, proc),
        attach=72 * _MIB,
        attach_stacks=3,
    ),
    Budget(
        check="memory",
        what=" of locked memory, since what the process maps may be locked (mlockall)",
        room=lambda pid, _, proc: locked_room(pid, proc),
        attach=512 * _MIB,
        attach_stacks=3,
        buffers=True,
    ),
    Budget(check="memory", what=" of files", room=lambda pid, _, proc: file_room(pid, proc), buffers=True),
    Budget(check="threads", what="", room=thread_room, attach=8, capture=6),
)


def what_is_left(pid: int, *, attached: bool = False, proc: Path = PROC) -> tuple[BudgetRoom, ...]:
    """What each visible limit leaves, and what is needed. attached: only a capture follows, no attach."""
    stack, locked = stack_bytes(pid, proc), locks_memory(pid, proc)
    found = []
    for budget in BUDGETS:
        needed = budget.needed(stack, attached=attached, locked=locked)
        room = budget.room(pid, needed, proc)
        if room is not None:
            found.append(BudgetRoom(budget, room, needed))
    return tuple(found)
