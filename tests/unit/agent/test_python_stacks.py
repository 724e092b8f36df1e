import gc
import os
import sys
import threading
import time
from pathlib import Path
from typing import Callable, Dict, FrozenSet, Iterator, List, Tuple

import pytest
from kineto_agent import arena
from kineto_agent.sources import python_stacks as module
from kineto_agent.sources.interface import SourceError, SourceRequest
from kineto_agent.sources.python_stacks import PythonStacksSession, PythonStacksSource
from support.agent_daemon import ArenaReader, Sample
from support.waiting import until

TYPES: FrozenSet[str] = frozenset(["python_function"])
QUALIFIED = sys.version_info >= (3, 11)


def prepared(**options: object) -> PythonStacksSession:
    return PythonStacksSource().prepare(SourceRequest(TYPES, 8 << 20, dict(options)))


class Recorder:
    """A running session and what the daemon sees of it."""

    def __init__(self, session: PythonStacksSession) -> None:
        self.session = session
        self.reader = ArenaReader(os.dup(session.arena_fd))

    def stop(self) -> List[Sample]:
        self.outcome = self.session.stop()
        return self.reader.samples()


@pytest.fixture
def record() -> Iterator[Callable[..., Recorder]]:
    recorders: List[Recorder] = []

    def start(**options: object) -> Recorder:
        recorder = Recorder(prepared(**options))
        recorders.append(recorder)
        recorder.session.start()
        return recorder

    yield start
    for recorder in recorders:
        recorder.session.close()
        recorder.reader.close()


def spin(recorder: Recorder, ticks: int = 10) -> None:
    """Keep the processor busy until so many samples are taken."""
    end = time.monotonic() + 20
    while recorder.session._ticks < ticks and time.monotonic() < end:
        pass


class Thread:
    """A thread that waits, three calls deep, until it is told to end."""

    def __init__(self, depth: int = 0) -> None:
        self.tid = 0
        self.ready, self.end = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.outer, args=(depth,), name="waiter")
        self.thread.start()
        assert self.ready.wait(20)

    def outer(self, depth: int) -> None:
        if depth:
            self.outer(depth - 1)
        else:
            self.inner()

    def inner(self) -> None:
        self.tid = threading.get_native_id()
        self.ready.set()
        self.end.wait(20)

    def __enter__(self) -> "Thread":
        return self

    def __exit__(self, *_exception: object) -> None:
        self.end.set()
        self.thread.join()


def stacks_of(samples: List[Sample], tid: int) -> List[Tuple[str, ...]]:
    return [sample.stack for sample in samples if sample.thread_id == tid]


def test_every_thread_is_sampled_with_its_whole_stack(record: Callable[..., Recorder]) -> None:
    others = {int(entry.name) for entry in Path("/proc/self/task").iterdir()} - {threading.get_native_id()}
    with Thread() as waiter:
        recorder = record()
        spin(recorder, 15)
        samples = recorder.stop()
    name = "Thread.inner" if QUALIFIED else "inner"
    waiting = stacks_of(samples, waiter.tid)
    assert len(waiting) >= 10
    assert all(name in stack for stack in waiting)
    main = stacks_of(samples, threading.get_native_id())
    assert sum("spin" in stack for stack in main) >= len(main) - 2
    assert {sample.thread_id for sample in samples} - others == {waiter.tid, threading.get_native_id()}


def test_samples_are_in_order_at_the_wanted_rate(record: Callable[..., Recorder]) -> None:
    begin = time.time_ns()
    recorder = record(stack_sample_hz=50)
    began = time.monotonic()
    spin(recorder, 25)
    samples = recorder.stop()
    elapsed = time.monotonic() - began
    times = [sample.time_ns for sample in samples]
    assert times == sorted(times)
    assert begin <= times[0] <= times[-1] <= time.time_ns()
    ticks = recorder.outcome.metadata["ticks"] + recorder.outcome.metadata["missed_ticks"]
    assert abs(ticks - 50 * elapsed) < 3 + 0.1 * ticks
    assert recorder.session.metadata["hz"] == 50


def test_counts_are_those_of_the_records(record: Callable[..., Recorder]) -> None:
    recorder = record()
    spin(recorder)
    samples = recorder.stop()
    counts = recorder.outcome.counts
    assert (counts.records, counts.bytes, counts.dropped) == (len(samples), 24 * len(samples), 0)
    assert recorder.outcome.cpu_ns > 0
    assert recorder.outcome.warnings == []
    assert recorder.reader.word(arena.CLOSED) == 1


def test_threads_are_named(record: Callable[..., Recorder]) -> None:
    with Thread() as waiter:
        recorder = record()
        until(lambda: recorder.session._ticks > 1, "samples are taken")
        recorder.stop()
    names = {key: text for (space, key), text in recorder.reader.strings().items() if space == arena.SPACE_THREAD_NAME}
    assert names[waiter.tid] == b"waiter"
    assert names[threading.get_native_id()] == b"MainThread"


def test_code_is_named_with_file_and_first_line(record: Callable[..., Recorder]) -> None:
    recorder = record()
    spin(recorder)
    samples = recorder.stop()
    codes = [text for (space, _key), text in recorder.reader.strings().items() if space == arena.SPACE_PYTHON_CODE]
    line = spin.__code__.co_firstlineno
    assert b"%s\0%d\0spin" % (os.fsencode(__file__), line) in codes
    assert {sample.line for sample in samples if sample.stack[-1] == "spin"} <= set(range(line, line + 6))


def test_a_sample_is_readable_within_a_quarter_of_a_second(record: Callable[..., Recorder]) -> None:
    recorder = record()
    until(lambda: recorder.reader.word(arena.RECORDS) > 0, "a buffer is published", deadline_s=5)
    recorder.stop()


def test_very_deep_stacks_are_cut_at_the_outer_end(record: Callable[..., Recorder]) -> None:
    with Thread(depth=400) as waiter:
        recorder = record()
        until(lambda: recorder.session._ticks > 2, "samples are taken")
        samples = recorder.stop()
    stack = stacks_of(samples, waiter.tid)[0]
    assert len(stack) == 256
    assert ("Thread.inner" if QUALIFIED else "inner") in stack
    assert recorder.outcome.metadata["truncated_stacks"] >= 2


def test_a_full_table_of_stacks_is_counted_and_said(
    record: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_STRINGS_BYTES", 4096)
    with Thread(depth=200):
        recorder = record()
        until(lambda: recorder.session._unnamed > 0, "a sample is dropped")
        recorder.stop()
    assert recorder.outcome.counts.dropped > 0
    assert "the table of stacks is full" in recorder.outcome.warnings[0]


def test_a_sampler_that_costs_too_much_slows_down_and_says_so(
    record: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_LOAD", 0.0001)
    recorder = record(stack_sample_hz=1000)
    until(lambda: recorder.session._rate.longest_ns > 1_000_000, "the rate is lowered")
    recorder.stop()
    assert recorder.outcome.warnings[0].startswith("stacks were sampled at down to ")
    assert " Hz instead of 1000 Hz: one sample of all threads took " in recorder.outcome.warnings[0]


def test_an_error_in_the_sampler_is_told_and_what_was_recorded_stays(
    record: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = record()
    until(lambda: recorder.reader.word(arena.RECORDS) > 0, "a buffer is published")
    monkeypatch.setattr(sys, "_current_frames", lambda: 1 / 0)
    thread = recorder.session._thread
    assert thread is not None
    thread.join(20)
    monkeypatch.undo()
    assert len(recorder.stop()) > 0
    assert recorder.outcome.warnings == ["the stack sampler failed: ZeroDivisionError: division by zero"]
    assert gc.isenabled()


def test_a_session_that_never_started_can_be_stopped_and_closed() -> None:
    session = prepared()
    assert session.stop().counts.records == 0
    session.close()


def test_code_is_kept_alive_only_as_long_as_the_session(record: Callable[..., Recorder]) -> None:
    namespace: Dict[str, Callable[[Callable[[], object]], object]] = {}
    exec("def made(wait): return wait()", namespace)
    recorder = record()
    namespace["made"](lambda: until(lambda: recorder.session._ticks > 3, "samples are taken"))
    samples = recorder.stop()
    assert any("made" in sample.stack for sample in samples)
    code = namespace["made"].__code__
    assert code in recorder.session._table._alive


@pytest.mark.parametrize("hz", [-1, 1001, "fast", 2.5])
def test_a_rate_out_of_range_is_refused(hz: object) -> None:
    with pytest.raises(SourceError, match=r"stack_sample_hz is .*: it must be a whole number from 1 to 1000") as caught:
        prepared(stack_sample_hz=hz)
    assert caught.value.reason_code == "INVALID_OPTION"


@pytest.mark.parametrize("options", [{}, {"stack_sample_hz": 0}, {"stack_sample_hz": None}])
def test_without_a_wish_the_rate_is_100_hz(options: Dict[str, object]) -> None:
    assert module.sampling_rate(options) == 100
