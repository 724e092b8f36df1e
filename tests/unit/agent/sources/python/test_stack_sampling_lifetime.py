"""The stack sampler leaves the program alone: its objects, its children, its end, its other interpreters."""

import gc
import os
import signal
import sys
import weakref
from pathlib import Path
from typing import Iterator, List

import pytest
from kineto_agent.sources.interface import SourceRequest, SourceSession
from kineto_agent.sources.python.stack_sampling import PythonStacksSource
from support.agent.python_child import environment, run_python
from support.waiting import until

TESTS = Path(__file__).resolve().parents[4]
START = """
import os, signal, sys, threading, time
from support.agent.stack_recorder import Recorder, of_thread, plain
recorder = Recorder(stack_sample_hz=1000)
recorder.wait(2)
"""


def run(program: str, executable: str = sys.executable) -> "tuple[int, str, str]":
    """Status, output and errors of a program that is sampled 1000 times a second."""
    env = environment()
    env["PYTHONPATH"] += ":" + str(TESTS)
    done = run_python(["-W", "ignore", "-c", START + program], env, executable)
    return done.returncode, done.stdout, done.stderr


class Tensor:
    """Something whose end can be seen."""


@pytest.fixture
def session() -> Iterator[SourceSession]:
    request = SourceRequest(frozenset(["python_function"]), 1 << 20, {"stack_sample_hz": 1000})
    made = PythonStacksSource().prepare(request)
    yield made
    made.close()


def wait_for_samples(session: SourceSession) -> None:
    until(lambda: session.counts().records, "samples are taken")


def use_a_tensor(session: SourceSession, seen: List["weakref.ref[Tensor]"]) -> None:
    tensor = Tensor()
    seen.append(weakref.ref(tensor))
    wait_for_samples(session)


def test_locals_of_a_sampled_function_end_with_it(session: SourceSession) -> None:
    seen: List[weakref.ref[Tensor]] = []
    collected = gc.isenabled()
    session.start()
    use_a_tensor(session, seen)
    session.stop()
    assert seen[0]() is None
    assert gc.isenabled() == collected


def test_a_free_threaded_interpreter_offers_no_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys._is_gil_enabled", lambda: False, raising=False)
    assert PythonStacksSource().activity_types() == []
    monkeypatch.setattr("sys._is_gil_enabled", lambda: True, raising=False)
    assert PythonStacksSource().activity_types() == ["python_function"]


def test_forks_while_it_samples_are_survived_and_the_child_has_nothing_of_it() -> None:
    program = """
for _ in range(100):
    pid = os.fork()
    if pid == 0:
        maps = open("/proc/self/maps").read()
        files = [os.readlink("/proc/self/fd/" + name) for name in os.listdir("/proc/self/fd") if int(name) > 2
                 and os.path.exists("/proc/self/fd/" + name)]
        threads = len(os.listdir("/proc/self/task"))
        arenas = sum("kineto-arena" in name for name in files)  # the one of the reader
        os._exit(3 if maps.count("kineto-arena") > 1 or arenas > 1 or threads != 1 else 0)
    assert os.waitpid(pid, 0)[1] == 0
recorder.stop()
"""
    assert run(program) == (0, "", "")


def test_a_forked_child_can_be_recorded_itself() -> None:
    program = """
pid = os.fork()
if pid == 0:
    own = Recorder(stack_sample_hz=1000)
    own.wait(5)
    os._exit(0 if of_thread(own.stop(), os.getpid()) else 1)
assert os.waitpid(pid, 0)[1] == 0
recorder.stop()
"""
    assert run(program) == (0, "", "")


def test_a_forked_child_keeps_a_file_of_its_own_under_the_number_of_the_arena() -> None:
    program = """
reader, writer = os.pipe()
os.dup2(writer, recorder.session.arena_fd)  # as a program that closes all and opens its own
pid = os.fork()
if pid == 0:
    os._exit(0 if os.fstat(recorder.session.arena_fd) == os.fstat(writer) else 1)
assert os.waitpid(pid, 0)[1] == 0
recorder.stop()
"""
    assert run(program) == (0, "", "")


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the filter names a system call by its number")
def test_where_memory_is_read_through_a_file_its_number_may_become_the_programs() -> None:
    program = """
import ctypes, struct
from kineto_agent.sources.python import sampler_binding
def filtered(number):  # that system call is refused: EPERM
    code = b"".join(struct.pack("=HBBI", *step) for step in (
        (0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)))
    text = ctypes.create_string_buffer(code)
    program = struct.pack("=H6xQ", 4, ctypes.addressof(text))
    prctl = ctypes.CDLL(None).prctl
    assert prctl(38, 1, 0, 0, 0) == 0 and prctl(22, 2, program, 0, 0) == 0
recorder.stop()
filtered(310)  # process_vm_readv
sampler_binding.checked()
numbers = [int(name) for name in os.listdir("/proc/self/fd")]
number, = [number for number in numbers if number > 2 and os.path.exists("/proc/self/fd/%d" % number)
           and os.readlink("/proc/self/fd/%d" % number).endswith("/mem")]
reader, writer = os.pipe()
os.dup2(writer, number)
sampler_binding.checked()
assert os.fstat(number) == os.fstat(writer)
if os.fork() == 0:
    os._exit(0 if os.fstat(number) == os.fstat(writer) else 1)
assert os.wait()[1] == 0
"""
    assert run(program) == (0, "", "")


@pytest.mark.parametrize(
    ("end", "status"),
    [("", 0), ("sys.exit(3)", 3), ("os._exit(4)", 4), ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM)],
)
def test_a_program_that_ends_while_it_is_sampled_ends_as_without(end: str, status: int) -> None:
    threads = "[threading.Thread(target=time.sleep, args=(9,), daemon=True).start() for _ in range(4)]\n"
    assert run(threads + end) == (status, "", "")


def test_what_was_published_outlives_a_killed_program() -> None:
    program = """
import fcntl
arena = fcntl.fcntl(recorder.session.arena_fd, fcntl.F_DUPFD, 100)  # a fork closes the number that it had first
pid = os.getpid()
if os.fork() == 0:
    from support.agent.agent_daemon import ArenaReader
    while os.getppid() == pid:  # nothing announces to a child that its parent was killed
        time.sleep(0.01)
    os.write(1, b"many" if len(ArenaReader(arena).samples()) > 50 else b"few")
    os._exit(0)
while recorder.session.counts().records <= 50:
    pass
os.kill(pid, signal.SIGKILL)
"""
    status, output, _ = run(program)
    assert (status, output) == (-signal.SIGKILL, "many")


def test_an_exec_while_it_samples_is_survived() -> None:
    assert run('os.execv(sys.executable, [sys.executable, "-c", "print(5)"])') == (0, "5\n", "")


INTERPRETERS = """
try:
    import _interpreters as interpreters
    run = interpreters.exec
except ImportError:
    import _xxsubinterpreters as interpreters
    run = interpreters.run_string
BODY = '''
import time
def inside():
    end = time.thread_time() + 0.02
    while time.thread_time() < end: pass
for _ in range(20): inside()  # however long the others keep it from running
'''
tids = []
def work():
    tids.append(threading.get_native_id())
    own = interpreters.create()
    run(own, BODY)
    interpreters.destroy(own)
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
samples = recorder.stop()
for tid in tids:
    assert sum("inside" in sample.stack for sample in of_thread(samples, tid)) > 10
both = [sample.time_ns for sample in samples if sample.holds_gil]
together = len(both) - len(set(both))  # a few also where the one GIL changes hands between two looks
print("at once" if together > 0.2 * len(set(both)) else "in turn")
"""


@pytest.mark.slow
def test_subinterpreters_are_sampled_and_survive_also_with_a_gil_of_their_own() -> None:
    expected = "at once\n" if sys.version_info >= (3, 12) else "in turn\n"
    assert run(INTERPRETERS) == (0, expected, "")


def test_nothing_asks_for_the_frames_of_all_threads() -> None:
    """sys._current_frames() crashes CPython 3.12 and 3.13 with own-GIL subinterpreters."""
    sources = (TESTS.parent / "agent" / "kineto_agent").rglob("*.py")
    calling = [
        path.name
        for path in sources
        if "sys._current_frames()." in path.read_text() or "= sys._current_frames" in path.read_text()
    ]
    assert calling == []
