"""The resources that an attach and a capture take from a process, and whether its limits leave enough: one table.

Theory of operation
    Using up a budget makes the program's own next call fail, or the kernel kill it. So each row says what an attach
    with a small trace needs, with room for the program itself, and what a capture needs in a process that has an agent;
    the daemon refuses before it touches the process if a limit leaves less. tests/integration/attach/test_budgets.py
    measures live programs and fails if a row asks for less than was used, or for more than four times that.

    The buffers of a capture come on top: buffer_memory.py fits them into what `buffers` rows leave.

    A process may use memory until the kernel kills it, refuses memory, or throttles it. For each control group above
    the process, that is: its limit, minus its usage, plus what the kernel reclaims before it kills: clean cached file
    pages that are inactive, half of the active ones, and reclaimable slabs. memory.high counts as a limit: beyond it
    all processes of the group are throttled. The pages of a memfd are charged to the group that touches them first and
    are never reclaimed without swap; swap is ignored here. In addition: the host's available memory and, with strict
    overcommit, what may still be committed.

    The address space has limits of its own: RLIMIT_AS counts mappings, touched or not.

    Whether a process has locked its future mappings (mlockall) is not visible, so one that has locked anything counts
    as such: what it maps is resident at once, and RLIMIT_MEMLOCK counts all of it, reserved or touched.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kineto_trace.base.quantities import format_size

from kinetod.processes.cgroups import V2, Group, groups
from kinetod.processes.identity import PROC, lines

_MIB = 1 << 20
_EXEMPT = 1 << 21 | 1 << 24  # CAP_SYS_ADMIN, CAP_SYS_RESOURCE
_MAX_HEAD_BYTES = 4096
_FEW_DESCRIPTORS = 64  # so few are counted one by one
_USUAL_DESCRIPTORS = 1024
_CHUNK_BYTES = 64 << 10
_NO_LIMIT = 1 << 60  # version 1 writes "no limit" as a number near 2**63
_KIB = 1024
_V1_FILES = (
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes"),
)
_V2_FILES = (("memory.max", "memory.current"), ("memory.high", "memory.current"))
_STRICT_OVERCOMMIT = "2"
_IPC_LOCK = 1 << 14


@dataclass(frozen=True, slots=True)
class Room:
    """Room left below one limit. limit: its name, for people."""

    left: int
    limit: str
    advice: str
    unit: str = ""  # empty: bytes

    def amount(self, number: int) -> str:
        """Formats a quantity of the limited resource, for people."""
        return f"{number} {self.unit}" if self.unit else format_size(number)

    def __str__(self) -> str:
        return f"{self.amount(max(self.left, 0))} left within {self.limit}"


def memory_room(pid: int, proc: Path = PROC) -> Room | None:
    """The tightest memory limit; None: no limit is visible. Reads a few small files."""
    rooms = [*(room for group in groups(pid, "memory", proc) for room in _of_group(group)), *_of_host(proc)]
    return min(rooms, key=lambda room: room.left, default=None)


class MemoryWatch:
    """Checks the remaining memory repeatedly and cheaply: cached pages count only once the rest is short."""

    def __init__(self, pid: int, proc: Path = PROC) -> None:
        self._pid, self._proc = pid, proc
        self._groups = groups(pid, "memory", proc)

    def less_than(self, size: int) -> Room | None:
        """The room below the tightest limit, if it is less than `size` bytes."""
        limits = ((group, limit, used) for group in self._groups for _, limit, used in _usages(group))
        near = any(limit - (group.number(used) or 0) < size for group, limit, used in limits)
        if not near and all(room.left >= size for room in _of_host(self._proc)):
            return None
        room = memory_room(self._pid, self._proc)
        return room if room is not None and room.left < size else None


def address_room(pid: int, proc: Path = PROC) -> Room | None:
    """Room below RLIMIT_AS; None: it is not set."""
    return _resource_room(pid, proc, "Max address space", "VmSize", "RLIMIT_AS", "--as")


def data_room(pid: int, proc: Path = PROC) -> Room | None:
    """Room below RLIMIT_DATA, which counts private writable mappings; None: it is not set."""
    return _resource_room(pid, proc, "Max data size", "VmData", "RLIMIT_DATA", "--data")


def locked_room(pid: int, proc: Path = PROC) -> Room | None:
    """Room below RLIMIT_MEMLOCK, if the process has locked memory and lacks CAP_IPC_LOCK; otherwise None."""
    if not locks_memory(pid, proc) or capabilities(_values(proc / str(pid) / "status").get("CapEff", "")) & _IPC_LOCK:
        return None
    return _resource_room(pid, proc, "Max locked memory", "VmLck", "RLIMIT_MEMLOCK", "--memlock")


def locks_memory(pid: int, proc: Path = PROC) -> bool:
    """Whether the process may have locked its mappings."""
    return _kib(proc / str(pid) / "status").get("VmLck", 0) > 0


def capabilities(mask: str) -> int:
    """The mask that /proc writes; 0 if it is not a number, as on kernels that only resemble Linux."""
    with contextlib.suppress(ValueError):
        return int(mask, 16)
    return 0


def _resource_room(pid: int, proc: Path, title: str, used: str, name: str, option: str) -> Room | None:
    limit, status = soft_limits(proc / str(pid) / "limits").get(title), _kib(proc / str(pid) / "status")
    if limit is None or used not in status:
        return None
    advice = f"raise it, as root: `prlimit --pid {pid} {option}=unlimited:unlimited`"
    return Room(limit - status[used], f"its {name} limit of {format_size(limit)}", advice)


def file_room(pid: int, proc: Path = PROC) -> Room | None:
    """Room below RLIMIT_FSIZE, which counts for memfds too; None: it is not set."""
    limit = soft_limits(proc / str(pid) / "limits").get("Max file size")
    if limit is None:
        return None
    advice = f"raise it, as root: `prlimit --pid {pid} --fsize=unlimited:unlimited`"
    return Room(limit, f"its RLIMIT_FSIZE limit of {format_size(limit)}", advice)


def stack_bytes(pid: int, proc: Path = PROC) -> int:
    """Size of a new thread's stack in the C library: RLIMIT_STACK, or 2 MiB if that is unlimited."""
    return soft_limits(proc / str(pid) / "limits").get("Max stack size") or 2 << 20


def _of_group(group: Group) -> Iterator[Room]:
    advice = "give the container or job a higher memory limit, or trace when it uses less"
    for name, limit, used in _usages(group):
        left = limit - (group.number(used) or 0) + _reclaimable(group)
        yield Room(left, f"{name} ({format_size(limit)}) of the control group {group.path}", advice)


def _usages(group: Group) -> Iterator[tuple[str, int, str]]:
    """Each limit that is set: its file, its value, and the file with the usage."""
    for name, used in _V2_FILES if group.version == V2 else _V1_FILES:
        limit = group.number(name)
        if limit is not None and limit < _NO_LIMIT:
            yield name, limit, used


def _reclaimable(group: Group) -> int:
    stat = group.numbers("memory.stat")
    prefix = "" if group.version == V2 else "total_"
    dirty = stat.get(f"{prefix}{'file_dirty' if group.version == V2 else 'dirty'}", 0)
    writeback = stat.get(f"{prefix}{'file_writeback' if group.version == V2 else 'writeback'}", 0)
    files = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0) // 2
    return max(0, files - dirty - writeback) + stat.get("slab_reclaimable", 0)


def _of_host(proc: Path) -> Iterator[Room]:
    numbers = _kib(proc / "meminfo")
    if "MemAvailable" in numbers:
        yield Room(numbers["MemAvailable"], "the host's memory", "trace when the host has more memory free")
    with contextlib.suppress(OSError):
        strict = (proc / "sys/vm/overcommit_memory").read_text().strip() == _STRICT_OVERCOMMIT
        if strict and {"CommitLimit", "Committed_AS"} <= numbers.keys():
            left = numbers["CommitLimit"] - numbers["Committed_AS"]
            limit = "the host's commit limit (vm.overcommit_memory is 2)"
            yield Room(left, limit, "raise vm.overcommit_ratio, or trace when the host has more memory free")


def soft_limits(path: Path, *, hard: bool = False) -> dict[str, int]:
    """The soft (or hard) limits by their titles; unlimited ones are left out."""
    found = {}
    with contextlib.suppress(OSError):
        for line in path.read_text(errors="replace").splitlines()[1:]:
            title, words = line[:26].strip(), line[26:].split()
            if len(words) > hard and words[hard].isdecimal():
                found[title] = int(words[hard])
    return found


def _kib(path: Path) -> dict[str, int]:
    """The values in kB of a file like /proc/meminfo, in bytes."""
    words = {name: value.split() for name, value in _values(path).items()}
    return {k: int(v[0]) * _KIB for k, v in words.items() if len(v) == 2 and v[1] == "kB" and v[0].isdecimal()}


def _values(path: Path) -> dict[str, str]:
    with contextlib.suppress(OSError):
        parts = (line.partition(":") for line in path.read_text(errors="replace").split("\n"))
        return {name: value.strip() for name, _, value in parts}
    return {}


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
    return Room(limit - used, f"its RLIMIT_NPROC limit of {limit} threads for uid {uid}", advice, "threads")


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
        return Room(max(limit - used, 0), f"its RLIMIT_NOFILE limit of {limit}", advice, "descriptors")
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
        what=" of locked memory, since its new mappings may be locked (mlockall)",
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
