"""The parts of `kinetoctl demo`: a daemon, a training process, and the check that the trace can be read.

All of it lives in a temporary folder and in child processes that end with the demo, whatever happens.
"""

import gzip
import json
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kineto_protos.v1 import profiler_pb2 as pb

from kinetoctl.client.daemon_client import Client
from kinetoctl.errors import DemoFailed, Unreachable

START_DEADLINE_S = 30.0
TARGET_DEADLINE_S = 120.0  # importing torch from a cold network disk takes this long, at worst
STOP_DEADLINE_S = 10.0
POLL_S = 0.05
LOG_LINES = 15
MAX_FOLDER_CHARS = 60  # a Unix socket's whole path has room for 107


class Child:
    """A child process with a log file. If it ends early, the error shows the end of its log."""

    def __init__(self, name: str, arguments: list[str], log: Path, *, pipe: bool = False) -> None:
        self.name = name
        self._log = log
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipe else stream,
                stderr=stream,
                start_new_session=True,  # Ctrl-C is for the demo; it ends its children itself
            )

    def failed(self, what: str) -> DemoFailed:
        """The error for this child, with the end of its log."""
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return DemoFailed("\n".join([f"{self.name} {what}", *(f"  | {line}" for line in lines)]))

    def check(self) -> None:
        """Raises DemoFailed if the process has ended."""
        status = self.process.poll()
        if status is not None:
            raise self.failed(f"ended with status {status}")

    def wait_for_output(self, deadline_s: float) -> None:
        """Wait until something arrives on the child's stdout (made with pipe=True)."""
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], deadline_s)
        if not readable:
            raise self.failed(f"was not ready within {deadline_s:g} s")
        if not self.process.stdout.readline():
            self.process.wait()
            self.check()

    def stop(self) -> None:
        """Send SIGTERM, and SIGKILL if the process has not ended after STOP_DEADLINE_S."""
        self.process.terminate()
        try:
            self.process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextmanager
def demo_folder() -> Iterator[Path]:
    """A temporary folder whose name is short enough for sockets in it."""
    parent = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix="kineto-demo-", dir=parent if len(parent) <= MAX_FOLDER_CHARS else "/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _running(child: Child) -> Iterator[Child]:
    try:
        yield child
    finally:
        child.stop()


def _poll(child: Child, ready: Callable[[], bool], deadline_s: float, what: str) -> None:
    end = time.monotonic() + deadline_s
    while not ready():
        child.check()
        if time.monotonic() > end:
            raise child.failed(f"{what} within {deadline_s:g} s")
        time.sleep(POLL_S)


def _answers(client: Client) -> bool:
    try:
        client.host()
    except Unreachable:
        return False
    return True


@contextmanager
def demo_daemon(folder: Path) -> Iterator[Client]:
    """A daemon of the demo's own. Yields a client once the daemon answers."""
    address = f"unix:{folder / 'kinetod.sock'}"
    arguments = [sys.executable, "-P", "-m", "kinetod", "--listen", address]
    arguments += ["--agent-socket", str(folder / "agent.sock"), "--state-dir", str(folder / "state")]
    child = Child("the daemon", arguments, folder / "kinetod.log")
    with _running(child), Client(address) as client:
        _poll(child, lambda: _answers(client), START_DEADLINE_S, "did not answer")
        yield client


@contextmanager
def demo_target(folder: Path) -> Iterator[Child]:
    """A training process, started through `kinetoctl run`. Yields it once it trains."""
    arguments = [sys.executable, "-P", "-m", "kinetoctl", "run", "--agent-socket", str(folder / "agent.sock"), "--"]
    arguments += [sys.executable, "-P", "-m", "kinetoctl.demo_target"]
    with _running(Child("the training process", arguments, folder / "target.log", pipe=True)) as child:
        child.wait_for_output(TARGET_DEADLINE_S)
        yield child


def wait_for_agent(client: Client, child: Child) -> pb.Process:
    """What the daemon says of the process, once its agent is ready."""
    selector = pb.Selector(pids=[child.process.pid])
    found: list[pb.Process] = []

    def is_ready() -> bool:
        found[:] = client.processes(selector)
        return any(process.agent_state == pb.AGENT_STATE_READY for process in found)

    _poll(child, is_ready, START_DEADLINE_S, "had no ready agent")
    return found[0]


def read_back(path: Path) -> Counter[str]:
    """Load the trace with json.load and count its events by category. Raises DemoFailed if there are none."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as stream:
            document = json.load(stream)
        events = document["traceEvents"]
        counts = Counter(event["cat"] for event in events if event.get("ph") == "X" and "cat" in event)
    except (OSError, EOFError, ValueError, KeyError, TypeError) as exc:
        raise DemoFailed(f"{path} is not a readable trace: {exc!r}") from exc
    if not counts:
        raise DemoFailed(f"{path} contains no activity")
    return counts
