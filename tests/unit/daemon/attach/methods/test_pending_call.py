import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kinetod.attach.attach_types import AttachCode, AttachError, Bootstrap, Deadline
from kinetod.attach.inspect.target_image import TargetImage
from kinetod.attach.methods.pending_call import PendingCall
from support.targets.engine_target import EngineTarget, engine_target, needs_ptrace, pythons, version_of
from support.targets.python_versions import other_versions_slow
from support.waiting import until

pytestmark = needs_ptrace
METHOD = PendingCall()
SECONDS = 10.0


def until_alone(target: EngineTarget) -> None:
    until(lambda: len(list(Path(f"/proc/{target.pid}/task").iterdir())) == 1, "the threads have ended")


@pytest.mark.parametrize("executable", other_versions_slow(pythons()), ids=version_of)
def test_a_busy_main_thread_runs_the_bootstrap_and_computes_on(tmp_path: Path, executable: str) -> None:
    with engine_target(tmp_path, "malloc", executable) as target:
        for times in range(1, 11):
            stop = METHOD.hand_over(TargetImage(target.pid), target.bootstrap(), Deadline(SECONDS))
            assert stop.tid == target.pid
            assert stop.stopped_ns > 0
            target.until_marked(times)
            until_alone(target)
        report = target.finish()
    assert report["mask"] == 0
    assert report["threads"] == 1


STAYS_IN_C = "import hashlib; print('up', flush=True); hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)"


@pytest.mark.parametrize("executable", other_versions_slow(pythons()), ids=version_of)
def test_a_main_thread_that_stays_in_an_extension_gets_the_call(executable: str) -> None:
    with subprocess.Popen([executable, "-c", STAYS_IN_C], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            stop = METHOD.hand_over(TargetImage(process.pid), Bootstrap(time.time_ns(), b""), Deadline(SECONDS))
            assert stop.tid == process.pid
        finally:
            process.kill()


FORKS_WITH_THE_CALL_IN_THE_QUEUE = """
import functools, os
os.register_at_fork(before=functools.partial(os.read, 0, 1))
print("up", flush=True)
child = os.fork()
if not child:
    for _ in range(1000): pass
    os._exit(len(os.listdir("/proc/self/task")) - 1)
print(os.waitpid(child, 0)[1], flush=True)
os.read(0, 1)
"""


@pytest.mark.parametrize("executable", other_versions_slow(pythons()), ids=version_of)
def test_a_child_that_is_forked_before_the_call_is_made_gets_no_thread(executable: str) -> None:
    arguments = [executable, "-c", FORKS_WITH_THE_CALL_IN_THE_QUEUE]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        try:
            assert process.stdin is not None and process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            call = Path(f"/proc/{process.pid}/syscall")
            until(lambda: call.read_text().split()[0] in ("0", "63"), "it reads before it forks")
            METHOD.hand_over(TargetImage(process.pid), Bootstrap(time.time_ns(), b""), Deadline(SECONDS))
            process.stdin.write(b"x")
            assert process.stdout.readline() == b"0\n"
        finally:
            process.kill()


def test_a_parked_bystander_is_stopped_rather_than_the_main_thread(tmp_path: Path) -> None:
    with engine_target(tmp_path, "bystander") as target:
        for times in range(1, 11):
            stop = METHOD.hand_over(TargetImage(target.pid), target.bootstrap(), Deadline(SECONDS))
            assert stop.tid != target.pid
            target.until_marked(times)
        assert target.finish()["mask"] == 0


def test_many_threads(tmp_path: Path) -> None:
    with engine_target(tmp_path, "worker worker worker malloc") as target:
        for times in range(1, 6):
            METHOD.hand_over(TargetImage(target.pid), target.bootstrap(), Deadline(SECONDS))
            target.until_marked(times)
        target.finish()


@pytest.mark.slow
def test_a_sleeping_main_thread_sleeps_neither_shorter_nor_longer(tmp_path: Path) -> None:
    with engine_target(tmp_path, "asleep") as target:
        for _time in range(5):
            PendingCall().hand_over(TargetImage(target.pid), target.bootstrap(), Deadline(SECONDS))
        target.until_marked(5)
        report = target.finish()
    assert 1.49 <= report["slept"] < 2.5


def test_a_signal_reaches_its_handler_once(tmp_path: Path) -> None:
    with engine_target(tmp_path, "joined bystander") as target:
        for times in range(1, 11):
            os.kill(target.pid, signal.SIGUSR1)
            METHOD.hand_over(TargetImage(target.pid), target.bootstrap(), Deadline(SECONDS))
            target.until_marked(times)
        report = target.finish()
    assert report["interrupted"] == 10
    assert report["mask"] == 0


def test_one_page_stays_per_hand_over(tmp_path: Path) -> None:
    with engine_target(tmp_path) as target:
        before = len(TargetImage(target.pid).maps)
        for times in range(1, 6):
            METHOD.hand_over(TargetImage(target.pid), target.bootstrap(), Deadline(SECONDS))
            target.until_marked(times)
            until_alone(target)
        maps = TargetImage(target.pid).maps
        pages = [mapping for mapping in maps if mapping.start >> 32 == 0x6B69]
        assert sum(mapping.end - mapping.start for mapping in pages) == 5 * 4096
        # Those pages are one mapping; the library's changed page splits its mapping; and the C library keeps the
        # threads' stacks (and guards) and heaps (and reserves) for the next ones: two of them may live at once.
        assert len(maps) <= before + 16
        target.finish()


def test_without_the_right_to_open_proc_mem_it_works_by_other_system_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def refusing(path: "str | os.PathLike[str]", flags: int, mode: int = 0o777) -> int:
        if str(path).endswith("/mem"):
            raise PermissionError
        return real_open(path, flags, mode)

    with engine_target(tmp_path) as target:
        monkeypatch.setattr("kinetod.attach.inspect.target_memory.os.open", refusing)
        image = TargetImage(target.pid)
        assert not image.memory.writes
        METHOD.hand_over(image, target.bootstrap(), Deadline(SECONDS))
        target.until_marked()
        target.finish()


def test_a_program_without_python_is_refused() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            image = TargetImage(process.pid)
            with pytest.raises(AttachError, match="has no Python interpreter") as failure:
                METHOD.hand_over(image, _bootstrap(), Deadline(SECONDS))
            assert failure.value.code is AttachCode.UNSUPPORTED
        finally:
            process.kill()


def test_a_stopped_process_is_refused_and_stays_stopped(tmp_path: Path) -> None:
    with engine_target(tmp_path) as target:
        os.kill(target.pid, signal.SIGSTOP)
        until(lambda: _state(target.pid) == "T", "it is stopped")
        with pytest.raises(AttachError, match=f"kill -CONT {target.pid}") as failure:
            METHOD.hand_over(TargetImage(target.pid), target.bootstrap(), Deadline(SECONDS))
        assert failure.value.code is AttachCode.UNSUITABLE
        assert _state(target.pid) == "T"
        os.kill(target.pid, signal.SIGCONT)
        target.finish()


def test_the_other_tracer_is_named(tmp_path: Path) -> None:
    tracer = """
import ctypes, sys
print(ctypes.CDLL(None).ptrace(0x4206, int(sys.argv[1]), None, None), flush=True)
sys.stdin.read()
"""
    with engine_target(tmp_path) as target:
        command = [sys.executable, "-c", tracer, str(target.pid)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"0\n"
            with pytest.raises(AttachError, match=rf"traced by process {process.pid} \(python") as failure:
                METHOD.hand_over(TargetImage(target.pid), target.bootstrap(), Deadline(SECONDS))
            assert process.stdin is not None
            process.stdin.close()
        assert failure.value.code is AttachCode.TRACED
        METHOD.hand_over(TargetImage(target.pid), target.bootstrap(), Deadline(SECONDS))
        target.until_marked()
        target.finish()


@pytest.mark.slow
def test_a_full_queue_is_an_error_and_the_target_goes_on(tmp_path: Path) -> None:
    read = "ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)"  # with the GIL
    script = f"import ctypes\nprint('up', flush=True)\n{read}\nprint('woke')"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        image = TargetImage(process.pid)
        assert image.python is not None
        with pytest.raises(AttachError, match="queue of pending calls") as failure:
            for _time in range(400):  # 32 places before 3.13, 300 since
                image.refresh()
                METHOD.hand_over(image, _bootstrap(), Deadline(SECONDS))
        assert failure.value.code is AttachCode.FAILED
        process.stdin.write(b"x")
        process.stdin.close()
        assert process.stdout.read() == b"woke\n"
    assert process.returncode == 0


def test_a_process_that_ends_meanwhile_is_gone(tmp_path: Path) -> None:
    with engine_target(tmp_path) as target:
        image = TargetImage(target.pid)
        target.end()
        with pytest.raises(AttachError) as failure:
            METHOD.hand_over(image, target.bootstrap(), Deadline(SECONDS))
        assert failure.value.code is AttachCode.GONE


def _bootstrap() -> Bootstrap:
    return Bootstrap(1, b"pass\n")


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


INTERRUPTED = """
import atexit, os, sys, time
@atexit.register
def wait():
    while not os.path.getsize(sys.argv[1]): time.sleep(0.001)
print("up", flush=True)
time.sleep(3600)
"""


@pytest.mark.parametrize("executable", other_versions_slow(pythons()), ids=version_of)
def test_a_program_that_ends_by_an_interrupt_beside_an_attach_dies_of_it(tmp_path: Path, executable: str) -> None:
    mark = tmp_path / "mark"
    mark.touch()
    source = f"p = modules['posix']; p.write(p.open({str(mark)!r}, p.O_WRONLY), b'x')"
    command = [executable, "-c", INTERRUPTED, str(mark)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"up\n"
        call = Path(f"/proc/{program.pid}/syscall")
        until(lambda: _state(program.pid) == "S", "its main thread is asleep")
        asleep = call.read_text()
        image = TargetImage(program.pid)
        PendingCall().hand_over(image, Bootstrap(time.time_ns(), source.encode()), Deadline(SECONDS))
        until(lambda: call.read_text() == asleep, "its main thread is asleep again")
        program.send_signal(signal.SIGINT)  # only now its main thread runs the call
        assert program.wait(SECONDS * 3) == -signal.SIGINT
