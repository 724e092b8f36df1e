import ctypes
import sys
import threading
import time
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Set

import pytest
from kineto_agent.protocol import arena
from kineto_agent.protocol.records import SPACE_PYTHON_CODE
from kineto_agent.sources.interface import SourceError
from kineto_agent.sources.python import stack_sampling as module
from kineto_agent.sources.python.sampler_binding import SamplerResult
from kineto_agent.system.threads import start_thread
from support.agent.agent_daemon import Sample, code_of
from support.agent.stack_recorder import Recorder, Waiter, of_thread, plain, prepared
from support.losses import without_losses
from support.waiting import scaled, until

Record = Callable[..., Recorder]


@pytest.fixture
def record() -> Iterator[Record]:
    recorders: List[Recorder] = []

    def start(**options: object) -> Recorder:
        recorders.append(Recorder(**options))
        return recorders[-1]

    yield start
    for recorder in recorders:
        recorder.close()


def spin(recorder: Recorder, ticks: int = 10) -> None:
    """Keep the processor busy until so many samples are taken meanwhile, however late it begins."""
    end, enough = time.monotonic() + scaled(20), recorder.session.ticks() + ticks
    while recorder.session.ticks() < enough and time.monotonic() < end:
        pass


def descriptors() -> Set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def own(samples: List[Sample]) -> List[Sample]:
    return of_thread(samples, threading.get_native_id())


def test_every_python_thread_is_sampled_with_its_whole_stack(record: Record) -> None:
    with Waiter() as waiter:
        recorder = record()
        spin(recorder, 15)
        samples = recorder.stop()
    waiting = of_thread(samples, waiter.tid)
    assert len(waiting) >= 14
    assert {plain(sample.stack)[-4:-1] for sample in waiting} == {("outer", "inner", "wait")}
    spinning = sum("spin" in sample.stack for sample in own(samples))
    assert spinning + recorder.outcome.metadata["torn_samples"] >= 13  # the first one may have begun before


def test_samples_are_in_order_at_the_wanted_rate(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LOAD_PPM", 1_000_000)  # however much a sample costs on a busy machine
    begin = time.time_ns()
    recorder = record(stack_sample_hz=50)
    spin(recorder, 25)
    samples = recorder.stop()
    took = time.time_ns() - begin
    times = [sample.time_ns for sample in samples]
    assert times == sorted(times)
    assert begin <= times[0] <= times[-1] <= time.time_ns()
    ticks = recorder.outcome.metadata["ticks"] + recorder.outcome.metadata["missed_ticks"]
    assert 50 * (times[-1] - times[0]) / 1e9 - ticks < 4 + 0.1 * ticks
    assert ticks - 50 * took / 1e9 < 4 + 0.1 * ticks  # its thread may be put aside before the first sample
    assert recorder.session.metadata["hz"] == 50


def test_samples_are_at_random_moments_of_their_periods(record: Record) -> None:
    recorder = record(stack_sample_hz=200)
    recorder.wait(40)
    times = sorted({sample.time_ns for sample in recorder.stop()})
    gaps = [later - earlier for earlier, later in zip(times, times[1:])]
    assert min(gaps) < 4_000_000
    assert max(gaps) > 6_000_000


def test_counts_are_those_of_the_records(record: Record) -> None:
    recorder = record()
    spin(recorder)
    samples = recorder.stop()
    counts = recorder.outcome.counts
    assert (counts.records, counts.bytes, counts.dropped) == (len(samples), 24 * len(samples), 0)
    assert recorder.outcome.cpu_ns > 0
    assert without_losses(recorder.outcome.warnings) == []
    assert recorder.reader.word(arena.CLOSED) == 1


def test_threads_have_the_programs_names_for_them(record: Record) -> None:
    with Waiter() as early:
        recorder = record()
        recorder.wait(1)
        with Waiter() as late:
            late.thread.name = "latecomer"
            recorder.wait(2)
            recorder.stop()
    names = recorder.names()
    assert (names[early.tid], names[late.tid]) == ("waiter", "latecomer")
    assert names[threading.get_native_id()] == "MainThread"


def test_threads_of_the_agent_are_not_shown(record: Record) -> None:
    started, done = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        done.wait(scaled(20))

    start_thread("kineto-test", wait)
    assert started.wait(scaled(20))
    recorder = record()
    spin(recorder, 15)
    recorder.stop()
    done.set()
    assert not [name for name in recorder.names().values() if name.startswith("kineto")]


def test_code_has_its_file_and_its_line_table(record: Record) -> None:
    recorder = record()
    spin(recorder)
    recorder.stop()
    entries = [text for (space, _), text in recorder.reader.strings().items() if space == SPACE_PYTHON_CODE]
    (code,) = [code for code in map(code_of, entries) if code.name == "spin"]
    assert (code.file, code.first_line) == (__file__, spin.__code__.co_firstlineno)
    table = spin.__code__.co_linetable if sys.version_info >= (3, 10) else spin.__code__.co_lnotab
    assert (code.line_table_kind, code.line_table) == (min(9 + sys.version_info[1] - 9, 11), table)


def test_every_frame_has_the_line_that_it_is_at(record: Record) -> None:
    with Waiter() as waiter:
        recorder = record()
        recorder.wait(2)
        sample = of_thread(recorder.stop(), waiter.tid)[-1]
    at = plain(sample.stack).index("inner")
    assert sample.lines[at] == Waiter.inner.__code__.co_firstlineno + 4
    assert sample.lines[at - 1] == Waiter.outer.__code__.co_firstlineno + 5


def test_a_sample_is_readable_within_half_a_second(record: Record) -> None:
    recorder = record()
    until(lambda: recorder.reader.word(arena.RECORDS) > 0, "a buffer is published", deadline_s=5)
    recorder.stop()


def test_very_deep_stacks_are_cut_at_the_outer_end(record: Record) -> None:
    with Waiter(depth=400) as waiter:
        recorder = record()
        recorder.wait(3)
        samples = of_thread(recorder.stop(), waiter.tid)
    assert {len(sample.stack) for sample in samples} == {256}
    assert "inner" in plain(samples[0].stack)
    assert recorder.outcome.metadata["truncated_stacks"] == len(samples)


def test_a_full_table_of_stacks_is_counted_and_said(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STRINGS_BYTES", 4096)
    with Waiter(depth=200):
        recorder = record()
        recorder.wait(2)
        recorder.stop()
    assert recorder.outcome.counts.dropped > 0
    (warning,) = without_losses(recorder.outcome.warnings)
    assert "the table of stacks is full" in warning


@pytest.mark.slow
def test_a_sampler_that_costs_too_much_slows_down_and_says_so(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LOAD_PPM", 20)  # one sample is too much for a second in which it got no processor
    recorder = record(stack_sample_hz=1000)
    began = time.monotonic()
    until(lambda: time.monotonic() - began > 0.7, "the load of half a second is known")
    ticks = recorder.session.ticks()
    until(lambda: recorder.session.ticks() > ticks, "it has looked at its load", deadline_s=60)
    recorder.stop()
    assert recorder.outcome.warnings[0].startswith("the stack sampling rate dropped from 1000 Hz to ")
    assert " Hz: one sample of all threads took " in recorder.outcome.warnings[0]


def test_a_session_that_never_started_can_be_stopped_and_closed() -> None:
    session = prepared()
    assert session.stop().counts.records == 0
    session.close()


def test_two_recordings_at_a_time_are_refused(record: Record) -> None:
    recorder = record()
    with pytest.raises(SourceError) as caught:
        prepared()
    assert caught.value.reason_code == "STACKS_BUSY"
    recorder.stop()


def test_code_that_was_freed_and_whose_memory_is_anothers_keeps_its_own_name(record: Record) -> None:
    recorder = record(stack_sample_hz=1000)
    names = ["made%d" % number for number in range(20)]
    for name in names:
        namespace: Dict[str, Callable[[Recorder], None]] = {}
        exec("def %s(recorder): recorder.wait(5)" % name, namespace)  # a sample may be torn
        namespace.pop(name)(recorder)
    samples = own(recorder.stop())
    seen = [name for sample in samples for name in sample.stack if name.startswith("made")]
    assert sorted(set(seen)) == sorted(names)
    assert seen == sorted(seen, key=names.index)


@pytest.mark.parametrize("name", ["plain", "naïve", "имя", "名\U00020000"])
def test_names_of_every_script_are_read(record: Record, name: str) -> None:
    namespace: Dict[str, Callable[[Recorder], None]] = {}
    exec(compile("def %s(recorder): recorder.wait(2)" % name, "/файл.py", "exec"), namespace)
    recorder = record()
    namespace[name](recorder)
    assert any(name in sample.stack for sample in own(recorder.stop()))
    entries = [text for (space, _), text in recorder.reader.strings().items() if space == SPACE_PYTHON_CODE]
    assert [code.file for code in map(code_of, entries) if code.name == name] == ["/файл.py"]


def test_a_thread_made_by_a_c_library_is_sampled_while_it_runs_python(record: Record) -> None:
    ready, done = threading.Event(), threading.Event()
    found: List[int] = []

    def body(_argument: object) -> None:
        found.append(threading.get_native_id())
        ready.set()
        assert done.wait(scaled(20))

    library = ctypes.CDLL(None)
    library.pthread_join.argtypes = [ctypes.c_ulong, ctypes.c_void_p]
    callback = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(body)
    thread = ctypes.c_ulong()
    assert library.pthread_create(ctypes.byref(thread), None, callback, None) == 0
    assert ready.wait(scaled(20))
    recorder = record()
    recorder.wait(2)
    samples = of_thread(recorder.stop(), found[0])  # first: outside body the thread is one without Python
    done.set()
    assert library.pthread_join(thread, None) == 0
    assert {plain(sample.stack)[0] for sample in samples} == {"body"}


@pytest.mark.parametrize("hz", [-1, 1001, "fast", 2.5])
def test_a_rate_out_of_range_is_refused(hz: object) -> None:
    with pytest.raises(SourceError, match=r"stack_sample_hz is .*: it must be a whole number from 1 to 1000") as caught:
        prepared(stack_sample_hz=hz)
    assert caught.value.reason_code == "INVALID_OPTION"


@pytest.mark.parametrize("options", [{}, {"stack_sample_hz": 0}, {"stack_sample_hz": None}])
def test_without_a_wish_the_rate_is_100_hz(options: Dict[str, object]) -> None:
    assert module.sampling_rate(options) == 100


def test_what_the_thread_opens_is_not_among_the_programs_descriptors(record: Record) -> None:
    recorder = record(stack_sample_hz=1000)
    here = descriptors()
    with Waiter():
        for _ in range(500):
            assert descriptors() <= here  # what an earlier test has left may go
    recorder.stop()


@pytest.mark.parametrize("torn, read, told", [(1, 5000, False), (200, 5000, True), (3, 60, False), (6, 58, True)])
def test_looks_that_failed_are_no_lost_records_and_are_told_if_they_are_many(torn: int, read: int, told: bool) -> None:
    class Ended:
        def stop(self, _limit_ms: int) -> SamplerResult:
            result = SamplerResult(torn_samples=torn)
            result.counts.records = read
            return result

        def name(self, _tid: int, _name: str) -> None:
            pass

    outcome = module.PythonStacksSession(100, Ended(), -1).stop()
    assert outcome.counts.dropped == 0
    assert outcome.warnings == (
        [f"{torn} of {torn + read} stack samples were left out: the stacks changed while being read"] * told
    )
