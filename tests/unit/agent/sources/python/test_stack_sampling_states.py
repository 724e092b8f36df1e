"""What a sample says besides the stack: on a processor, waiting for the GIL, idle; CPU time; threads without Python."""

import contextlib
import ctypes
import gc
import hashlib
import os
import select
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Callable, Dict, Iterator, List

import pytest
from kineto_agent.protocol.records import (
    STACK_IDLE,
    STACK_RUNNING,
    STACK_WAITS_FOR_GIL,
    WAIT_CHILD,
    WAIT_COLLECTOR,
    WAIT_CPU,
    WAIT_IO,
    WAIT_LOCK,
    WAIT_POLL,
    WAIT_SLEEP,
)
from support.agent.agent_daemon import Sample
from support.agent.stack_recorder import Recorder, Waiter, no_collections, of_thread, plain
from support.machine import native
from support.waiting import until

BUSY_S = 0.4
SPINS, SLEEPS = 1, 2
CPUS = sorted(os.sched_getaffinity(0))
PIPE = os.pipe()  # nobody writes into it
WAITS: Dict[int, Callable[[], object]] = {
    WAIT_SLEEP: lambda: time.sleep(1),
    WAIT_LOCK: lambda: threading.Event().wait(1),
    WAIT_POLL: lambda: select.select([PIPE[0]], [], [], 1),
}


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    made = Recorder(stack_sample_hz=200)
    yield made
    made.close()


class Busy:
    """A thread that does something until it is told to end."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.tid = 0
        self.work, self.on = work, True
        self.thread = threading.Thread(target=self.run)
        self.thread.start()
        until(lambda: self.tid, "it runs")

    def run(self) -> None:
        self.tid = threading.get_native_id()
        while self.on:
            self.work()

    def end(self) -> None:
        self.on = False
        self.thread.join()


def sleeps(tid: int) -> bool:
    """Whether the thread waits for something else than a processor."""
    return Path("/proc/self/task/%d/stat" % tid).read_text().rpartition(")")[2].split()[0] == "S"


def share(samples: List[Sample], state: int) -> float:
    return sum(sample.state == state for sample in samples) / len(samples)


def test_a_thread_that_waits_is_idle_and_uses_no_time(recorder: Recorder) -> None:
    with Waiter() as waiter:
        recorder.wait(20)
        samples = of_thread(recorder.stop(), waiter.tid)[5:]  # the first ones may still see it go to sleep
    assert share(samples, STACK_IDLE) == 1
    assert {sample.cpu_us for sample in samples} == {0}
    assert not any(sample.holds_gil for sample in samples)


def test_a_thread_that_runs_python_runs_and_has_the_gil(recorder: Recorder) -> None:
    begin_ns, before = time.time_ns(), time.thread_time_ns()
    while time.thread_time_ns() - before < BUSY_S * 1e9:  # however long it waits for a processor
        pass
    end_ns, used_us = time.time_ns(), (time.thread_time_ns() - before) / 1000
    recorder.wait(1)  # all of the time is in a sample then
    everything = of_thread(recorder.stop(), threading.get_native_id())
    samples = [sample for sample in everything if begin_ns <= sample.time_ns <= end_ns][1:]
    assert share(samples, STACK_RUNNING) > 0.9
    assert sum(sample.holds_gil for sample in samples) > 0.9 * len(samples)
    inside_us, all_us = (sum(sample.cpu_us for sample in some) for some in (samples, everything))
    assert inside_us < 1.25 * used_us
    assert all_us > 0.75 * used_us


def test_of_two_threads_that_run_python_one_waits_for_the_gil(recorder: Recorder) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.03)  # who waits need not have the CPU after each 5 ms, to ask for the GIL
    try:
        others = [Busy(lambda: sum(range(1000))) for _ in range(3)]
        recorder.wait(100)
        for other in others:
            other.end()
    finally:
        sys.setswitchinterval(interval)
    samples = recorder.stop()
    for other in others:
        own = of_thread(samples, other.tid)
        # 0.6 on a quiet machine
        assert share(own, STACK_WAITS_FOR_GIL) > 0.1
        assert share(own, STACK_IDLE) < 0.2
    holders = Counter(sample.time_ns for sample in samples if sample.holds_gil)
    assert sum(count > 1 for count in holders.values()) < 0.05 * len(holders)


@pytest.mark.slow
def test_a_thread_in_which_the_garbage_collector_runs_waits_for_it() -> None:
    kept = [[] for _ in range(500_000)]  # type: List[List[object]]
    with no_collections(), contextlib.closing(Recorder(stack_sample_hz=200)) as recorder:
        collecting, computing = Busy(gc.collect), Busy(lambda: sum(range(1000)))
        recorder.wait(100)
        collecting.end()
        computing.end()
        samples = recorder.stop()
    own = [sample for sample in of_thread(samples, collecting.tid) if sample.holds_gil]
    assert sum(sample.wait == WAIT_COLLECTOR for sample in own) > 0.8 * len(own) > 0
    others = of_thread(samples, computing.tid)
    # A finalizer may give the GIL away.
    assert sum(sample.wait == WAIT_COLLECTOR for sample in others) <= 0.1 * len(others)
    assert kept


def test_with_callbacks_of_the_program_collections_are_left_out() -> None:
    """They are Python: the GIL may change hands while a collection goes on."""
    kept = [[] for _ in range(200_000)]  # type: List[List[object]]
    with no_collections():
        gc.callbacks.append(lambda _phase, _info: None)
        with contextlib.closing(Recorder(stack_sample_hz=200)) as recorder:
            gc.callbacks.clear()
            enough = recorder.session.ticks() + 20
            while recorder.session.ticks() < enough:
                gc.collect()
            found = of_thread(recorder.stop(), threading.get_native_id())
    assert found
    assert not any(sample.wait == WAIT_COLLECTOR for sample in found)
    assert kept


def test_a_c_call_without_the_gil_runs(recorder: Recorder) -> None:
    data = b"x" * (4 << 20)
    other = Busy(lambda: hashlib.sha256(data).digest())
    recorder.wait(100)
    other.end()
    samples = of_thread(recorder.stop(), other.tid)
    assert share(samples, STACK_RUNNING) > 0.7
    assert sum(sample.holds_gil for sample in samples) < 0.2 * len(samples)


def test_a_c_call_that_keeps_the_gil_is_sampled_all_the_time(recorder: Recorder) -> None:
    usleep = ctypes.PyDLL(None).usleep
    usleep(500_000)
    own = of_thread(recorder.stop(), threading.get_native_id())
    sleeping = [
        sample
        for sample in own
        if plain(sample.stack)[-1:] == ("test_a_c_call_that_keeps_the_gil_is_sampled_all_the_time",)
    ]
    idle = [sample for sample in sleeping if sample.state == STACK_IDLE]  # before and after it may wait for a CPU
    assert len(idle) > 10  # of 100, as many as a busy machine gives; a sampler that needs the GIL has none
    assert all(sample.holds_gil for sample in idle[1:-1])


@pytest.mark.slow
def test_a_loop_that_releases_the_gil_all_the_time_is_shown_as_it_is(recorder: Recorder) -> None:
    spent = {"heavy": 0.0, "light": 0.0}

    def heavy() -> None:
        end = time.perf_counter() + 0.005
        while time.perf_counter() < end:
            pass

    def light() -> None:
        os.stat("/")  # noqa: PTH116 - the bare system call

    started = time.perf_counter()
    while time.perf_counter() < started + 2:
        begin = time.perf_counter()
        heavy()
        middle = time.perf_counter()
        light()
        spent["heavy"] += middle - begin
        spent["light"] += time.perf_counter() - middle
    took = time.perf_counter() - started  # more than 2 s if it had to wait for a processor at the end
    name = "test_a_loop_that_releases_the_gil_all_the_time_is_shown_as_it_is"
    own = [each for each in of_thread(recorder.stop(), threading.get_native_id()) if name in plain(each.stack)]
    seen = Counter(name for sample in own for name in plain(sample.stack) if name in spent)
    assert abs(seen["heavy"] / len(own) - spent["heavy"] / took) < 0.05


@pytest.fixture
def spinner() -> Iterator[ctypes.CDLL]:
    flags = ["-O2", "-fPIC", "-shared"]
    library = ctypes.CDLL(str(native.build("libspinner.so", [native.FAKES / "native_spinner.c"], flags)))
    yield library
    library.spinner_end()


def test_a_thread_without_python_is_there_by_the_kernels_name_while_it_runs(spinner: ctypes.CDLL) -> None:
    tid = spinner.spinner_start(b"omp_worker", SPINS)
    recorder = Recorder(stack_sample_hz=200)
    recorder.wait(120)
    samples = of_thread(recorder.stop(), tid)
    assert len(samples) > 5  # as many as a busy machine gives it a CPU for
    assert {sample.stack for sample in samples} == {()}
    assert share(samples, STACK_RUNNING) > 0.8
    assert recorder.names()[tid] == "omp_worker"
    recorder.close()


def test_a_thread_without_python_that_sleeps_costs_no_record(spinner: ctypes.CDLL) -> None:
    tid = spinner.spinner_start(b"omp_worker", SLEEPS)
    until(lambda: sleeps(tid), "it sleeps")
    recorder = Recorder(stack_sample_hz=200)
    recorder.wait(40)
    assert len(of_thread(recorder.stop(), tid)) <= 1
    recorder.close()


@pytest.mark.parametrize("wait", WAITS)
def test_an_idle_thread_says_what_it_waits_for(recorder: Recorder, wait: int) -> None:
    other = Busy(WAITS[wait])
    until(lambda: sleeps(other.tid), "it waits")
    recorder.wait(100)
    other.end()
    idle = [sample for sample in of_thread(recorder.stop(), other.tid) if sample.state == STACK_IDLE]
    assert len(idle) > 20
    assert Counter(sample.wait for sample in idle).most_common(1)[0][0] == wait


def test_a_wait_for_a_child_is_told(recorder: Recorder) -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        other = Busy(lambda: os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT))
        until(lambda: sleeps(other.tid), "it waits")
        recorder.wait(100)
        other.on = False
        child.kill()
        other.end()
    idle = [sample for sample in of_thread(recorder.stop(), other.tid) if sample.state == STACK_IDLE]
    assert len(idle) > 20
    assert Counter(sample.wait for sample in idle).most_common(1)[0][0] == WAIT_CHILD


def test_a_read_that_waits_is_input(recorder: Recorder) -> None:
    reader, writer = os.pipe()
    tid = 0

    def read() -> None:
        nonlocal tid
        tid = threading.get_native_id()
        os.read(reader, 1)

    thread = threading.Thread(target=read)
    thread.start()
    until(lambda: tid and sleeps(tid), "it waits")
    recorder.wait(60)
    os.write(writer, b"x")
    thread.join()
    idle = [sample for sample in of_thread(recorder.stop(), tid) if sample.state == STACK_IDLE]
    inside = [sample for sample in idle if plain(sample.stack)[-1:] == ("read",)][:-1]  # the last one may be on its way
    assert len(inside) > 20
    assert {sample.wait for sample in inside} == {WAIT_IO}
    os.close(reader)
    os.close(writer)


@pytest.mark.slow
def test_threads_that_share_one_cpu_are_ready_and_not_idle(recorder: Recorder) -> None:
    data = b"x" * (4 << 20)

    def pinned() -> None:
        os.sched_setaffinity(0, CPUS[:1])
        hashlib.sha256(data).digest()

    others = [Busy(pinned) for _ in range(4)]
    recorder.wait(50)
    for other in others:
        other.end()
    samples = recorder.stop()
    seen = [sample for other in others for sample in of_thread(samples, other.tid)[2:-1]]
    assert share(seen, STACK_RUNNING) > 0.8
    assert sum(sample.wait == WAIT_CPU for sample in seen) > 0.4 * len(seen)  # three of four wait
