import os
import time
from pathlib import Path
from typing import Any

import pytest
from kineto_agent.protocol import wire
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.model.kernel_counters import KernelCounters
from kineto_trace.model.target_info import TargetInfo
from kinetod.captures.target import target_description
from kinetod.captures.target.target_description import (
    KernelReadings,
    checked_iterations,
    checked_settings,
    describe_process,
    describe_target,
)
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
from support.agent.agent_daemon import start_request
from support.agent.scripted_agent import hello_message
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
        self.others: dict[int, int] = {}

    def threads(self) -> dict[int, ThreadTimes]:
        return dict(self.times)

    def thread_events(self) -> dict[int, ThreadEvents]:
        return dict(self.events)

    def process(self) -> ProcessCounters:
        return ProcessCounters(self.cpu_ns, 0, 0, self.read_bytes, *([UNKNOWN] * 7))

    def children(self) -> dict[int, ChildCounters]:
        return dict(self.processes)

    def neighbours(self) -> dict[int, int]:
        return dict(self.others)

    def neighbour_name(self, pid: int) -> str:
        return {70: "make\n", 71: "cc", 72: "cc"}.get(pid, "")

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
    monkeypatch.setattr("kinetod.captures.target.target_description.time.time_ns", lambda: next(ticks))
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
    monkeypatch.setattr(target_description, "CHILDREN_PERIOD_NS", 0)
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


def test_neighbours_are_those_that_used_some_cpu_time_and_may_be_named(
    readings: KernelReadings, kernel: Kernel
) -> None:
    kernel.processes = {50: ChildCounters(0, 0, 0, 0)}
    kernel.others = {50: 0, 70: 5_000, 71: 9_000, 73: 0, 74: 100}
    readings.take()
    kernel.others = {50: 900, 70: 5_400, 71: 600, 72: 800, 73: 500, 74: 101}  # 71 is another process now
    readings.end()
    found = readings.counters()
    assert found is not None
    assert found.neighbour_names == ("cc", "cc", "make ")
    assert {name: column.tolist() for name, column in found.neighbours.items()} == {
        "pid": [72, 71, 70], "cpu_ns": [800, 600, 400],
    }  # fmt: skip


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
    monkeypatch.setattr(target_description, "MAX_ROWS", 100)
    kernel.left_out = True
    for number in range(1, 24):
        kernel.times = {thread: ThreadTimes(10 * number, 0, number) for thread in range(20)}
        readings.take()
    assert sum(len(reading.threads) for reading in readings._readings) <= 100
    found = readings.counters()
    assert found is not None
    assert found.by_thread()[7] == (220, 0, 22)
    assert found.notes == ("the process has too many threads or children: only the first ones are counted",)


def test_a_long_recording_is_thinned_out_and_loses_no_time(
    readings: KernelReadings, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_description, "MAX_READINGS", 6)
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


def described(**result: Any) -> TargetInfo:
    ended = wire.Result("c", "done", "", "", 5, 9, {}, {}, {}, {}, [])
    return describe_target(
        capture_id="c",
        host="h",
        process=pb.Process(pid=7, command=["/usr/bin/python", "train.py"], rank=3, job_id="17"),
        hello=hello_message(pid=7),
        start=start_request(options={"with_stack": True}),
        result=ended._replace(**result),
        window_ns=(5, 9),
        labels={"team": "vision"},
    )


def test_a_target_is_described_with_what_its_agent_said_at_the_end() -> None:
    info = described(threads={"7": "main\n", "x": "no"}, iterations={"thread": 7, "starts": [[3, 5], [4, 9]]})
    assert TargetInfo.from_json(info.to_json()) == info
    assert (info.process_name, info.rank, info.window_start_ns, info.window_end_ns) == ("python", 3, 5, 9)
    assert (info.command, info.job_id) == (["/usr/bin/python", "train.py"], "17")
    assert info.threads == {7: "main "}
    assert (info.iterations, info.iteration_thread) == ([[3, 5], [4, 9]], 7)
    assert (info.options, info.labels, info.complete) == ({"with_stack": True}, {"team": "vision"}, True)


def test_a_process_is_described_alike_whoever_records_it() -> None:
    """Its own libkineto or an agent: the trace context and the pod are part of both."""
    process = pb.Process(
        pid=7, trace_parent=f"00-{'1' * 32}-{'2' * 16}-01", pod_name="p", resource={"service.name": "s"}
    )
    info = describe_process(process, capture_id="c", host="h", labels={"a": "b"}, start=start_request())
    assert (info.pid, info.trace_parent, info.labels) == (7, process.trace_parent, {"a": "b"})
    assert info.resource == {"service.name": "s", "k8s.pod.name": "p"}


def test_a_target_has_the_clock_that_was_measured_of_its_host() -> None:
    info = describe_target(
        capture_id="c",
        host="h",
        process=pb.Process(pid=7),
        hello=hello_message(pid=7),
        start=start_request(),
        result=None,
        window_ns=(0, 0),
        labels={},
        clock=pb.ClockOffset(offset_ns=-5, uncertainty_ns=2),
    )
    assert (info.clock_offset_ns, info.clock_uncertainty_ns) == (-5, 2)
    assert (described().clock_offset_ns, described().clock_uncertainty_ns) == (None, None)


def test_a_target_says_what_was_requested_and_why_some_of_it_could_not_be_recorded() -> None:
    info = described(not_recorded={"kernel\n": "busy\n"})
    assert (info.activity_types, info.not_recorded) == (["python_function"], {"kernel ": "busy "})
    assert len(described(not_recorded={str(number): "" for number in range(1000)}).not_recorded) == 64


@pytest.mark.parametrize(
    ("told", "kept"), [(1.25, 1.25), (2, 2.0), (0, 0.0), (-1, 0.0), (1e9, 0.0), (float("nan"), 0.0), ("1.5", 0.0)]
)
def test_a_target_has_the_ratios_of_its_steps_if_they_are_some(told: Any, kept: float) -> None:
    assert described(overhead={"step_ratio": told}).step_ratio == kept
    assert described(overhead={"least_step_ratio": told}).least_step_ratio == kept


def test_settings_that_are_no_plain_values_are_left_out() -> None:
    given = {
        "torch.num_threads": 2,
        "a\n": "b\n",
        "c": [1],
        "d": None,
        "e": float("nan"),
        "f": 2**60,
        "g": True,
        "h": 1.5,
    }
    assert checked_settings(given) == {"torch.num_threads": 2, "a ": "b ", "g": True, "h": 1.5}
    assert len(checked_settings({str(number): 1 for number in range(1000)})) == 128


@pytest.mark.parametrize("thread", [None, "7", -1, 0, 2**31, True, 1.5, [7]])
def test_a_thread_that_is_none_is_not_taken(thread: Any) -> None:
    assert described(iterations={"thread": thread, "starts": [[3, 5]]}).iteration_thread == 0


@pytest.mark.parametrize("starts", [
    None, 5, "x", {"0": 1}, [[]], [[1]], [["1", 2]], [[1, 2, 3]], [[True, 5]], [[-1, 5]],
    [[1, 0]], [[2**53, 5]], [[1, 2**63]], [5]])  # fmt: skip
def test_what_is_no_iteration_is_left_out(starts: Any) -> None:
    assert checked_iterations({"starts": starts}) == []


def test_numbers_and_times_go_upwards_and_are_bounded() -> None:
    assert checked_iterations({"starts": [[3, 50], [3, 60], [4, 40], [5, 70]]}) == [[3, 50], [5, 70]]
    assert len(checked_iterations({"starts": [[number, number + 1] for number in range(5000)]})) == 1024
