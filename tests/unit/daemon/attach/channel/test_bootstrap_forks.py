"""Programs that fork while a live attach goes on, and afterwards, under every Python of this machine."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from kineto_agent.protocol import wire
from kinetod.attach.attach_types import Deadline
from kinetod.attach.channel import bootstrap, payload
from kinetod.attach.inspect.target_image import TargetImage
from kinetod.attach.methods import python_entry
from kinetod.attach.methods.native_thread import NativeThread
from kinetod.attach.methods.pending_call import PendingCall
from kinetod.attach_helper.attempt import bring_in
from support.agent.agent_daemon import Connection
from support.machine.descriptors import open_files
from support.targets.engine_target import needs_ptrace
from support.targets.live_target import LiveTarget, Start
from support.waiting import scaled, until

FORK = "pid = os.fork()\nwhile pid == 0: import signal; signal.pause()"


@pytest.fixture
def forked(target: LiveTarget) -> Iterator[Callable[[], int]]:
    children: list[int] = []

    def fork() -> int:
        target.do(FORK)
        children.append(target.ask("pid"))
        return children[-1]

    yield fork
    for child in children:
        os.kill(child, signal.SIGKILL)


def open_in(pid: int) -> set[str]:
    return {name for name in open_files(pid).values() if not name.startswith("/proc/")}  # a thread had just opened it


@pytest.mark.every_python
def test_a_forked_child_has_nothing_of_the_agent(target: LiveTarget, forked: Callable[[], int]) -> None:
    before = open_in(target.pid)
    connection, _hello = target.welcome()
    connection.collect()
    child = forked()
    until(lambda: open_in(child) == before, "the child has closed the agent's descriptors")
    os.kill(target.pid, signal.SIGKILL)
    connection.expect_end()  # although the child lives


def test_a_fork_before_the_agent_has_come_keeps_no_channel(target: LiveTarget, forked: Callable[[], int]) -> None:
    before = open_in(target.pid)
    boot = bootstrap.make(time.time_ns())
    target.run(boot)
    target.channel(boot)
    child = forked()
    until(lambda: open_in(child) == before, "the child has closed the channel")


FORKS_AT_EACH_TURN = """
import os, posix
stat, parent, kept, forks = posix.stat, os.getpid(), [], []
def forking(path, *more, **named):
    if path == "/" and os.getpid() == parent and not forks:  # the filter of the fork's warning comes here, too
        forks.append(path)
        child = os.fork()
        if not child:
            links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
            os._exit(any("kineto-" in os.readlink(link) for link in links if os.path.islink(link)))
        kept.append(os.waitpid(child, 0)[1])
        forks.clear()
    return stat(path, *more, **named)
posix.stat = forking
"""


def test_a_fork_while_the_agent_gives_the_gil_away_keeps_nothing_of_it(target: LiveTarget) -> None:
    target.do(FORKS_AT_EACH_TURN)
    connection, _hello = target.welcome()
    assert set(target.ask("kept")) == {0}
    connection.close()


FORK_AND_LOOK = (  # the child's status says whether it finds the filters changed
    "before = list(warnings.filters)\nchild = os.fork()\nif not child: os._exit(warnings.filters != before)\n"
    "result = os.waitpid(child, 0)[1], warnings.filters == before"
)


@pytest.mark.every_python
def test_a_program_of_one_thread_that_forks_is_not_warned_of_ours(start: Start) -> None:
    target = start("-W", "always")
    target.do("import os, sys, warnings")
    for _ in range(2):  # the second ends the first, which must not take the filter along
        connection, _hello = target.welcome()
        connection.collect()
        target.do(FORK_AND_LOOK)
        assert target.ask("result") == [0, True]
    connection.close()
    assert target.end() == (0, "")


FORKS = """
import os, select, sys, warnings
before = list(warnings.filters)
print("forks", flush=True)
while not select.select([sys.stdin], [], [], 0.0005)[0]:
    child = os.fork()
    if not child: os._exit(0)
    os.waitpid(child, 0)
print("has forked", flush=True)
assert [sys.stdin.readline() for _ in range(2)] == ["\\n", ""]
assert warnings.filters == before
"""


@pytest.mark.every_python
@needs_ptrace
def test_a_program_of_one_thread_that_forks_all_the_time_is_not_warned_of_ours(start: Start) -> None:
    for _ in range(2):
        target = start("-W", "always", program=FORKS)
        stdin, stdout = target.process.stdin, target.process.stdout
        assert stdin is not None and stdout is not None
        assert stdout.readline() == "forks\n"
        boot = bootstrap.make(time.time_ns())
        payload.agent()
        taken = bring_in(TargetImage(target.pid), [PendingCall(), NativeThread()], boot, Deadline(scaled(30)))
        with closing(Connection(taken.channel)) as connection:
            payload.send(taken.channel, target.pid, Deadline(scaled(30)))
            taken.channel.settimeout(scaled(30))
            connection.expect(wire.Hello)
            stdin.write("\n")
            stdin.flush()
            stdout.readline()
        target.until_alone()
        assert target.end() == (0, "")


@pytest.mark.every_python
def test_what_forks_warn_of_is_decided_before_the_attach_has_threads_of_its_own(target: LiveTarget) -> None:
    image = TargetImage(target.pid)
    warned = python_entry.would_be_warned(image)
    target.do("import _thread; lock = _thread.allocate_lock(); lock.acquire()")
    target.do("_thread.start_new_thread(lock.acquire, ())")
    assert python_entry.would_be_warned(image) == warned == target.ask("sys.version_info >= (3, 12)")


LOOKS_AT_THE_END = """
import os, sys, warnings
before = list(warnings.filters)
print("works", flush=True)
while not os.path.exists(sys.argv[1]): pass
assert warnings.filters == before
"""


@pytest.mark.every_python
@needs_ptrace
def test_a_thread_that_is_cancelled_before_it_begins_leaves_no_filters(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = python_entry.codes()[: python_entry.CODES_NEEDED]
    monkeypatch.setattr(python_entry, "codes", lambda: codes)
    # Its first step waits for a byte, so that it comes late.
    monkeypatch.setattr(python_entry, "_THREADS", ("pthread_create", "getchar", "toupper"))
    target = start("-W", "always", program=LOOKS_AT_THE_END.replace("sys.argv[1]", repr(str(tmp_path / "end"))))
    stdin, stdout = target.process.stdin, target.process.stdout
    assert stdin is not None and stdout is not None
    assert stdout.readline() == "works\n"
    method = PendingCall()
    method.hand_over(TargetImage(target.pid), bootstrap.make(time.time_ns()), Deadline(scaled(30)))
    until(lambda: target.threads() == 2, "the pending call has made its thread")
    method.finish()
    stdin.write("x")
    stdin.flush()
    target.until_alone()
    (tmp_path / "end").touch()
    assert target.end() == (0, "")


@pytest.mark.every_python
def test_a_program_of_two_threads_that_forks_is_warned_as_ever(start: Start) -> None:
    target = start("-W", "always")
    target.do("import os, sys, warnings, _thread")
    target.do("lock = _thread.allocate_lock(); lock.acquire(); _thread.start_new_thread(lock.acquire, ())")
    connection, _hello = target.welcome()
    target.do(FORK_AND_LOOK)
    connection.close()
    until(lambda: target.threads() == 2, "the agent has left")
    assert target.ask("warnings.filters == before")
    warns = target.ask("sys.version_info >= (3, 12)")
    status, said = target.end()
    assert (status, said.count("is multi-threaded")) == (0, int(warns))


FORKS_AT_EACH_INSTRUCTION = """
import contextlib, ctypes, os, socket, sys
begun, sent, forks, kept = [], [], 0, []
def send(channel):
    library = os.memfd_create("kineto-library")
    with socket.socket(fileno=os.dup(channel)) as ours:
        socket.send_fds(ours, [b"def load(*given): raise SystemExit"], [library, 1])
    os.close(library)
def ours():
    for number in os.listdir("/proc/self/fd"):
        if os.path.islink("/proc/self/fd/" + number):
            name = os.readlink("/proc/self/fd/" + number)
            if name.startswith("socket:") or "kineto-library" in name: yield name
def step(frame, event, argument):
    global forks
    frame.f_trace_opcodes = True
    if frame.f_code.co_name == "new": begun.append(frame)
    if begun and event == "opcode":
        forks += 1
        child = os.fork()
        if not child: os._exit(any(ours()))
        if os.waitpid(child, 0)[1]: kept.append((frame.f_code.co_name, frame.f_lineno))
    if "a" in frame.f_locals and "v" in frame.f_locals and not sent:
        sent.append(send(frame.f_locals["v"].x))
    return step
syscall = ctypes.cast(ctypes.CDLL(None).syscall, ctypes.c_void_p).value
given = dict(modules=sys.modules, syscall=syscall, native=lambda *given: None)
sys.settrace(step)
with contextlib.suppress(SystemExit):  # nobody is left at the other end to be told of it
    exec(compile(SOURCE, "boot", "exec"), given)
sys.settrace(None)
print(forks > 100 and sent == [None], kept)
"""


def test_a_fork_at_any_instruction_of_the_bootstrap_keeps_neither_channel_nor_library() -> None:
    source = bootstrap.make(time.time_ns()).source
    program = FORKS_AT_EACH_INSTRUCTION.replace("SOURCE", repr(source))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("True []\n", "")
