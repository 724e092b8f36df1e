"""Real Python programs, most with an agent, for tests with a real daemon. Each says "ready" as its first line."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kineto_protos.services import ProfilerStub
from kineto_protos.v1 import profiler_pb2 as pb

from support.service.cli import kinetoctl
from support.service.daemon import Daemon
from support.waiting import until

Program = subprocess.Popen[str]

# The beginning of a program: the lines of its standard input come into `commands`, then "end".
LISTEN = """
import os, sys, threading
commands = []
def listen():
    for line in sys.stdin:
        commands.append(line.strip())
    commands.append("end")
threading.Thread(target=listen, daemon=True).start()
"""
# Works until its stdin ends, so that no test leaves it behind. It rests half of the time, since tests need a processor,
# too; not between all iterations, since whoever looks at it with the GIL would see it at rest only.
NUMBERS = """
import itertools, sys, threading, time, kineto_agent
threading.Thread(target=lambda: (sys.stdin.read(), __import__("os")._exit(0)), daemon=True).start()
def crunch_numbers():
    return sum(i * i for i in range(20_000))
print("ready", flush=True)
for step in itertools.count():
    crunch_numbers()
    kineto_agent.step()
    if step % 8 == 0:
        time.sleep(0.01)
"""


@contextmanager
def program(command: Sequence[str], daemon: Daemon, *, quiet: bool = False) -> Iterator[Program]:
    """A process that has said "ready", killed at the end. quiet: what it writes on standard error is thrown away."""
    with subprocess.Popen(
        command,
        env=daemon.client_environ(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if quiet else None,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("ready")
            yield process
        finally:
            process.kill()


@contextmanager
def connected(daemon: Daemon, code: str, *arguments: str, quiet: bool = False) -> Iterator[Program]:
    """A program that starts the agent itself; the daemon knows it."""
    with program([sys.executable, "-c", code, *arguments], daemon, quiet=quiet) as process:
        until(lambda: process.pid in ready_pids(daemon.stub()), "the agent is connected")
        yield process


def crunching() -> list[str]:
    """The command of the program that crunches numbers in iterations, started as `kinetoctl run` does it."""
    return kinetoctl("--quiet", "run", "--", sys.executable, "-c", NUMBERS)


def tell(process: Program, line: str) -> None:
    """Writes one line to the program's standard input."""
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def hear(process: Program) -> str:
    """The next line of its standard output."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def ready_pids(stub: ProfilerStub) -> set[int]:
    """The processes whose agents can begin a capture."""
    request = pb.ListProcessesRequest(selector=pb.Selector(helpers=True))
    processes = stub.ListProcesses(request, timeout=10).processes
    return {process.pid for process in processes if process.agent_state == pb.AGENT_STATE_READY}
