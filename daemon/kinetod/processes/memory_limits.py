"""How much memory a process may still use before the kernel kills it, refuses memory, or throttles it.

Theory of operation
    For each control group above the process: its limit, minus its usage, plus what the kernel reclaims before it kills:
    clean cached file pages that are inactive, half of the active ones, and reclaimable slabs. memory.high counts as a
    limit: beyond it all processes of the group are throttled. The pages of a memfd are charged to the group that
    touches them first and are never reclaimed without swap; swap is ignored here. In addition: the host's available
    memory and, with strict overcommit, what may still be committed.

    The address space has limits of its own: RLIMIT_AS counts mappings, touched or not.

    Whether a process has locked its future mappings (mlockall) is not visible, so one that has locked anything counts
    as such: what it maps is resident at once, and RLIMIT_MEMLOCK counts all of it, reserved or touched.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kineto_trace.base.quantities import format_size

from kinetod.processes.cgroups import V2, Group, groups
from kinetod.processes.identity import PROC

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
        return f"{self.amount(max(self.left, 0))} are left below {self.limit}"


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
    return Room(limit - status[used], f"its limit {name} of {format_size(limit)}", advice)


def file_room(pid: int, proc: Path = PROC) -> Room | None:
    """Room below RLIMIT_FSIZE, which counts for memfds too; None: it is not set."""
    limit = soft_limits(proc / str(pid) / "limits").get("Max file size")
    if limit is None:
        return None
    advice = f"raise it, as root: `prlimit --pid {pid} --fsize=unlimited:unlimited`"
    return Room(limit, f"its limit RLIMIT_FSIZE of {format_size(limit)}", advice)


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
            limit = "what the host may commit (vm.overcommit_memory is 2)"
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
