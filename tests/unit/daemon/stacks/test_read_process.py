"""The process that reads: its answers, and what it may do while it reads."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from kinetod.stacks import read_process
from kinetod.stacks.read_process import find_main, joined, settled
from kinetod.stacks.thread_facts import BlockingCall, ThreadFacts, ThreadTable
from kinetod.stacks.thread_stacks import NO_SUCH_PROCESS, StackFrame, StackReading, ThreadStack, decode
from support.service.calls_as import plain_python
from support.service.daemon import IMPORT_PATH
from support.waiting import scaled

ADA, BOB = 61001, 61002
COMMAND = (sys.executable, "-P", "-m", "kinetod.stacks.read_process")
WAITS = "import sys; print('up', flush=True); sys.stdin.read()"
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
# Becomes what the real one is while it reads, and then tries what it must not be able to do.
TRIES = """
import ctypes, json, os, socket, sys
from kinetod.stacks.python_frames import NoFrames, open_spy, read_frames
from kinetod.stacks.read_process import confine
pid, uid, other = map(int, sys.argv[1:])
spy = open_spy()
confine(pid, uid)
libc = ctypes.CDLL(None, use_errno=True)
def may(call):
    try:
        return bool(call())
    except (OSError, NoFrames):
        return False
print(json.dumps({
    "user": os.geteuid(),
    "target": may(lambda: read_frames(pid, spy, pid)),
    "other": may(lambda: read_frames(other, spy, other)),
    "memory": may(lambda: open(f"/proc/{other}/mem", "rb")),
    "trace": libc.ptrace(16, pid, 0, 0) == 0,
    "connect": may(lambda: socket.socket(socket.AF_UNIX)) or may(lambda: socket.socket(socket.AF_INET)),
    "signal": may(lambda: os.kill(other, 0) is None),
    "root": may(lambda: os.setresuid(0, 0, 0) is None and open("/etc/shadow")),
    "shadow": may(lambda: open("/etc/shadow")),
    "write": may(lambda: open("/etc/kineto-written", "wb")),
}), flush=True)
sys.stdin.read()
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
    assert found.reason == "it is not running Python"
    assert found.threads[0].waits == "sleeps"


def test_it_ends_itself_at_its_deadline() -> None:
    assert asked(os.getpid(), 0.001).returncode < 0


@contextmanager
def confined(target: int, other: int) -> Iterator["subprocess.Popen[str]"]:
    """A process that has tried it."""
    with subprocess.Popen(
        [sys.executable, "-c", TRIES, *map(str, (target, ADA, other))],
        env={**os.environ, "PYTHONPATH": IMPORT_PATH},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


@root_only
def test_while_it_reads_it_may_read_that_process_and_do_nothing_else() -> None:
    with (
        waiting(*plain_python(ADA)) as target,
        waiting(*plain_python(BOB)) as other,
        confined(target, other) as process,
    ):
        assert process.stdout is not None
        tried = json.loads(process.stdout.readline())
    denied = ("other", "memory", "trace", "connect", "signal", "root", "shadow", "write")
    assert tried == {"user": ADA, "target": True, **dict.fromkeys(denied, False)}


@root_only
def test_whom_it_reads_for_cannot_look_into_it() -> None:
    with waiting(*plain_python(ADA)) as target, confined(target, target) as process:
        assert process.stdout is not None
        process.stdout.readline()
        look = [*plain_python(ADA), "-c", f"open('/proc/{process.pid}/mem', 'rb')"]
        done = subprocess.run(look, capture_output=True, text=True, check=False)
        assert "PermissionError" in done.stderr


@root_only
def test_the_program_that_reads_for_it_is_that_user_and_may_read_all_the_same() -> None:
    status = "import subprocess; print(subprocess.check_output(['cat', '/proc/self/status'], text=True))"
    code = f"import sys; from kinetod.stacks.read_process import confine; confine(1, {ADA}); {status}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": IMPORT_PATH},
        check=True,
    )  # fmt: skip
    found = dict(line.split(":\t", 1) for line in done.stdout.splitlines() if ":\t" in line)
    assert found["Uid"].split() == [str(ADA)] * 4
    assert [int(found[name], 16) for name in ("CapEff", "CapPrm", "CapAmb")] == [1 << 19] * 3


def test_threads_of_the_interpreter_are_found_by_the_numbers_that_the_process_sees() -> None:
    threads = [ThreadFacts(thread=4242, inner=1, name="python", state="RUNNING")]
    call = BlockingCall("futex", (0, 0, 0, 9))
    threads.append(ThreadFacts(thread=4243, inner=2, name="w", state="SLEEPING", call=call, wakes_per_s=200.0))
    frame = StackFrame(function="spin", file="/app/a.py", line=3, own=True)
    python = [
        SimpleNamespace(thread=1, name="MainThread", holds_gil=True, frames=[frame], left_out=0),
        SimpleNamespace(thread=2, name="", holds_gil=False, frames=[frame], left_out=5),
    ]
    found = joined(ThreadTable(pid=4242, threads=threads), python)  # type: ignore[arg-type]
    assert [each.holds_gil for each in found.threads] == [True, False]
    assert found.threads[1].waits == "waits for the GIL, which thread 4242 (python) holds at a.py:3"
    assert found.threads[1].left_out == 5


@pytest.mark.parametrize(
    ("numbers", "found"),
    [
        ((3, 8), (7, 8)),  # 3 is its parent's
        ((0,), (7,)),
        ((3, 4), (3, 4)),  # one of them may be the main thread
        ((7, 3), (7, 3)),
        ((8, 9), (8, 9)),  # 9 has just begun
    ],
)
def test_the_main_thread_is_the_one_whose_number_is_no_other_threads(
    numbers: tuple[int, ...], found: tuple[int, ...]
) -> None:
    before, after = (
        ThreadTable(pid=7, threads=[replace(BEFORE, thread=each, inner=each) for each in known])
        for known in ((7, 8), (7, 8, 9))
    )
    python = [SimpleNamespace(thread=each) for each in numbers]
    find_main(python, before, after)  # type: ignore[arg-type]
    assert tuple(each.thread for each in python) == found


BEFORE = ThreadFacts(thread=7, inner=7, name="python", state="SLEEPING", call=BlockingCall("futex", (1, 2, 3, 4)))


@pytest.mark.parametrize(
    ("changes", "state", "wakes_per_s"),
    [
        ({}, "SLEEPING", 0.0),
        ({"switches": 1}, "RUNNING", 0.0),  # it has woken and waits again
        ({"state": "RUNNING"}, "RUNNING", 0.0),
        ({"call": BlockingCall("futex", (1, 2, 3, 5))}, "RUNNING", 0.0),
        ({"call": None}, "RUNNING", 0.0),
        ({"switches": 10}, "SLEEPING", 200.0),  # every 5 ms: the GIL's waiters do
    ],
)
def test_a_thread_that_has_moved_between_two_looks_runs(
    changes: dict[str, Any], state: str, wakes_per_s: float
) -> None:
    table = ThreadTable(pid=7, threads=[BEFORE])
    (found,) = settled(table, ThreadTable(pid=7, threads=[replace(BEFORE, **changes)]), 0.05).threads
    assert (found.state, found.wakes_per_s) == (state, wakes_per_s)
    assert (found.call is None) == (state == "RUNNING")


@pytest.mark.parametrize("first", [True, False])
def test_a_thread_that_wakes_every_5_ms_and_waits_for_a_processor_in_between_is_known_by_its_call(first: bool) -> None:
    delayed = replace(BEFORE, switches=10, delayed_ns=450_000_000)
    before, after = BEFORE, delayed
    if first:
        before = replace(before, state="RUNNING", call=None)
    else:
        after = replace(after, state="RUNNING", call=None)
    (found,) = settled(ThreadTable(pid=7, threads=[before]), ThreadTable(pid=7, threads=[after]), 0.5).threads
    assert (found.state, found.call, round(found.wakes_per_s)) == ("RUNNING", BEFORE.call, 200)


def test_a_thread_that_sleeps_at_both_looks_sleeps_even_if_it_woke_in_between() -> None:
    before = replace(BEFORE, call=BlockingCall("clock_nanosleep", (0, 0)))
    after = replace(before, switches=before.switches + 1)
    assert settled(ThreadTable(pid=7, threads=[before]), ThreadTable(pid=7, threads=[after]), 0.05).threads == [before]


def test_a_thread_that_is_gone_by_the_second_look_has_ended() -> None:
    (found,) = settled(ThreadTable(pid=7, threads=[BEFORE]), ThreadTable(pid=7), 0.05).threads
    assert found.state == "ENDED"


def test_an_answer_that_is_too_long_leaves_frames_out(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr(read_process, "MAX_ANSWER_BYTES", 4000)
    frames = [StackFrame(function=f"f{number}", file="é" * 50, line=1) for number in range(100)]
    threads = [ThreadStack(thread=n, name="w", state="SLEEPING", cpu_ns=0, frames=list(frames)) for n in range(4)]
    read_process._tell(StackReading(threads=threads))
    line = capfd.readouterr().out
    assert len(line.encode()) <= 4001
    for thread in decode(line.encode()).threads:
        assert 0 < len(thread.frames) < 100
        assert len(thread.frames) + thread.left_out == 100
        assert thread.frames[0].function == "f0"
