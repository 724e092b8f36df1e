"""How much memory a process may still take before the kernel kills for it, refuses, or slows it down.

Theory of operation
    Of each control group above the process: its limit, less what it uses, and more what the kernel takes back
    before it kills: cached pages of files that are clean and of which nobody has asked again (inactive), half of
    those in use (active), and reclaimable slabs. memory.high counts as a limit: beyond it all processes of the group
    are throttled. The pages of a memfd are charged to the group of whoever touches them first and are never taken
    back without swap; whether there is swap does not count here.
    Besides the groups: the host's available memory, and where overcommit is strict what may still be committed.

    The address space has limits of its own: RLIMIT_AS counts mappings, touched or not.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kineto_protos.units import format_size

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


@dataclass(frozen=True, slots=True)
class Room:
    """What is left below one limit. limit: its name, for people."""

    left_bytes: int
    limit: str
    advice: str

    def __str__(self) -> str:
        return f"{format_size(max(self.left_bytes, 0))} are left below {self.limit}"


def memory_room(pid: int, proc: Path = PROC) -> Room | None:
    """The narrowest limit of memory; None: none can be seen. Reads some small files."""
    rooms = [*(room for group in groups(pid, "memory", proc) for room in _of_group(group)), *_of_host(proc)]
    return min(rooms, key=lambda room: room.left_bytes, default=None)


class MemoryWatch:
    """Looks at the memory that is left again and again, cheaply: cached pages count only once the rest is short."""

    def __init__(self, pid: int, proc: Path = PROC) -> None:
        self._pid, self._proc = pid, proc
        self._groups = groups(pid, "memory", proc)

    def less_than(self, size: int) -> Room | None:
        """The room below the narrowest limit, if it is smaller than this."""
        limits = ((group, limit, used) for group in self._groups for _, limit, used in _usages(group))
        near = any(limit - (group.number(used) or 0) < size for group, limit, used in limits)
        if not near and all(room.left_bytes >= size for room in _of_host(self._proc)):
            return None
        room = memory_room(self._pid, self._proc)
        return room if room is not None and room.left_bytes < size else None


def address_room(pid: int, proc: Path = PROC) -> Room | None:
    """Below RLIMIT_AS; None: it is not set."""
    return _resource_room(pid, proc, "Max address space", "VmSize", "RLIMIT_AS", "--as")


def data_room(pid: int, proc: Path = PROC) -> Room | None:
    """Below RLIMIT_DATA, which counts private writable mappings; None: it is not set."""
    return _resource_room(pid, proc, "Max data size", "VmData", "RLIMIT_DATA", "--data")


def _resource_room(pid: int, proc: Path, title: str, used: str, name: str, option: str) -> Room | None:
    limit, status = soft_limits(proc / str(pid) / "limits").get(title), _kib(proc / str(pid) / "status")
    if limit is None or used not in status:
        return None
    advice = f"raise it, as root: `prlimit --pid {pid} {option}=unlimited:unlimited`"
    return Room(limit - status[used], f"its limit {name} of {format_size(limit)}", advice)


def file_room(pid: int, proc: Path = PROC) -> Room | None:
    """Below RLIMIT_FSIZE, which counts for memfds too; None: it is not set."""
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
    """Each limit that is set: its file, its value, and the file that says how much is used."""
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


def soft_limits(path: Path) -> dict[str, int]:
    """The soft limits by their titles; unlimited ones are left out."""
    found = {}
    with contextlib.suppress(OSError):
        for line in path.read_text(errors="replace").splitlines()[1:]:
            title, words = line[:26].strip(), line[26:].split()
            if words and words[0].isdecimal():
                found[title] = int(words[0])
    return found


def _kib(path: Path) -> dict[str, int]:
    """The values in kB of a file like /proc/meminfo, in bytes."""
    found = {}
    with contextlib.suppress(OSError):
        for line in path.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            words = value.split()
            if len(words) == 2 and words[1] == "kB" and words[0].isdecimal():
                found[name] = int(words[0]) * _KIB
    return found
