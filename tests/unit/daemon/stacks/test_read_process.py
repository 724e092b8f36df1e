"""The process that reads: its answers, and what it may do while it reads."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from kinetod.stacks.read_process import NO_SUCH_PROCESS, joined
from kinetod.stacks.thread_facts import BlockingCall, ThreadFacts, ThreadTable
from kinetod.stacks.thread_stacks import StackFrame, decode
from support.service.calls_as import plain_python
from support.service.daemon import IMPORT_PATH
from support.waiting import scaled

ADA = 61001
COMMAND = (sys.executable, "-P", "-m", "kinetod.stacks.read_process")
WAITS = "import sys; print('up', flush=True); sys.stdin.read()"
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
# Reads like the real one, and then tries what it must not be able to do.
TRIES = """
import ctypes, json, os, socket, subprocess, sys
import pystack.engine, pystack.errors
from kinetod.stacks.read_process import confine
pid, uid, other = map(int, sys.argv[1:])
confine(pid, uid)
libc = ctypes.CDLL(None, use_errno=True)
def reads(pid):
    try:
        return bool(pystack.engine.get_process_threads(pid, stop_process=False))
    except Exception:
        return False
def may(call):
    try:
        call()
    except OSError:
        return False
    return True
print(json.dumps({
    "user": os.geteuid(),
    "target": reads(pid),
    "other": reads(other),
    "trace": libc.ptrace(16, pid, 0, 0) == 0,
    "connect": may(lambda: socket.socket(socket.AF_UNIX)),
    "start": may(lambda: subprocess.run(["true"])),
    "signal": may(lambda: os.kill(other, 0)),
    "shadow": may(lambda: open("/etc/shadow")),
}))
"""


@contextmanager
def waiting(*python: str) -> Iterator[int]:
    """The pid of a program that runs."""
    with subprocess.Popen(
        [*python, "-S", "-c", WAITS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process.pid
        process.kill()


def asked(pid: int, deadline_s: float = 60.0) -> subprocess.CompletedProcess[bytes]:
    question = json.dumps({"pid": pid, "uid": os.geteuid(), "deadline_s": deadline_s}).encode()
    environ = {**os.environ, "PYTHONPATH": IMPORT_PATH}
    return subprocess.run(COMMAND, input=question, capture_output=True, env=environ, timeout=scaled(60), check=False)


def test_each_line_of_the_answer_is_whole_and_says_more_than_the_one_before() -> None:
    with waiting(sys.executable) as target:
        kernel, frames, code = map(decode, asked(target).stdout.splitlines())
    assert kernel.reason == "its Python frames could not be read in time"
    assert kernel.threads[0].system_call == "read"
    assert not kernel.threads[0].frames
    assert [frame.function for frame in frames.threads[0].frames] == ["<module>"]
    assert not frames.reason
    assert code.threads[0].frames == frames.threads[0].frames  # the program is no file


def test_a_process_that_does_not_exist_is_the_exit_status() -> None:
    done = asked(2**22)
    assert (done.returncode, done.stdout) == (NO_SUCH_PROCESS, b"")


def test_of_a_process_without_python_the_kernel_tells_and_the_reason_says_so() -> None:
    with subprocess.Popen(["sleep", "100"]) as process:
        found = decode(asked(process.pid).stdout.splitlines()[-1])
        process.kill()
    assert found.reason == "it does not run Python"
    assert found.threads[0].waits == "sleeps"


def test_it_ends_itself_at_its_deadline() -> None:
    assert asked(os.getpid(), 0.001).returncode < 0


@root_only
def test_while_it_reads_it_may_read_that_process_and_do_nothing_else() -> None:
    with waiting(*plain_python(ADA)) as target, waiting(*plain_python(ADA)) as other:
        command = [sys.executable, "-c", TRIES, *map(str, (target, ADA, other))]
        environ = {**os.environ, "PYTHONPATH": IMPORT_PATH}
        done = subprocess.run(command, capture_output=True, env=environ, text=True, check=True, timeout=scaled(60))
    assert json.loads(done.stdout) == {
        "user": ADA,
        "target": True,
        **dict.fromkeys(("other", "trace", "connect", "start", "signal", "shadow"), False),
    }


def test_threads_of_the_interpreter_are_found_by_the_numbers_that_the_process_sees() -> None:
    threads = [ThreadFacts(thread=4242, inner=1, name="python", state="RUNNING")]
    threads.append(
        ThreadFacts(thread=4243, inner=2, name="w", state="SLEEPING", call=BlockingCall("futex", (0, 0, 0, 9)))
    )
    frame = StackFrame(function="spin", file="/app/a.py", line=3, own=True)
    python = [
        SimpleNamespace(thread=1, holds_gil=True, frames=[frame], left_out=0),
        SimpleNamespace(thread=2, holds_gil=False, frames=[frame], left_out=5),
    ]
    found = joined(ThreadTable(pid=4242, threads=threads), python, {4243: 5})  # type: ignore[arg-type]
    assert [each.holds_gil for each in found.threads] == [True, False]
    assert found.threads[1].waits == "waits for the GIL, which thread 4242 (python) holds at a.py:3"
    assert found.threads[1].left_out == 5


def test_the_code_of_a_program_in_a_file_is_the_last_line_of_the_answer(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys\nprint('up', flush=True)\nsys.stdin.read()\n")
    os.utime(program, (0, 0))
    with subprocess.Popen(
        [sys.executable, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        found = decode(asked(process.pid).stdout.splitlines()[-1])
        process.kill()
    assert [frame.code for frame in found.threads[0].frames] == ["sys.stdin.read()"]
