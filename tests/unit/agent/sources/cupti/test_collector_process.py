"""The traced process forks, exits or is killed while the collector records."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kineto_agent.protocol import arena
from support.agent.arenas import ArenaReader, count_kinds
from support.agent.collector import calling, fake_cuda, recording
from support.machine.native import ROOT
from support.waiting import scaled

KERNEL = 10
PRELUDE = """
import os, sys, time
from kineto_agent.protocol import arena
from support.agent.collector import fake_cuda, request, source
from support.waiting import until
cuda = fake_cuda()
session = source().prepare(request(["kernel"]))
session.start()
"""


@contextmanager
def python(code: str) -> Iterator[subprocess.Popen[str]]:
    """A process that records; `code` goes on from there."""
    path = os.pathsep.join(str(ROOT / part) for part in ("agent", "tests"))
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        with process:
            yield process
    finally:
        process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def reader_of(process: subprocess.Popen[str], fd: str) -> ArenaReader:
    copy = os.open(f"/proc/{process.pid}/fd/{fd}", os.O_RDWR)
    try:
        return ArenaReader(copy)
    finally:
        os.close(copy)


def test_what_is_ready_survives_a_kill() -> None:
    with (
        python("""
cuda.launch("gemm", count=30_000)
until(lambda: session.counts().records >= 30_000, "everything is recorded")
print(session.arena_fd, flush=True)
sys.stdin.read()
""") as process,
        reader_of(process, line(process)) as reader,
    ):
        process.send_signal(signal.SIGKILL)
        process.wait()
        counted = count_kinds(reader.ready(), reader.record_bytes())
        assert counted == {KERNEL: 30_000}
        assert "gemm" in reader.strings().values()
        assert reader.word(arena.CLOSED) == 0


def test_an_exit_while_recording_is_clean_and_leaves_the_records() -> None:
    with python("""
print(session.arena_fd, flush=True)
sys.stdin.readline()
cuda.launch("gemm", count=30_000)
""") as process:
        assert process.stdin is not None and process.stderr is not None
        with reader_of(process, line(process)) as reader:
            process.stdin.write("go\n")
            process.stdin.flush()
            assert process.wait(timeout=scaled(30)) == 0
            assert process.stderr.read() == ""
            assert count_kinds(reader.ready(), reader.record_bytes()) == {KERNEL: 30_000}


def test_an_exit_while_other_threads_launch_is_clean() -> None:
    with python("""
import threading
def launch():
    while True:
        cuda.launch(count=100)
for _ in range(4):
    threading.Thread(target=launch, daemon=True).start()
until(lambda: session.counts().records >= 20_000, "the threads are recorded")
""") as process:
        assert process.stderr is not None
        assert process.wait(timeout=scaled(30)) == 0
        assert process.stderr.read() == ""


def test_an_exit_while_a_recording_begins_waits_until_it_is_out_of_cupti() -> None:
    with python("""
import threading
session.stop()
session.close()
cuda.forget_users()
cuda.set("enable_delay_ms", 100)
session = source().prepare(request(["kernel"]))
threading.Thread(target=session.start, daemon=True).start()
until(lambda: cuda.attached, "its callbacks are registered")
""") as process:
        assert process.stderr is not None
        assert (process.wait(timeout=scaled(30)), process.stderr.read()) == (0, "")


def test_a_forked_child_does_nothing_and_keeps_nothing() -> None:
    cuda = fake_cuda()
    with recording(["kernel"]) as (session, reader):
        cuda.launch(count=3)
        mapped = arenas_mapped()
        child = os.fork()
        if child == 0:
            _exit_with(0 if _child_is_free(session.arena_fd, mapped - 1) else 1)
        _, status = os.waitpid(child, 0)
        cuda.launch(count=4)
        with calling(cuda):
            outcome = session.stop()
        assert os.waitstatus_to_exitcode(status) == 0
        assert outcome.counts.records == 7
        assert count_kinds(reader.ready(), reader.record_bytes()) == {KERNEL: 7}


def arenas_mapped() -> int:
    return Path("/proc/self/maps").read_text().count("kineto-arena")


def _child_is_free(fd: int, others: int) -> bool:
    from kineto_agent.sources.cupti.collector_binding import Collector

    collector = Collector.of_process()
    mapped = arenas_mapped()
    closed = not Path(f"/proc/self/fd/{fd}").exists()
    collector.close()
    stopped = collector.stop(100)
    # The collector's mapping is gone; the test's own reader is among the others.
    return closed and mapped <= others and stopped.counts.records == 0 and stopped.cpu_ns == 0


def _exit_with(status: int) -> None:
    os._exit(status)


def test_preparing_in_a_forked_child_is_refused_with_a_reason() -> None:
    with python("""
child = os.fork()
if child == 0:
    from kineto_agent.sources.interface import SourceError
    try:
        source().prepare(request(["kernel"]))
    except SourceError as exc:
        print(exc.reason_code, "-", exc.reason, flush=True)
    os._exit(0)
os.waitpid(child, 0)
os._exit(0)
""") as process:
        assert line(process) == "CUPTI_FORKED - CUPTI does not work in a forked child process"


def test_a_fork_while_threads_launch_and_buffers_come_back_is_clean() -> None:
    with python("""
import threading
ended = threading.Event()
def launch():
    while not ended.is_set():
        cuda.launch(count=100)
threads = [threading.Thread(target=launch) for _ in range(4)]
for thread in threads:
    thread.start()
failures = 0
for _ in range(20):
    child = os.fork()
    if child == 0:
        os._exit(0)
    failures += os.waitpid(child, 0)[1] != 0
ended.set()
for thread in threads:
    thread.join()
print(failures, session.stop().counts.records == cuda.written(10), flush=True)
os._exit(0)
""") as process:
        assert line(process) == "0 True"


def test_a_flush_that_does_not_return_does_not_hold_the_agent() -> None:
    with python("""
from kineto_agent.sources.cupti import gpu_activities
gpu_activities.STOP_LIMIT_MS = 50
cuda.set("flush_delay_ms", 240_000)
begin = time.monotonic()
outcome = session.stop()
took = time.monotonic() - begin
session.close()
print(took < 60, outcome.warnings, flush=True)
from kineto_agent.sources.interface import SourceError
try:
    source().prepare(request(["kernel"]))
except SourceError as exc:
    print(exc.reason_code, exc.reason, flush=True)
cuda.set("flush_delay_ms", 0)
def prepared():
    try:
        return source().prepare(request(["kernel"]))
    except SourceError:
        return None
session = until(prepared, "the earlier recording has ended")
gpu_activities.STOP_LIMIT_MS = 20_000  # a busy machine
session.start()
cuda.launch(count=3)
print(session.stop().counts.records, flush=True)
os._exit(0)
""") as process:
        assert line(process) == ("True ['CUPTI did not hand over its last records within 50 ms: the trace ends early']")
        assert line(process) == "CUPTI_BUSY CUPTI has not ended the previous recording yet: try again later"
        assert line(process) == "3"


def test_a_buffer_of_an_earlier_recording_that_comes_back_as_cupti_leaves_is_not_read_once_it_is_unmapped() -> None:
    with python("""
from support.agent.collector import LONG_MS, calling, recording
cuda.set("hold_a_buffer", 1)
cuda.launch()
session.stop()
session.close()
cuda.set("return_at_finalize", 1)
with recording(["kernel"], detach_limit_ms=LONG_MS) as (session, _), calling(cuda):
    print(session.stop().detach_ns > 0, flush=True)
cuda.set("hold_a_buffer", 0)
with recording(["kernel"]) as (session, _):
    cuda.launch(count=3)
    print(session.stop().counts.records, flush=True)
""") as process:
        assert line(process) == "True"
        assert line(process) == "3"
