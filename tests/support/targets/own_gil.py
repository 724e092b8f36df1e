"""Live traces of a program whose threads run in interpreters with a GIL of their own (CPython 3.12 and later)."""

import gzip
import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from campaign.parts.attach_harness import pythons

from support.agent.python_child import environment
from support.service.cli import run_process
from support.service.daemon import Daemon
from support.waiting import scaled

INTERPRETERS = 3
ENDS_WITHIN_S = 30
PROGRAM = """
import os, sys, threading
try:
    import _interpreters as interpreters
    run = interpreters.exec
except ImportError:
    import _xxsubinterpreters as interpreters
    run = interpreters.run_string
BODY = '''
import os
def inside_%(number)d(count):
    total = 0
    for each in range(count):
        total = (total * 31 + each) %% 1000003
    return total
wanted = inside_%(number)d(1000)
os.write(%(begun)d, b"!")
while not os.path.exists(%(end)r):
    for _ in range(50):
        assert inside_%(number)d(1000) == wanted
'''
failed = []
begun, begin = os.pipe()
def work(number):
    own = interpreters.create()
    try:
        failed.extend(filter(None, [run(own, BODY % {"number": number, "end": sys.argv[1], "begun": begin})]))
        interpreters.destroy(own)
    except BaseException as error:
        failed.append(error)
threads = [threading.Thread(target=work, args=(number,)) for number in range(int(sys.argv[2]))]
for thread in threads: thread.start()
for thread in threads: os.read(begun, 1)
print("ready", flush=True)
for thread in threads: thread.join()
print("failed: %r" % failed if failed else "right", flush=True)
"""
UNTOUCHED = (0, "right\n", "")
ALL_INSIDE = frozenset(f"inside_{number}" for number in range(INTERPRETERS))


def pythons_with_own_gils() -> list[Path]:
    """Interpreters of this machine whose sub-interpreters have a GIL of their own."""
    test = "import sys; sys.exit(sys.version_info < (3, 12))"
    return [python for python in pythons() if subprocess.run([python, "-c", test], check=False).returncode == 0]


class Trace(NamedTuple):
    """The outcome of one capture."""

    verdict: str
    warnings: tuple[str, ...]
    inside: frozenset[str]  # functions of the other interpreters that the file has rows of


class Target:
    """The program that runs the interpreters."""

    def __init__(self, python: Path, folder: Path) -> None:
        self._end = folder / "end"
        self.process = subprocess.Popen(
            [python, "-c", PROGRAM, str(self._end), str(INTERPRETERS)],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def trace(self, daemon: Daemon, duration: str, options: Sequence[str]) -> Trace:
        """Traces the program once, and fetches and reads the file."""
        command = ["trace", "--pid", str(self.process.pid), "--duration", duration, "-o", "json", *options]
        with tempfile.TemporaryDirectory() as folder:
            result = run_process(command, daemon.client_environ(), Path(folder))
            assert result.code == 0, result
            (target,) = result.json()["targets"]
            inside = frozenset(name for path in Path(folder).glob("*.gz") for name in _inside(path))
        return Trace(target["verdict"], tuple(target.get("warnings", [])), inside)

    def finish(self) -> tuple[int, str, str]:
        """Ends the program. Returns its exit status, its output since it was ready, and its standard error."""
        self._end.touch()
        output, errors = self.process.communicate(timeout=scaled(ENDS_WITHIN_S))
        return self.process.returncode, output, errors


def _inside(path: Path) -> Iterator[str]:
    with gzip.open(path, "rt") as stream:
        events: list[dict[str, Any]] = json.load(stream)["traceEvents"]
    for event in events:
        name = str(event["name"]).rpartition(": ")[2]
        if event.get("cat") == "python_function" and name in ALL_INSIDE:
            yield name


@contextmanager
def own_gil_target(python: Path) -> Iterator[Target]:
    """A program that is ready, killed at the end if it has not ended."""
    with tempfile.TemporaryDirectory() as folder:
        target = Target(python, Path(folder))
        try:
            yield target
        finally:
            target.process.kill()
            target.process.communicate()
