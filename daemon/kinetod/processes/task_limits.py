"""How many threads a process may still start: pids control groups, and RLIMIT_NPROC of its user.

RLIMIT_NPROC counts the threads of all processes of the same real user, and does not hold for root and for who has
CAP_SYS_RESOURCE or CAP_SYS_ADMIN. All of /proc has to be read to count them, so that is done only where the host has
so many threads in all (/proc/loadavg) that the limit could be reached.
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from kinetod.processes.cgroups import groups
from kinetod.processes.identity import PROC
from kinetod.processes.memory_limits import soft_limits
from kinetod.processes.proc_folder import lines

_EXEMPT = 1 << 21 | 1 << 24  # CAP_SYS_ADMIN, CAP_SYS_RESOURCE
_MAX_HEAD_BYTES = 4096


@dataclass(frozen=True, slots=True)
class TaskRoom:
    """How many threads are left below one limit."""

    left: int
    limit: str
    advice: str


def task_room(pid: int, needed: int, proc: Path = PROC) -> TaskRoom | None:
    """The first limit that leaves fewer threads than are needed; None: there is none that can be seen."""
    for group in groups(pid, "pids", proc):
        most, now = group.number("pids.max"), group.number("pids.current")
        if most is not None and now is not None and most - now < needed:
            advice = "raise that limit (docker run --pids-limit, systemd TasksMax=, podPidsLimit)"
            return TaskRoom(most - now, f"pids.max ({most}) of the control group {group.path}", advice)
    status = _head(proc / str(pid) / "status")
    limit = soft_limits(proc / str(pid) / "limits").get("Max processes")
    uid = (status.get("Uid") or ["0"])[0]
    if limit is None or uid == "0" or _capabilities(status) & _EXEMPT:
        return None
    if _all_threads(proc) + needed <= limit:
        return None
    used = _threads_of(uid, proc)
    if limit - used >= needed:
        return None
    advice = f"raise it, as root: `prlimit --pid {pid} --nproc=unlimited:unlimited`"
    return TaskRoom(limit - used, f"its limit RLIMIT_NPROC of {limit} threads of uid {uid}", advice)


def _capabilities(status: dict[str, list[str]]) -> int:
    """The effective ones; none where the file has no such mask, as with kernels that only look like Linux."""
    with contextlib.suppress(KeyError, IndexError, ValueError):
        return int(status["CapEff"][0], 16)
    return 0


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
