"""The content of target.json: the daemon's facts about a target and its agent's final report, and the kernel's
counters.

Theory of operation
    `KernelReadings` reads the kernel's counters of one target repeatedly, and turns the readings into intervals. The
    first `take` begins with the window, the following ones continue, and `end` takes the last reading. They run in any
    of the daemon's threads, one at a time, and touch nothing but /proc. A reading is taken every PERIOD_S, or less
    often: reading may cost MAX_LOAD of a core, and a recording has no more than MAX_READINGS, nor more than MAX_ROWS
    times of threads (then every second reading is dropped and the period doubles). Counters only grow, so only
    resolution is lost.

    The kernel adds the time that a thread waited for a CPU when it gets one, and running time at its ticks. Time that
    exceeds an interval belongs to earlier ones, and is moved there.

    Each reading keeps only the threads whose counters have changed. If the process ends, earlier readings stay.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from kineto_agent.protocol import wire
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.array_types import Ints
from kineto_trace.model.kernel_counters import PROCESS, KernelCounters
from kineto_trace.model.target_info import TargetInfo

from kinetod.base.safe_text import clean
from kinetod.captures.target.conversion import overhead_of
from kinetod.processes.identity import ProcessKey, start_time_ns
from kinetod.processes.kernel_counters import (
    UNKNOWN,
    ChildCounters,
    CounterReader,
    CpuLimits,
    ProcessCounters,
    ThreadEvents,
    ThreadTimes,
)

PERIOD_S = 0.1
CHILDREN_PERIOD_NS = 500_000_000  # between readings of child processes, which cost more
MAX_LOAD = 0.01  # of one core
MAX_READINGS = 1024
MAX_ROWS = 200_000
_MAX_NAMES = 4096
_MAX_CHILDREN = 1024
_MAX_NEIGHBOURS = 32
_LEAST_NEIGHBOUR = 0.01  # of a core
_NAME_CHARS = 64
_NO_TIMES = ThreadTimes(0, 0, 0)
_NO_EVENTS = ThreadEvents(0, 0, 0, 0)
_MAX_THREADS = 4096
_MAX_ITERATIONS = 1024
_MAX_ITERATION = 2**53  # beyond that readers of JSON would round
_MAX_THREAD_ID = 2**31
_MAX_SETTINGS = 128
_MAX_SETTING = 2**53
_MAX_REASONS = 64


class Reading(NamedTuple):
    """The counters at one moment. threads: those that have changed since the previous reading."""

    time_ns: int
    threads: dict[int, ThreadTimes]
    process: ProcessCounters


class _Child(NamedTuple):
    """A child process at its first and last reading."""

    first_ns: int
    first: ChildCounters
    last_ns: int
    last: ChildCounters


@dataclass(slots=True)
class _First:
    """Facts from the first reading."""

    reader: CounterReader
    limits: CpuLimits
    events: dict[int, ThreadEvents] = field(default_factory=dict)
    neighbours: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class KernelReadings:
    """The readings of one target. Methods block, may be called from any thread, and none raises."""

    key: ProcessKey
    clock: Callable[[], float] = time.monotonic
    open_reader: Callable[[int], CounterReader] = CounterReader
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _first: _First | None = None
    _readings: list[Reading] = field(default_factory=list)
    _threads: dict[int, ThreadTimes] = field(default_factory=dict)  # at the latest reading
    _seen: dict[int, tuple[int, int]] = field(default_factory=dict)  # first and last reading of each thread, Unix ns
    _children: dict[int, _Child] = field(default_factory=dict)  # by pid
    _children_ns: int = 0  # time of their latest reading
    _events: dict[int, ThreadEvents] = field(default_factory=dict)  # at the end
    _neighbours: list[tuple[str, int, int]] = field(default_factory=list)  # name, pid and CPU time (ns) since the start
    _period_s: float = PERIOD_S
    _due_s: float = 0.0
    _ended: bool = False
    _notes: list[str] = field(default_factory=list)

    def due(self) -> bool:
        """Whether a reading should be taken now."""
        return not self._ended and self.clock() >= self._due_s

    def take(self) -> None:
        """Takes a reading; the first one begins the recording."""
        with self._lock:
            self._take()

    def take_if_due(self) -> None:
        """Takes a reading, unless another thread has just taken one."""
        with self._lock:
            if self.due():
                self._take()

    def end(self) -> None:
        """Takes the last reading."""
        with self._lock:
            if self._first is not None and not self._ended:
                self._take()
            if self._first is not None and not self._ended:
                with contextlib.suppress(OSError, ValueError):
                    self._events = self._first.reader.thread_events()
                    self._read_children(self._first.reader)
                    self._neighbours = self._busiest_neighbours(self._first)
            self._stop("")

    def close(self) -> None:
        """Ends the recording; earlier readings stay."""
        with self._lock:
            self._stop("")

    def _take(self) -> None:
        if self._ended:
            return
        begun = time.thread_time()
        try:
            if self._first is None:
                first = self._first = self._begun()
                self._read(first.reader)
                first.events = first.reader.thread_events()  # last, since it takes longer
                self._read_children(first.reader)
                first.neighbours = first.reader.neighbours()
            else:
                self._read(self._first.reader)
                if self._readings[-1].time_ns - self._children_ns >= CHILDREN_PERIOD_NS:
                    self._read_children(self._first.reader)
        except (OSError, ValueError, IndexError) as exc:
            self._stop(f"the kernel's counters end early: {getattr(exc, 'strerror', None) or exc}")
            return
        while len(self._readings) >= MAX_READINGS or (self._times_kept() > MAX_ROWS and len(self._readings) > 2):
            self._thin_out()
        spent = time.thread_time() - begun
        self._due_s = self.clock() + max(self._period_s, spent / MAX_LOAD)

    def thread_names(self) -> dict[int, str]:
        """The kernel's names of all threads seen."""
        names = self._first.reader.names if self._first is not None else {}
        return {thread: clean(name, _NAME_CHARS) for thread, name in list(names.items())[:_MAX_NAMES]}

    def counters(self) -> KernelCounters | None:
        """The intervals; None with fewer than two readings."""
        if self._first is None or len(self._readings) < 2:
            return None
        readings, limits = self._readings, self._first.limits
        process = np.array([reading.process for reading in readings], np.int64)
        counted = np.maximum(np.diff(process, axis=0), 0)
        counted[(process[1:] == UNKNOWN) | (process[:-1] == UNKNOWN)] = UNKNOWN
        throughout = (readings[0].time_ns, readings[-1].time_ns)
        lives = [(thread, *life) for thread, life in sorted(self._seen.items()) if life != throughout]
        return KernelCounters(
            times=np.array([reading.time_ns for reading in readings], np.int64),
            rows=_columns(("interval", "thread", *ThreadTimes._fields), self._rows()),
            events=_columns(("thread", *ThreadEvents._fields), self._event_rows()),
            lives=_columns(("thread", "first_ns", "last_ns"), lives),
            process=_columns(PROCESS, counted),
            children=self._child_columns(),
            child_names=tuple(
                clean(self._first.reader.child_names.get(pid, ""), _NAME_CHARS) for pid in self._seen_children()
            ),
            neighbours=_columns(("pid", "cpu_ns"), [numbers for _, *numbers in self._neighbours]),
            neighbour_names=tuple(name for name, *_ in self._neighbours),
            host_cores=limits.host_cores,
            usable_cores=limits.usable_cores,
            quota_cores=limits.quota_cores or 0.0,
            quota_group=clean(limits.quota_group, 200),
            notes=tuple(clean(note, 200) for note in (*self._notes, *self._left_out())),
        )

    def _left_out(self) -> list[str]:
        left_out = self._first is not None and self._first.reader.left_out
        return ["the process has too many threads or children: only the first ones are counted"] if left_out else []

    def _begun(self) -> _First:
        reader = self.open_reader(self.key.pid)
        try:
            if start_time_ns(self.key.pid) != self.key.start_time_ns:
                raise ProcessLookupError("the process has ended")
            return _First(reader, reader.limits())
        except BaseException:
            reader.close()
            raise

    def _read(self, reader: CounterReader) -> None:
        threads, now_ns = reader.threads(), time.time_ns()
        if self._readings and now_ns <= self._readings[-1].time_ns:
            return  # the clock was set back
        if not threads and not self._readings:
            self._notes.append("this kernel does not report the CPU time of threads (/proc/PID/task/TID/schedstat)")
        changed = {thread: times for thread, times in threads.items() if self._threads.get(thread) != times}
        self._readings.append(Reading(now_ns, changed, reader.process()))
        self._threads = threads
        self._seen.update((thread, (self._seen.get(thread, (now_ns,))[0], now_ns)) for thread in threads)

    def _read_children(self, reader: CounterReader) -> None:
        now = self._readings[-1].time_ns
        if now == self._children_ns:
            return
        self._children_ns = now
        for pid, counters in reader.children().items():
            before = self._children.get(pid)
            if before is None or counters.cpu_ns < before.last.cpu_ns:  # a new process
                self._children[pid] = _Child(now, counters, now, counters)
            else:
                self._children[pid] = before._replace(last_ns=now, last=counters)

    def _busiest_neighbours(self, first: _First) -> list[tuple[str, int, int]]:
        """Those with a name that used more than a little."""
        length_ns = self._readings[-1].time_ns - self._readings[0].time_ns
        spent = {
            pid: cpu_ns - before if cpu_ns >= (before := first.neighbours.get(pid, 0)) else cpu_ns  # or another process
            for pid, cpu_ns in first.reader.neighbours().items()
            if pid not in self._children
        }
        busy = [pid for pid, cpu_ns in spent.items() if cpu_ns > _LEAST_NEIGHBOUR * length_ns]
        busy = sorted(busy, key=lambda pid: (-spent[pid], pid))[:_MAX_NEIGHBOURS]
        named = ((clean(first.reader.neighbour_name(pid), _NAME_CHARS), pid, spent[pid]) for pid in busy)
        return [each for each in named if each[0]]

    def _times_kept(self) -> int:
        return sum(len(reading.threads) for reading in self._readings)

    def _thin_out(self) -> None:
        """Drops every second reading but the first and the last one."""
        kept = self._readings[:1]
        for at in range(2, len(self._readings), 2):
            dropped, reading = self._readings[at - 1], self._readings[at]
            kept.append(reading._replace(threads={**dropped.threads, **reading.threads}))
        if len(self._readings) % 2 == 0:
            kept.append(self._readings[-1])
        self._readings = kept
        self._period_s *= 2

    def _rows(self) -> list[tuple[int, ...]]:
        """Rows of interval, thread and counts."""
        latest = dict(self._readings[0].threads)
        counted: list[dict[int, ThreadTimes]] = []
        for reading in self._readings[1:]:
            found = {}
            for thread, times in reading.threads.items():
                since = ThreadTimes(*_since(latest.get(thread, _NO_TIMES), times))
                if since.cpu_ns or since.wait_ns:
                    found[thread] = since
                latest[thread] = times
            counted.append(found)
        self._move_back(counted)
        rows: list[tuple[int, ...]] = [
            (interval, thread, *times) for interval, each in enumerate(counted) for thread, times in each.items()
        ]
        if len(rows) > MAX_ROWS:
            self._notes.append("there are too many threads: only their busiest intervals are kept")
            rows = sorted(sorted(rows, key=lambda row: -row[2] - row[3])[:MAX_ROWS])
        return rows

    def _move_back(self, counted: list[dict[int, ThreadTimes]]) -> None:
        """Moves time that exceeds an interval to the previous one, if the thread existed then."""
        for interval in range(len(counted) - 1, -1, -1):
            start_ns = self._readings[interval].time_ns
            length = self._readings[interval + 1].time_ns - start_ns
            for thread, times in counted[interval].items():
                if times.cpu_ns + times.wait_ns <= length:
                    continue
                cpu_ns = min(times.cpu_ns, length)
                wait_ns = min(times.wait_ns, length - cpu_ns)
                counted[interval][thread] = ThreadTimes(cpu_ns, wait_ns, times.switches)
                if interval and self._seen[thread][0] <= start_ns:
                    before = counted[interval - 1].get(thread, _NO_TIMES)
                    counted[interval - 1][thread] = ThreadTimes(
                        before.cpu_ns + times.cpu_ns - cpu_ns, before.wait_ns + times.wait_ns - wait_ns, before.switches
                    )

    def _seen_children(self) -> list[int]:
        """The children that were read more than once."""
        return [pid for pid, child in sorted(self._children.items()) if child.last_ns > child.first_ns][:_MAX_CHILDREN]

    def _child_columns(self) -> dict[str, Ints]:
        rows = []
        for pid in self._seen_children():
            child = self._children[pid]
            counted = [
                new - old if old != UNKNOWN and new >= old else UNKNOWN
                for old, new in zip(child.first, child.last, strict=True)
            ]
            rows.append((pid, child.first_ns, child.last_ns, *counted))
        return _columns(("pid", "first_ns", "last_ns", *ChildCounters._fields), rows)

    def _event_rows(self) -> list[tuple[int, ...]]:
        assert self._first is not None
        before = self._first.events
        return [(thread, *_since(before.get(thread, _NO_EVENTS), now)) for thread, now in sorted(self._events.items())]

    def _stop(self, note: str) -> None:
        if self._ended:
            return
        self._ended = True
        if note:
            self._notes.append(note)
        if self._first is not None:
            self._first.reader.close()


def _columns(names: Sequence[str], rows: Sequence[Sequence[int]] | Ints) -> dict[str, Ints]:
    """The columns of rows of numbers, by name."""
    table = np.array(rows, np.int64).reshape(len(rows), len(names))
    return {name: table[:, at] for at, name in enumerate(names)}


def _since(before: tuple[int, ...], now: tuple[int, ...]) -> tuple[int, ...]:
    """Differences of counters. A counter that has become smaller belongs to another, new thread."""
    if any(new < old for old, new in zip(before, now, strict=True)):
        return tuple(now)
    return tuple(new - old for old, new in zip(before, now, strict=True))


def describe_process(
    process: pb.Process,
    *,
    capture_id: str,
    host: str,
    labels: Mapping[str, str],
    start: wire.Start,
    clock: pb.ClockOffset | None = None,
) -> TargetInfo:
    """The part of target.json about a process and its capture, whoever records. clock: as for `describe_target`."""
    return TargetInfo(
        capture_id=capture_id,
        host=host,
        pid=process.pid,
        process_name=Path(process.command[0]).name if process.command else "",
        command=list(process.command),
        job_id=process.job_id,
        rank=process.rank if process.HasField("rank") else None,
        world_size=process.world_size if process.HasField("world_size") else None,
        framework=process.framework,
        labels=dict(labels),
        resource=_resource(process),
        trace_parent=process.trace_parent,
        activity_types=list(start.activity_types),
        clock_offset_ns=clock.offset_ns if clock is not None else None,
        clock_uncertainty_ns=clock.uncertainty_ns if clock is not None else None,
    )


def describe_target(
    *,
    capture_id: str,
    host: str,
    process: pb.Process,
    hello: wire.Hello,
    start: wire.Start,
    result: wire.Result | None,
    window_ns: tuple[int, int],
    labels: Mapping[str, str],
    clock: pb.ClockOffset | None = None,
    kernel: KernelReadings | None = None,
    settings: Mapping[str, Any] | None = None,
) -> TargetInfo:
    """The current content of target.json. window_ns: start and end, Unix ns. The result is untrusted.

    clock: this host's clock offset as measured by the caller. kernel: readings of the process, once it has ended.
    settings: the program's, from its agent; untrusted.
    """
    threads = list((result.threads if result else {}).items())[:_MAX_THREADS]
    iterations = result.iterations if result else {}
    overhead = overhead_of(result.overhead if result else {})
    counters = kernel.counters() if kernel is not None else None
    kernel_names = kernel.thread_names() if kernel is not None else {}
    agent_names = {int(tid): clean(name, 64) for tid, name in threads if tid.isascii() and tid.isdecimal()}
    known = describe_process(process, capture_id=capture_id, host=host, labels=labels, start=start, clock=clock)
    return replace(
        known,
        pid=hello.pid,
        python_version=process.python_version,
        window_start_ns=window_ns[0],
        window_end_ns=window_ns[1],
        threads={**kernel_names, **agent_names},
        iterations=checked_iterations(iterations),
        iteration_thread=_thread_id(iterations.get("thread")),
        options=dict(start.options),
        not_recorded=_checked_reasons(result.not_recorded if result else {}),
        kernel_counters=counters.to_json() if counters is not None else {},
        settings=checked_settings(settings or {}),
        step_ratio=overhead.step_ratio,
        least_step_ratio=overhead.least_step_ratio,
        complete=result is not None,
    )


def _resource(process: pb.Process) -> dict[str, str]:
    """The process's own attributes, overridden by those that the kernel and Kubernetes know better."""
    known = {
        "container.id": process.container_id,
        "k8s.pod.uid": process.pod_uid,
        "k8s.pod.name": process.pod_name,
        "k8s.namespace.name": process.pod_namespace,
        "k8s.container.name": process.container_name,
    }
    return {**process.resource, **{name: value for name, value in known.items() if value}}


def checked_settings(settings: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """The settings reported by an agent, without values that are not plain."""
    found: dict[str, bool | int | float | str] = {}
    for name, value in list(settings.items())[:_MAX_SETTINGS]:
        if isinstance(value, str):
            found[clean(name, 80)] = clean(value, 200)
        elif isinstance(value, (bool, int, float)) and abs(value) < _MAX_SETTING:  # neither NaN nor infinite
            found[clean(name, 80)] = value
    return found


def _checked_reasons(reasons: Mapping[str, str]) -> dict[str, str]:
    return {clean(name, 64): clean(why, 500) for name, why in list(reasons.items())[:_MAX_REASONS]}


def checked_iterations(iterations: Mapping[str, Any]) -> list[list[int]]:
    """Number and start (Unix ns) of the iterations reported by an agent, without entries out of order."""
    starts = iterations.get("starts")
    found: list[list[int]] = []
    for entry in starts[:_MAX_ITERATIONS] if isinstance(starts, list) else ():
        if _is_start(entry) and (not found or (entry[0] > found[-1][0] and entry[1] >= found[-1][1])):
            found.append(list(entry))
    return found


def _is_start(entry: Any) -> bool:
    if not isinstance(entry, list) or len(entry) != 2 or not all(type(value) is int for value in entry):
        return False
    number, time_ns = entry
    return bool(0 <= number < _MAX_ITERATION and 0 < time_ns < 2**63)


def _thread_id(value: Any) -> int:
    return value if type(value) is int and 0 < value < _MAX_THREAD_ID else 0
