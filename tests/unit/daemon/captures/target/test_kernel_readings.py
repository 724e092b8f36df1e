"""Readings of the kernel's counters become intervals, and nothing is counted twice or for another thread."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
from kineto_trace.model.kernel_counters import KernelCounters
from kinetod.captures.target import kernel_readings
from kinetod.captures.target.kernel_readings import KernelReadings
from kinetod.processes import kernel_counters
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
from support.machine.descriptors import open_files

KEY = ProcessKey(os.getpid(), start_time_ns(os.getpid()))


class Kernel:
    """Counters as a test sets them."""

    def __init__(self) -> None:
        self.times: dict[int, ThreadTimes] = {}
        self.events: dict[int, ThreadEvents] = {}
        self.cpu_ns = self.read_bytes = 0
        self.names = {1: "main\n"}
        self.closed = 0
        self.processes: dict[int, ChildCounters] = {}
        self.child_names = {50: "worker\n"}
        self.left_out = False

    def threads(self) -> dict[int, ThreadTimes]:
        return dict(self.times)

    def thread_events(self) -> dict[int, ThreadEvents]:
        return dict(self.events)

    def process(self) -> ProcessCounters:
        return ProcessCounters(self.cpu_ns, 0, 0, self.read_bytes, *([UNKNOWN] * 7))

    def children(self) -> dict[int, ChildCounters]:
        return dict(self.processes)

    def limits(self) -> CpuLimits:
        return CpuLimits(host_cores=4, usable_cores=2)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


@pytest.fixture
def readings(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> KernelReadings:
    ticks = iter(range(1_000, 10_000_000, 1_000))
    monkeypatch.setattr("kinetod.captures.target.kernel_readings.time.time_ns", lambda: next(ticks))
    return KernelReadings(KEY, clock=lambda: 0.0, open_reader=lambda _pid: kernel)  # type: ignore[arg-type,return-value]


def rows(readings: KernelReadings) -> list[tuple[int, ...]]:
    found = readings.counters()
    assert found is not None
    return [tuple(row) for row in zip(*(column.tolist() for column in found.rows.values()), strict=True)]


def test_what_was_counted_between_two_readings_is_an_interval(readings: KernelReadings, kernel: Kernel) -> None:
    kernel.times, kernel.events = {1: ThreadTimes(100, 10, 1)}, {1: ThreadEvents(1, 2, 3, 4)}
    readings.take()
    kernel.times, kernel.cpu_ns = {1: ThreadTimes(150, 30, 2), 2: ThreadTimes(5, 0, 1)}, 55
    readings.take()
    kernel.times, kernel.events = {1: ThreadTimes(150, 40, 2), 2: ThreadTimes(5, 0, 1)}, {1: ThreadEvents(2, 4, 6, 8)}
    readings.end()
    assert rows(readings) == [(0, 1, 50, 20, 1), (0, 2, 5, 0, 1), (1, 1, 0, 10, 0)]
    found = readings.counters()
    assert found is not None
    assert found.times.tolist() == [1_000, 2_000, 3_000]
    assert (found.process["cpu_ns"].tolist(), found.process["throttled_ns"].tolist()) == ([55, 0], [UNKNOWN] * 2)
    assert {name: column.tolist() for name, column in found.events.items()} == {
        "thread": [1], "voluntary_switches": [1], "involuntary_switches": [2], "minor_faults": [3],
        "major_faults": [4],
    }  # fmt: skip
    assert found.life_of() == {2: (2_000, 3_000)}
    assert (found.host_cores, found.usable_cores, found.quota_cores) == (4, 2, 0.0)
    assert readings.thread_names() == {1: "main "}


def test_children_are_counted_between_the_first_and_the_last_look(
    readings: KernelReadings, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_readings, "CHILDREN_PERIOD_NS", 0)
    kernel.processes = {50: ChildCounters(100, 10, 1, UNKNOWN), 51: ChildCounters(7, 0, 0, 0)}
    readings.take()
    kernel.processes = {50: ChildCounters(190, 30, 1, UNKNOWN), 52: ChildCounters(5, 0, 0, 0)}
    readings.take()
    readings.end()
    found = readings.counters()
    assert found is not None
    rest = {name: column.tolist() for name, column in found.children.items() if not name.endswith("_ns")}
    assert rest == {"pid": [50, 52], "major_faults": [0, 0], "read_bytes": [UNKNOWN, 0]}
    assert (found.children["cpu_ns"].tolist(), found.children["wait_ns"].tolist()) == ([90, 0], [20, 0])
    assert found.child_names == ("worker ", "")
    assert KernelCounters.parse(found.to_json()) is not None


def test_a_thread_that_gets_the_number_of_one_that_ended_counts_from_zero(
    readings: KernelReadings, kernel: Kernel
) -> None:
    kernel.times = {1: ThreadTimes(100, 10, 9)}
    readings.take()
    kernel.times = {1: ThreadTimes(7, 20, 1)}
    readings.take()
    assert rows(readings) == [(0, 1, 7, 20, 1)]


def test_waiting_that_the_kernel_counts_when_it_is_over_belongs_to_the_intervals_before(
    readings: KernelReadings, kernel: Kernel
) -> None:
    """A thread waits for 1.8 intervals, and runs for 0.1 at their end; another one begins in the last of them."""
    for times in ({1: ThreadTimes(0, 0, 0)}, {}, {}, {1: ThreadTimes(100, 1_800, 1), 2: ThreadTimes(300, 900, 1)}):
        kernel.times = {**kernel.times, **times}
        readings.take()
    assert rows(readings) == [(1, 1, 0, 900, 0), (2, 1, 100, 900, 1), (2, 2, 300, 700, 1)]


def test_waiting_before_the_first_reading_is_no_part_of_the_recording(readings: KernelReadings, kernel: Kernel) -> None:
    for times in (ThreadTimes(0, 0, 0), ThreadTimes(1_001, 5_000, 1)):
        kernel.times = {1: times}
        readings.take()
    assert rows(readings) == [(0, 1, 1_000, 0, 1)]


def test_many_threads_are_read_less_often_instead_of_filling_the_memory(
    readings: KernelReadings, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_readings, "MAX_ROWS", 100)
    kernel.left_out = True
    for number in range(1, 24):
        kernel.times = {thread: ThreadTimes(10 * number, 0, number) for thread in range(20)}
        readings.take()
    assert sum(len(reading.threads) for reading in readings._readings) <= 100
    found = readings.counters()
    assert found is not None
    assert found.by_thread()[7] == (220, 0, 22)
    assert found.notes == ("only the first of very many threads or children of the process are counted",)


def test_a_long_recording_is_thinned_out_and_loses_no_time(
    readings: KernelReadings, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_readings, "MAX_READINGS", 6)
    for number in range(1, 24):
        kernel.times = {1: ThreadTimes(10 * number, number, number), 2 + number % 2: ThreadTimes(number, 0, 0)}
        readings.take()
    found = readings.counters()
    assert found is not None
    assert len(found.times) < 6
    assert (found.times[0], found.times[-1]) == (1_000, 23_000)
    assert found.by_thread()[1] == (220, 22, 22)
    assert not readings.due()


def test_a_reading_that_another_thread_has_just_taken_is_not_taken_again(
    readings: KernelReadings, kernel: Kernel
) -> None:
    readings.take_if_due()
    readings.take_if_due()
    assert readings.counters() is None  # there is one reading
    readings.take()
    assert readings.counters() is not None


def test_what_was_read_before_the_process_ended_stays(readings: KernelReadings, kernel: Kernel) -> None:
    for cpu_ns in (10, 30):
        kernel.times = {1: ThreadTimes(cpu_ns, 0, 0)}
        readings.take()

    def gone() -> Any:
        raise ProcessLookupError(3, "No such process")

    kernel.threads = gone  # type: ignore[method-assign]
    readings.take()
    readings.end()
    found = readings.counters()
    assert rows(readings) == [(0, 1, 20, 0, 0)]
    assert found is not None
    assert found.notes == ("the kernel's counters end early: No such process",)
    assert (kernel.closed, readings.due()) == (1, False)


def test_nothing_stays_open_of_a_process_that_ends_before_the_first_reading(
    readings: KernelReadings, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "limits", Path("/proc/none").stat)
    readings.take()
    assert kernel.closed == 1
    monkeypatch.setattr(kernel_counters, "_owner", lambda _folder: Path("/proc/none").stat())
    before = open_files(os.getpid())
    with pytest.raises(FileNotFoundError):
        CounterReader(os.getpid())
    assert open_files(os.getpid()) == before


def test_another_process_with_the_same_number_is_not_read(kernel: Kernel) -> None:
    other = ProcessKey(KEY.pid, KEY.start_time_ns - 10**9)
    readings = KernelReadings(other, open_reader=lambda _pid: kernel)  # type: ignore[arg-type,return-value]
    readings.take()
    assert (readings.counters(), kernel.closed) == (None, 1)


def test_this_process_is_counted_as_it_computes() -> None:
    readings = KernelReadings(KEY)
    readings.take()
    spent = time.thread_time_ns()
    while time.thread_time_ns() - spent < 20_000_000:
        pass
    readings.end()
    found = readings.counters()
    assert found is not None
    cpu_ns, _, _ = found.by_thread()[os.getpid()]
    assert 20_000_000 <= cpu_ns <= found.duration_ns + 1_000_000
    assert (found.process_total("cpu_ns") or 0) >= 20_000_000
