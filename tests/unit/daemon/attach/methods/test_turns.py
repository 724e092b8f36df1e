"""Turns with the GIL: the program gives it away for a thread of ours that waits for it, and for no other reason."""

import struct
import subprocess
import time
from pathlib import Path

import pytest
from kinetod.attach.attach_types import Bootstrap, Deadline
from kinetod.attach.inspect.target_image import TargetImage
from kinetod.attach.methods.pending_call import PendingCall
from kinetod.attach.methods.python_entry import TURNS_OFFSET, Handed
from kinetod.attach.methods.turns_code import CODE
from support.targets.engine_target import EngineTarget, engine_target, needs_ptrace, pythons, version_of
from support.targets.python_versions import other_versions_slow
from support.waiting import scaled, until

pytestmark = needs_ptrace
every_python = pytest.mark.parametrize("executable", other_versions_slow(pythons()), ids=version_of)
# It does not rest, and gets nowhere.
_WAITS = "lock = modules['_thread'].allocate_lock()\nlock.acquire()\nlock.acquire(timeout=30)\n"
_FOR_EVER = struct.pack("<i", -1)
_QUEUED_OFFSET = 16  # struct python_turns: rest, over, queueing, handed, queued


# Its interpreter ends with threads that want the GIL, a moment after its standard input. In CPython 3.10.13, a thread
# that still waits then reads the interpreter's freed memory (take_gil, RESET_GIL_DROP_REQUEST): 1 in 100 ended with
# SIGSEGV on a loaded machine, as many without us. There, the threads end before the interpreter is freed.
_ENDING = """
import os, sys, threading, time
def spin():
    while True: sum(range(1000))
threads = [threading.Thread(target=spin, daemon=True) for _ in range(3)]
for thread in threads: thread.start()
told = []
threading.Thread(target=lambda: told.append(sys.stdin.read()), daemon=True).start()
class Last:
    def __init__(self): self.paths = ["/proc/self/task/%d" % thread.native_id for thread in threads]
    def __del__(self, there=os.access):
        while any([there(path, 0) for path in self.paths]): pass
if sys.version_info[:2] == (3, 10): sys.modules["last"] = Last()  # goes while the interpreter ends
print("up", flush=True)
while not told: pass
end = time.monotonic() + 0.3
while time.monotonic() < end: pass
"""
_ENDS = 2  # for each Python; one in two hung on 3.13 and 3.14 when any thread might give the GIL away


def begin(pid: int, source: str) -> Handed:
    """Hands it over to a thread of its own."""
    method = PendingCall()
    method.hand_over(TargetImage(pid), Bootstrap(time.time_ns(), source.encode()), Deadline(10))
    assert method.handed is not None
    return method.handed


def tasks(target: EngineTarget) -> list[Path]:
    return list(Path(f"/proc/{target.pid}/task").iterdir())


def name(task: Path) -> str:
    try:
        return (task / "comm").read_text().strip()
    except OSError:  # it has ended
        return ""


def caring(target: EngineTarget) -> Path:
    """The thread that looks after ours."""
    (task,) = (task for task in tasks(target) if name(task) == "kineto-turns")
    return task


def sleeps_for_ever(target: EngineTarget) -> bool:
    """Whether that thread is in a futex(2) whose fourth argument, the time limit, is none."""
    return (caring(target) / "syscall").read_text().split()[4:5] == ["0x0"]


def switches(target: EngineTarget, after_s: float = 0.0) -> str:
    """How often that thread has slept. after_s: time in which it may sleep again, which is what is tested."""
    time.sleep(after_s)
    task = caring(target)
    (line,) = (line for line in (task / "status").read_text().splitlines() if line.startswith("voluntary"))
    return line


@every_python
def test_a_thread_of_ours_that_gets_nowhere_is_given_the_gil(tmp_path: Path, executable: str) -> None:
    with engine_target(tmp_path, "malloc", executable) as target:
        handed = begin(target.pid, _WAITS)
        until(lambda: handed.turns_given() > 3, "it is given away")
        assert "kineto-turns" in map(name, tasks(target))
        target.finish()  # in the middle of it: the interpreter ends as ever


@pytest.mark.slow
@every_python
def test_an_interpreter_with_threads_ends_in_the_middle_of_it(executable: str) -> None:
    for _ in range(_ENDS):
        command = [executable, "-c", _ENDING]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
            try:
                assert program.stdin is not None and program.stdout is not None
                program.stdout.readline()
                begin(program.pid, _WAITS)
                program.stdin.close()
                assert program.wait(timeout=scaled(30)) == 0
            finally:
                program.kill()


def test_a_thread_of_ours_that_rests_is_given_nothing(tmp_path: Path) -> None:
    with engine_target(tmp_path, "malloc") as target:
        handed = begin(target.pid, _WAITS)
        until(lambda: handed.turns_given() > 3, "it is given away")
        handed.target.memory.write(handed.address + TURNS_OFFSET, _FOR_EVER)
        until(lambda: sleeps_for_ever(target), "the thread that looks after it sleeps")
        queued = handed.address + TURNS_OFFSET + _QUEUED_OFFSET
        until(lambda: handed.target.memory.u32(queued) == 0, "the last call has come")
        # It has looked at that call once more before it sleeps for good.
        until(lambda: switches(target) == switches(target, after_s=0.2), "it does not wake any more")
        given = handed.turns_given()
        assert switches(target) == switches(target, after_s=0.2)
        assert handed.turns_given() == given
        target.finish()


def test_the_thread_ends_with_the_one_it_looks_after(tmp_path: Path) -> None:
    with engine_target(tmp_path, "malloc") as target:
        begin(
            target.pid, f"posix = modules['posix']\nposix.write(posix.open({str(target.mark)!r}, posix.O_WRONLY), b'x')"
        )
        target.until_marked()
        until(lambda: "kineto-turns" not in map(name, tasks(target)), "it has ended")
        target.finish()


@pytest.mark.parametrize("code", CODE.values(), ids=len)
def test_the_code_fits_into_what_many_libraries_leave_free(code: bytes) -> None:
    assert code[-1] != 0  # zeros would look unused
    assert len(code) <= 1200
