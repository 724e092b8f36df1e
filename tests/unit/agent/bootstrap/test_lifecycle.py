"""What happens to the agent when its process forks, exits, is killed or starts it twice."""

import os
import signal
import sys
from itertools import count
from pathlib import Path
from typing import Callable, Iterator, List

import pytest
from kineto_agent.protocol import arena, wire
from support.agent.agent_daemon import Connection, Daemon, Sample, start_request
from support.agent.python_child import Child, environment
from support.losses import without_losses
from support.waiting import until

# Forks on command; Python warns of forks with threads from 3.12 on.
FORKING = "import warnings; warnings.simplefilter('ignore'); kineto_agent.start(); sys.stdin.readline()\n"
# Ends once the GIL was given away for the agent's sake.
OFTEN_WITHOUT_GIL = """
import ctypes
from kineto_agent.bootstrap import lifecycle
kineto_agent.start()
null = os.open(os.devnull, os.O_WRONLY)
def given():
    address = lifecycle._agent.turns._address
    return address and ctypes.c_uint.from_address(address + 12).value
while not given():
    sum(number * number for number in range(3000)); os.write(null, b"x")
print("given", flush=True); sys.stdin.readline()
"""
OURS = ["kineto-agent", "kineto-turns"]
with_gil = pytest.mark.skipif("t" in sys.abiflags, reason="there is no GIL to get")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(str(tmp_path / "agent.sock")) as daemon:
        yield daemon


@pytest.fixture
def child(daemon: Daemon, tmp_path: Path) -> Iterator[Callable[[str], Child]]:
    children: List[Child] = []

    def start(code: str) -> Child:
        env = environment(KINETO_AGENT_SOCKET=daemon.path, KINETO_AGENT_LOG=str(tmp_path / "agent.log"))
        children.append(Child(["-c", "import os, sys, kineto_agent\n" + code], env))
        return children[-1]

    yield start
    for running in children:
        running.kill()


def tasks(pid: int) -> List[Path]:
    """The threads of that process."""
    return list(Path("/proc/%d/task" % pid).iterdir())


def name(task: Path) -> str:
    """Its name; "" if it has ended."""
    try:
        return (task / "comm").read_text().strip()
    except OSError:
        return ""


def threads_of(pid: int) -> List[str]:
    """The names of our threads in that process."""
    return sorted(found for found in map(name, tasks(pid)) if found.startswith("kineto-"))


def blocked_signals(task: Path) -> int:
    """The mask of a thread."""
    (line,) = (line for line in (task / "status").read_text().splitlines() if line.startswith("SigBlk"))
    return int(line.split()[1], 16)


def collecting(daemon: Daemon) -> Connection:
    """An agent in the middle of a capture of an hour."""
    connection, _hello = daemon.welcome()
    connection.collect()
    return connection


def test_a_process_that_exits_in_a_capture_sends_what_it_has(daemon: Daemon, child: Callable[[str], Child]) -> None:
    process = child("kineto_agent.start(); sys.stdin.readline(); sys.exit(3)")
    connection = collecting(daemon)
    process.say("end")
    result = connection.expect(wire.Result)
    assert (result.outcome, result.reason_code) == ("partial", "TARGET_EXITING")
    assert result.sources["python_stacks"]["records"] == len(connection.arenas[0].samples())
    connection.expect_end()
    assert process.end() == ["", ""]
    assert process.process.returncode == 3


def test_a_killed_process_leaves_what_it_had_published(daemon: Daemon, child: Callable[[str], Child]) -> None:
    process = child("kineto_agent.start(); print(os.getpid(), flush=True); sys.stdin.readline()")
    connection = collecting(daemon)
    reader = connection.arenas[0]
    samples: List[Sample] = []

    def published() -> bool:
        samples.extend(reader.samples())
        return bool(samples)

    until(published, "samples are published")
    os.kill(int(process.hear()), signal.SIGKILL)
    connection.expect_end()
    assert samples[0].stack[0] == "<module>"
    assert reader.word(arena.CLOSED) == 0


def test_a_forked_child_does_not_keep_the_link(daemon: Daemon, child: Callable[[str], Child]) -> None:
    process = child(
        FORKING + "pid = os.fork()\n"
        "if pid == 0:\n"
        "    print('memfd:kineto' in open('/proc/self/maps').read(), flush=True)\n"
        "    names = [os.path.realpath('/proc/self/fd/' + fd) for fd in os.listdir('/proc/self/fd')]\n"
        "    print(any('socket' in name or 'memfd' in name for name in names), flush=True)\n"
        "    sys.stdin.readline(); os._exit(0)\n"
        "print(os.getpid(), flush=True); sys.stdin.readline()\n"
    )
    connection = collecting(daemon)
    process.say("fork")
    lines = sorted(process.hear() for _ in range(3))
    assert lines[1:] == ["False", "False"]
    os.kill(int(lines[0]), signal.SIGKILL)
    connection.expect_end()  # although the child lives
    process.say("end the child")


def test_a_parent_goes_on_recording_after_a_fork(daemon: Daemon, child: Callable[[str], Child]) -> None:
    process = child(
        FORKING + "pid = os.fork()\n"
        "if pid == 0: sys.exit(0)\n"
        "print(os.waitpid(pid, 0)[1], flush=True); sys.stdin.readline()\n"
    )
    connection = collecting(daemon)
    process.say("fork")
    assert process.hear() == "0"
    connection.send(wire.Cancel("c1", True))
    result = connection.expect(wire.Result)
    assert (result.outcome, result.reason_code) == ("partial", "CANCELLED")
    assert without_losses(result.warnings) == []


def test_a_forked_child_may_start_its_own_agent(daemon: Daemon, child: Callable[[str], Child]) -> None:
    process = child(FORKING + "pid = os.fork()\nif pid == 0: kineto_agent.start()\nsys.stdin.readline()\n")
    _connection, hello = daemon.welcome()
    process.say("fork")
    _connection, forked = daemon.welcome()
    assert forked.pid != hello.pid == process.process.pid


def test_starting_twice_gives_one_agent(daemon: Daemon, child: Callable[[str], Child]) -> None:
    process = child(
        "import threading\n"
        "kineto_agent.start(); kineto_agent.start(); sys.stdin.readline()\n"
        "print(threading.active_count(), flush=True); sys.stdin.readline()\n"
    )
    daemon.welcome()
    process.say("count")
    assert process.hear() == "1"
    until(lambda: threads_of(process.process.pid) == OURS, "it has its threads, once each")


@with_gil
def test_none_of_the_agents_threads_gets_a_signal_of_the_program(daemon: Daemon, child: Callable[[str], Child]) -> None:
    process = child("kineto_agent.start(); sys.stdin.readline()")
    daemon.welcome()
    until(lambda: threads_of(process.process.pid) == OURS, "it has its threads")
    blocked = {blocked_signals(task) for task in tasks(process.process.pid) if name(task) in OURS}
    assert len(blocked) == 1
    assert blocked.pop() & 1 << signal.SIGINT - 1


@with_gil
def test_captures_of_a_loop_that_often_releases_the_gil_are_given_it(
    daemon: Daemon, child: Callable[[str], Child]
) -> None:
    process = child(OFTEN_WITHOUT_GIL)
    connection, _hello = daemon.welcome()
    captures = count()

    def given() -> bool:
        capture = "c%d" % next(captures)
        connection.send(start_request(capture, duration_ns=50_000_000))
        assert connection.expect(wire.Result).outcome == "done"
        connection.send(wire.Release(capture))
        return process.has_said()

    until(given, "a capture is given the GIL")
    assert process.hear() == "given"
    assert process.process.poll() is None


@with_gil
def test_agents_that_start_and_stop_leave_no_thread(daemon: Daemon, child: Callable[[str], Child]) -> None:
    process = child(
        "for _ in range(20): kineto_agent.start(); kineto_agent.stop()\n"
        "print('stopped', flush=True); sys.stdin.readline(); kineto_agent.start(); sys.stdin.readline()\n"
    )
    assert process.hear() == "stopped"
    until(lambda: len(tasks(process.process.pid)) == 1, "the last threads have ended")
    process.say("start")
    until(lambda: threads_of(process.process.pid) == OURS, "another agent has its threads")


@with_gil
def test_a_forked_child_has_no_thread_of_ours_until_it_starts_an_agent(
    daemon: Daemon, child: Callable[[str], Child]
) -> None:
    process = child(
        FORKING + "pid = os.fork()\n"
        "if pid: sys.stdin.readline(); sys.exit(os.waitpid(pid, 0)[1])\n"
        "print(len(os.listdir('/proc/self/task')), flush=True)\n"
        "kineto_agent.start(); print(os.getpid(), flush=True); sys.stdin.readline()\n"
    )
    daemon.welcome()
    until(lambda: threads_of(process.process.pid) == OURS, "it has its threads")
    process.say("fork")
    assert process.hear() == "1"
    forked = int(process.hear())
    until(lambda: threads_of(forked) == OURS, "the child has its own")
    process.say("end")
    process.say("end")
    assert (process.end(), process.process.returncode) == (["", ""], 0)


def test_a_stopped_agent_can_be_started_again(daemon: Daemon, child: Callable[[str], Child]) -> None:
    process = child("kineto_agent.start(); sys.stdin.readline(); kineto_agent.stop(); kineto_agent.start(); input()")
    connection, _hello = daemon.welcome()
    process.say("stop")
    connection.expect_end()
    daemon.welcome()


def test_without_a_daemon_nothing_is_printed(child: Callable[[str], Child], daemon: Daemon) -> None:
    daemon.close()
    process = child("kineto_agent.start(); kineto_agent.step(); print('done')")
    assert process.end() == ["done\n", ""]
    assert process.process.returncode == 0


def test_steps_of_the_program_are_told(daemon: Daemon, child: Callable[[str], Child]) -> None:
    process = child("kineto_agent.start(); [kineto_agent.step() for _ in range(7)]; print(1, flush=True); input()")
    connection, _hello = daemon.welcome()
    process.hear()
    connection.send(wire.Describe())
    assert connection.expect(wire.Hello).iterations == 7


def test_the_debug_log_tells_what_the_agent_does(daemon: Daemon, child: Callable[[str], Child], tmp_path: Path) -> None:
    process = child("kineto_agent.start(); input(); kineto_agent.stop(); input()")
    log = tmp_path / "agent.log"
    daemon.welcome()
    process.say("stop")
    until(lambda: "link closed: the agent ends" in log.read_text(), "the agent tells that it ends")
    assert "connected to %s" % daemon.path in log.read_text()
    process.say("end")
    process.end()


def test_many_forks_during_a_capture_harm_nobody(daemon: Daemon, child: Callable[[str], Child]) -> None:
    process = child(
        FORKING + "codes = []\n"
        "for _ in range(50):\n"
        "    pid = os.fork()\n"
        "    if pid == 0: sys.exit(7)\n"
        "    codes.append(os.waitpid(pid, 0)[1])\n"
        "print(set(codes), flush=True); sys.stdin.readline()\n"
    )
    connection = collecting(daemon)
    process.say("fork")
    assert process.hear() == "{1792}"
    connection.send(wire.Cancel("c1", False))
    assert connection.expect(wire.Result).outcome == "cancelled"


def test_a_signal_handler_may_stop_the_agent_while_it_is_being_stopped(child: Callable[[str], Child]) -> None:
    process = child(
        "import signal\n"
        "from kineto_agent.bootstrap import lifecycle\n"
        "kineto_agent.start()\n"
        "signal.signal(signal.SIGUSR1, lambda *_: (kineto_agent.stop(), print('stopped', flush=True)))\n"
        "remove = lifecycle._hooks.remove\n"
        "def interrupted(): lifecycle._hooks.remove = remove; signal.raise_signal(signal.SIGUSR1); remove()\n"
        "lifecycle._hooks.remove = interrupted\n"
        "kineto_agent.stop()\n"
    )
    assert process.hear() == "stopped"
    assert process.end() == ["", ""]
    assert process.process.returncode == 0


def test_an_exit_does_not_take_the_hooks_away(child: Callable[[str], Child]) -> None:
    process = child(
        "from kineto_agent.bootstrap import lifecycle\n"
        "kineto_agent.start()\n"
        "lifecycle._hooks.remove = lambda: print('removed', flush=True)\n"
    )
    assert process.end() == ["", ""]


REPLACED = {
    "_thread": ("start_new_thread", "allocate_lock", "get_ident"),
    "time": ("sleep", "monotonic"),
    "select": ("poll",),
    "os": ("read", "write", "open", "waitpid"),
}
# As eventlet and gevent do; then every module of the agent is imported that can be here.
GREENED = f"""
import importlib, pkgutil
kineto_agent.start()
for name, functions in {REPLACED}.items():
    module = importlib.import_module(name)
    for function in functions:
        setattr(module, function, lambda *given, real=getattr(module, function), **more: real(*given, **more))
green = [sys.modules[name] for name in {list(REPLACED)}]
for found in pkgutil.walk_packages(kineto_agent.__path__, "kineto_agent."):
    if not found.name.endswith("__main__") and ".inject" not in found.name:
        try:
            importlib.import_module(found.name)
        except NameError:
            pass  # a part of the loader's packet
at_imports = ["kineto_agent.bootstrap.originals", "kineto_agent.bootstrap.lifecycle"]  # or RLock, which stays
modules = [sys.modules[name] for name in sys.modules if name.startswith("kineto_agent.") and name not in at_imports]
print(len(modules) > 50, sorted(
    f"{{module.__name__}}: {{name}}" for module in modules for name, value in vars(module).items()
    if any(value is each for each in green)), flush=True)
sys.stdin.readline()
"""


def test_what_the_program_replaces_after_the_start_no_module_of_the_agent_has(child: Callable[[str], Child]) -> None:
    assert child(GREENED).hear() == "True []"
