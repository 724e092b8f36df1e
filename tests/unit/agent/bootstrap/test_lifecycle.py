"""What happens to the agent when its process forks, exits, is killed or starts it twice."""

import os
import signal
import time
from pathlib import Path
from typing import Callable, Iterator, List

import pytest
from kineto_agent.protocol import arena, wire
from support.agent.agent_daemon import Connection, Daemon, Sample
from support.agent.python_child import Child, environment
from support.waiting import scaled, until

# Forks on command; Python warns of forks with threads from 3.12 on.
FORKING = "import warnings; warnings.simplefilter('ignore'); kineto_agent.start(); sys.stdin.readline()\n"


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
    killed = time.monotonic()
    os.kill(int(lines[0]), signal.SIGKILL)
    connection.expect_end()  # although the child lives
    assert time.monotonic() - killed < scaled(5)
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
    assert (result.outcome, result.reason_code, result.warnings) == ("partial", "CANCELLED", [])


def test_a_forked_child_may_start_its_own_agent(daemon: Daemon, child: Callable[[str], Child]) -> None:
    process = child(FORKING + "pid = os.fork()\nif pid == 0: kineto_agent.start()\nsys.stdin.readline()\n")
    _connection, hello = daemon.welcome()
    process.say("fork")
    _connection, forked = daemon.welcome()
    assert forked.pid != hello.pid == process.process.pid


def test_starting_twice_gives_one_agent(daemon: Daemon, child: Callable[[str], Child]) -> None:
    process = child(
        "import threading\n"
        "kineto_agent.start(); kineto_agent.start()\n"
        "print(threading.active_count(), len(os.listdir('/proc/self/task')), flush=True); sys.stdin.readline()\n"
    )
    assert process.hear() == "1 2"


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
    process = child("kineto_agent.start(); input()")
    daemon.welcome()
    process.say("end")
    process.end()
    log = (tmp_path / "agent.log").read_text()
    assert "connected to %s" % daemon.path in log
    assert "link closed: the agent ends" in log


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
