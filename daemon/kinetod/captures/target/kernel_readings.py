"""Reads the kernel's counters of one target repeatedly, and turns the readings into intervals.

Theory of operation
    The first `take` begins with the window, the following ones continue, and `end` takes the last reading. They run in
    any of the daemon's threads, one at a time, and touch nothing but /proc. A reading is taken every PERIOD_S, or less
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from kineto_trace.base.array_types import Ints
from kineto_trace.model.kernel_counters import PROCESS, KernelCounters

from kinetod.base.safe_text import clean
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
_NAME_CHARS = 64
_NO_TIMES = ThreadTimes(0, 0, 0)
_NO_EVENTS = ThreadEvents(0, 0, 0, 0)


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
            host_cores=limits.host_cores,
            usable_cores=limits.usable_cores,
            quota_cores=limits.quota_cores or 0.0,
            quota_group=clean(limits.quota_group, 200),
            notes=tuple(clean(note, 200) for note in (*self._notes, *self._left_out())),
        )

    def _left_out(self) -> list[str]:
        left_out = self._first is not None and self._first.reader.left_out
        return ["only the first of very many threads or children of the process are counted"] if left_out else []

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
            self._notes.append("this kernel does not tell the CPU time of threads (/proc/PID/task/TID/schedstat)")
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
            self._notes.append("there are too many threads: the busiest intervals of each are kept")
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
