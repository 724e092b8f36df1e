"""The kernel's counters of a process and its threads: CPU time, waiting for a CPU, switches, page faults, I/O.

Theory of operation
    Everything is read from /proc and from the files of control groups, from outside: the process notices nothing.
    Frequent readings are cheap: one small file (schedstat) per thread, and three for the process. Switches and page
    faults of each thread need two larger files per thread, so they are read rarely.

    A thread is identified by the number that the process itself sees, as everywhere in a trace. Another user's `io`
    file cannot be read without the right to trace the process; unreadable values are UNKNOWN, never 0. The daemon has
    that right, the caller may not: I/O of a process that has become another user's (by a set-user-ID program), or of
    another user's child, is withheld.

    A process decides how many threads and children it has: beyond a limit, only the first ones are read.

    Neighbours, the other processes of the host, have names only if the user of the process can see them: in the same
    PID namespace, and of the same user.
"""

import contextlib
import errno
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kinetod.processes.cgroups import V2, Group, groups
from kinetod.processes.identity import PROC, ProcessFolder, lines

UNKNOWN = -1
MAX_THREADS = 4096  # a reading of this many takes a tenth of a second
MAX_CHILDREN = 1024
_TICK_NS = 10**9 // os.sysconf("SC_CLK_TCK")
# Indexes in /proc/PID/stat after the name: fields 3, 4, 10 and 12 in proc(5).
_STATE, _PARENT, _MINOR_FAULTS, _MAJOR_FAULTS = 0, 1, 7, 9
_ZOMBIE = b"Z"
_BUSY_FIELDS = (1, 2, 3, 6, 7, 8)  # of the line "cpu" in /proc/stat: user, nice, system, irq, softirq, steal
_US_NS = 1000


class ThreadTimes(NamedTuple):
    """Counters of one thread since its start. wait_ns: time in which it was runnable and waited for a CPU."""

    cpu_ns: int
    wait_ns: int
    switches: int  # how often it was put on a CPU


class ThreadEvents(NamedTuple):
    """Counters of one thread since its start."""

    voluntary_switches: int  # it yielded the CPU to wait for something
    involuntary_switches: int  # the CPU was taken from it
    minor_faults: int
    major_faults: int  # page faults that waited for storage


class ProcessCounters(NamedTuple):
    """Counters of the process since its start, of its control groups and of the whole host. UNKNOWN: unreadable."""

    cpu_ns: int  # of all its threads, ended ones included
    minor_faults: int
    major_faults: int
    read_bytes: int  # read from storage
    written_bytes: int  # to storage
    read_chars: int  # by read calls, from any source: files in memory, pipes, sockets
    written_chars: int  # by write calls
    quota_periods: int  # of the control groups with a CPU quota
    throttled_periods: int  # periods in which the quota was used up
    throttled_ns: int  # time that the groups' threads spent throttled, summed over CPUs
    host_busy_ns: int  # CPU time of everything on this host


class ChildCounters(NamedTuple):
    """Counters of one child process since its start. UNKNOWN: unreadable."""

    cpu_ns: int
    wait_ns: int  # of its threads, as in ThreadTimes
    major_faults: int
    read_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuLimits:
    """How much CPU a process may use. quota_cores: of the tightest control group; None: no group limits it."""

    host_cores: int
    usable_cores: int  # CPUs that its main thread may run on (affinity); UNKNOWN: unreadable
    quota_cores: float | None = None
    quota_group: str = ""


class CounterReader:
    """Reads the counters of one process. Every method raises OSError once the process is gone. Blocking."""

    def __init__(self, pid: int, proc: Path = PROC) -> None:
        self._pid, self._proc = pid, proc
        self._folder = ProcessFolder(pid, proc)
        try:
            self._owner = _owner(self._folder)
            self._quotas = [group for group in groups(pid, "cpu", proc) if quota_cores(group) is not None]
        except BaseException:
            self._folder.close()
            raise
        self._numbers: dict[str, int] = {}  # thread number as the process sees it, by the daemon's number
        self.names: dict[int, str] = {}  # the kernel's thread names, by the number that the process sees
        self.child_names: dict[int, str] = {}
        self.left_out = False  # whether it has had more threads or children than are read

    def close(self) -> None:
        """Frees the descriptor."""
        self._folder.close()

    def threads(self) -> dict[int, ThreadTimes]:
        """Counters of the current threads."""
        found: dict[int, ThreadTimes] = {}
        entries = self._tasks()
        for ended in self._numbers.keys() - set(entries):  # another thread may reuse its number
            del self._numbers[ended]
        for entry in entries:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError):  # it has just ended
                values = self._folder.read(f"task/{entry}/schedstat").split()
                found[self._number(entry)] = ThreadTimes(int(values[0]), int(values[1]), int(values[2]))
        return found

    def thread_events(self) -> dict[int, ThreadEvents]:
        """Events of the current threads."""
        found: dict[int, ThreadEvents] = {}
        for entry in self._tasks():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError, IndexError, KeyError):
                status = _fields(self._folder.read(f"task/{entry}/status"))
                stat = _behind_name(self._folder.read(f"task/{entry}/stat"))
                found[self._number(entry)] = ThreadEvents(
                    int(status["voluntary_ctxt_switches"]),
                    int(status["nonvoluntary_ctxt_switches"]),
                    int(stat[_MINOR_FAULTS]),
                    int(stat[_MAJOR_FAULTS]),
                )
        return found

    def process(self) -> ProcessCounters:
        """Counters of the whole process. Its files belong to nobody once it has ended, so it then counts as gone."""
        stat = _behind_name(self._folder.read("stat"))
        if stat[_STATE] == _ZOMBIE:
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        moved = _io(self._folder, self._owner)
        throttled = [_throttling(group) for group in self._quotas]
        return ProcessCounters(
            cpu_ns=_process_cpu_ns(self._pid),
            minor_faults=int(stat[_MINOR_FAULTS]),
            major_faults=int(stat[_MAJOR_FAULTS]),
            read_bytes=moved.get("read_bytes", UNKNOWN),
            written_bytes=moved.get("write_bytes", UNKNOWN),
            read_chars=moved.get("rchar", UNKNOWN),
            written_chars=moved.get("wchar", UNKNOWN),
            quota_periods=sum(each[0] for each in throttled),
            throttled_periods=sum(each[1] for each in throttled),
            throttled_ns=sum(each[2] for each in throttled),
            host_busy_ns=_host_busy_ns(self._proc),
        )

    def children(self) -> dict[int, ChildCounters]:
        """Counters of the current child processes, by pid as the daemon sees it."""
        found: dict[int, ChildCounters] = {}
        for pid in self._child_pids():
            with contextlib.suppress(OSError, ValueError, IndexError), ProcessFolder(pid, self._proc) as child:
                counters = self._child(pid, child)
                if counters is not None:
                    found[pid] = counters
        return found

    def neighbours(self) -> dict[int, int]:
        """CPU time (ns) of the other processes of the host since their start, by pid as the daemon sees it."""
        pids = (int(entry.name) for entry in self._proc.iterdir() if entry.name.isdecimal())
        found = {pid: _process_cpu_ns(pid) for pid in pids if pid != self._pid}
        return {pid: cpu_ns for pid, cpu_ns in found.items() if cpu_ns != UNKNOWN}

    def neighbour_name(self, pid: int) -> str:
        """The name of another process; "" if it has ended or is none of the user's."""
        with contextlib.suppress(OSError), ProcessFolder(pid, self._proc) as other:
            if other.link("ns/pid") == self._folder.link("ns/pid") and _owner(other) == self._owner:
                return other.read("comm").decode("utf-8", "replace").rstrip("\n")
        return ""

    def _tasks(self) -> list[str]:
        """The threads to read: the oldest, since the kernel lists them in that order."""
        entries = self._folder.entries("task")
        self.left_out |= len(entries) > MAX_THREADS
        return entries[:MAX_THREADS]

    def _child_pids(self) -> list[int]:
        found: list[int] = []
        for entry in self._tasks():
            with contextlib.suppress(OSError):  # the thread has just ended, or this kernel does not list children
                found += map(int, self._folder.read(f"task/{entry}/children").split())
            if len(found) > MAX_CHILDREN:
                self.left_out = True
                break
        return found[:MAX_CHILDREN]

    def _child(self, pid: int, folder: ProcessFolder) -> ChildCounters | None:
        """Counters of a child; None if another process has reused its number."""
        stat = folder.read("stat")
        values = _behind_name(stat)
        if int(values[_PARENT]) != self._pid:
            return None
        self.child_names[pid] = stat[stat.find(b"(") + 1 : stat.rfind(b")")].decode("utf-8", "replace")
        tasks = folder.entries("task")[:MAX_THREADS]
        waits = (int(folder.read(f"task/{entry}/schedstat").split()[1]) for entry in tasks)
        return ChildCounters(
            cpu_ns=_process_cpu_ns(pid),
            wait_ns=sum(waits),
            major_faults=int(values[_MAJOR_FAULTS]),
            read_bytes=_io(folder, self._owner).get("read_bytes", UNKNOWN),
        )

    def limits(self) -> CpuLimits:
        """The limits of CPU use."""
        try:
            usable = len(os.sched_getaffinity(self._pid))
        except OSError:
            usable = UNKNOWN
        tightest = min(self._quotas, key=_cores, default=None)
        return CpuLimits(
            host_cores=os.cpu_count() or UNKNOWN,
            usable_cores=usable,
            quota_cores=quota_cores(tightest) if tightest is not None else None,
            quota_group=tightest.path if tightest is not None else "",
        )

    def _number(self, entry: str) -> int:
        """The thread's number in its own PID namespace. Notes the name of a new thread."""
        number = self._numbers.get(entry)
        if number is None:
            status = _fields(self._folder.read(f"task/{entry}/status"))
            number = self._numbers[entry] = int(status.get("NSpid", entry).split()[-1])
            self.names[number] = status.get("Name", "")
        return number


def quota_cores(group: Group) -> float | None:
    """The CPU quota of a control group; None if it has none."""
    if group.version == V2:
        quota, _, period = group.text("cpu.max").partition(" ")
    else:
        quota, period = group.text("cpu.cfs_quota_us"), group.text("cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() and int(period) else None


def _owner(folder: ProcessFolder) -> int:
    """The user who owns the process's private files."""
    try:
        return folder.owner("io")
    except FileNotFoundError:  # a kernel without these counters
        return UNKNOWN


def _io(folder: ProcessFolder, owner: int) -> Mapping[str, int]:
    """The fields of `io`; empty if it may not be read, or belongs to another user than `owner`."""
    if _owner(folder) != owner:
        return {}
    try:
        return {name: int(text) for name, text in _fields(folder.read("io")).items()}
    except PermissionError:
        return {}


def _cores(group: Group) -> float:
    return quota_cores(group) or 0.0


def _throttling(group: Group) -> tuple[int, int, int]:
    """Periods, throttled periods and throttled time in ns."""
    counts = group.numbers("cpu.stat")
    name, unit = ("throttled_usec", _US_NS) if group.version == V2 else ("throttled_time", 1)
    return counts.get("nr_periods", 0), counts.get("nr_throttled", 0), counts.get(name, 0) * unit


def _process_cpu_ns(pid: int) -> int:
    """CPU time of a process, which anybody may read."""
    try:
        return time.clock_gettime_ns((~pid << 3) | 2)  # CPUCLOCK_SCHED; what clock_getcpuclockid(3) makes
    except OSError:
        return UNKNOWN


def _host_busy_ns(proc: Path) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        with (proc / "stat").open("rb") as file:
            fields = file.readline().split()
        return sum(int(fields[number]) for number in _BUSY_FIELDS) * _TICK_NS
    return UNKNOWN


def _fields(content: bytes) -> dict[str, str]:
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines(content)) if value}


def _behind_name(stat: bytes) -> list[bytes]:
    return stat.rpartition(b")")[2].split()
