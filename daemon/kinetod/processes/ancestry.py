"""Who descends from whom, by the parent pids of the kernel. Blocking, but the kernel answers by itself."""

import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from kinetod.processes.identity import PROC, ProcessKey, started_ns

MAX_GENERATIONS = 100  # anybody can make thousands
_STAT_PARENT, _STAT_START_TIME = 1, 19  # /proc/PID/stat behind the name: fields 4 and 22 in proc(5)


@dataclass(frozen=True, slots=True)
class _Kin:
    parent: int
    start_time_ns: int


class Family:
    """Processes and those above them, at one moment: each is read at most once, and not at all if it is added.

    A parent that has started later than its child is another process, which got the pid in between.
    """

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._known: dict[int, _Kin | None] = {}

    def add(self, key: ProcessKey, parent_pid: int) -> None:
        """Adds a process as it was read."""
        self._known[key.pid] = _Kin(parent_pid, key.start_time_ns)

    def ancestors(self, pid: int) -> tuple[int, ...]:
        """The parent first; the nearest MAX_GENERATIONS."""
        found = {pid: None}  # in their order
        process = self._kin(pid)
        while process is not None and process.parent > 0 and len(found) <= MAX_GENERATIONS:
            parent = self._kin(process.parent)
            if parent is None or parent.start_time_ns > process.start_time_ns or process.parent in found:
                break
            found[process.parent] = None
            process = parent
        return tuple(found)[1:]

    def _kin(self, pid: int) -> _Kin | None:
        if pid not in self._known:
            self._known[pid] = self._read(pid)
        return self._known[pid]

    def _read(self, pid: int) -> _Kin | None:
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (self._proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
            return _Kin(int(fields[_STAT_PARENT]), started_ns(int(fields[_STAT_START_TIME])))
        return None


def with_descendants(pids: Collection[int], proc: Path = PROC) -> set[int]:
    """These processes and all that descend from them, in whatever session."""
    family, roots = Family(proc), set(pids)
    everything = [int(entry.name) for entry in proc.iterdir() if entry.name.isdecimal()]
    return {pid for pid in everything if pid in roots or not roots.isdisjoint(family.ancestors(pid))}
