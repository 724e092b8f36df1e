"""`kinetoctl demo`."""

import gzip
import json
import select
import shlex
import shutil
import subprocess
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.own_processes import python
from kineto_trace.base.quantities import format_duration

from kinetoctl.base.common_options import CommonOptions, common_options, current
from kinetoctl.base.value_types import DURATION, FOLDER, prepare_folder
from kinetoctl.client.daemon_client import Client
from kinetoctl.client.tracing import Outcome, TraceRequest
from kinetoctl.commands.report import print_report
from kinetoctl.commands.trace import run_trace
from kinetoctl.errors import DemoFailed, Unreachable
from kinetoctl.exit_codes import ExitCode
from kinetoctl.output import units
from kinetoctl.output.console import say

START_DEADLINE_S = 30.0
TARGET_DEADLINE_S = 120.0  # importing torch from a cold network disk takes this long, at worst
STOP_DEADLINE_S = 10.0
POLL_S = 0.05
LOG_LINES = 15
MAX_FOLDER_CHARS = 60  # a Unix socket's whole path has room for 107


def _say(settings: CommonOptions, text: str) -> None:
    if not settings.quiet:
        say(text, err=True, bold=settings.color)


def _report(path: Path, settings: CommonOptions) -> None:
    """`kinetoctl report` of the trace."""
    counts = read_back(path)
    listed = ", ".join(f"{units.count(number)} {category}" for category, number in counts.most_common())
    _say(settings, f"json.load reads it back: {listed}")
    _say(settings, f"[5/5] kinetoctl report {shlex.quote(str(path))}")
    print_report([str(path)])
    _say(settings, f"Next: kinetoctl open {shlex.quote(str(path))} shows the trace in the Perfetto UI.")
    _say(settings, "To trace a process of your own, start kinetod and run kinetoctl trace PID --report.")


def _trace(client: Client, pid: int, duration_ns: int, folder: Path, settings: CommonOptions) -> Outcome:
    spec = pb.CaptureSpec(selector=pb.Selector(pids=[pid]), duration_ns=duration_ns, labels={"made-by": "demo"})
    return run_trace(client, TraceRequest(spec=spec, idempotency_key=uuid.uuid4().hex, directory=folder), settings)


@click.command("demo")
@click.option("--output-dir", type=FOLDER, default=Path(), help="Folder for the trace.  [default: .]")
@click.option("--duration", type=DURATION, default="2s", help="Length of the trace.  [default: 2s]")
@common_options
def command(output_dir: Path, duration: int) -> int:
    """Try it all out: a daemon, a training process, a trace of it and a report.

    The demo needs no GPU, no running daemon and no privilege. It starts a daemon and a training process of its own
    (so --address has no effect) and ends both; only the trace is kept.
    """
    settings = current()
    output_dir = prepare_folder(output_dir)
    with demo_folder() as folder:
        _say(settings, "[1/5] kinetod: start a daemon")
        with demo_daemon(folder) as client:
            _say(settings, "[2/5] kinetoctl run -- python -m kinetoctl.demo_target: start a process that trains")
            with demo_target(folder) as child:
                process = wait_for_agent(client, child)
                _say(settings, f"[3/5] kinetoctl ps: process {process.pid} is training and its agent is ready")
                typed = format_duration(duration).replace(" ", "")
                _say(settings, f"[4/5] kinetoctl trace --pid {process.pid} --duration {typed}")
                outcome = _trace(client, process.pid, duration, output_dir, settings)
    if outcome.exit_code() == ExitCode.DONE and settings.output == "table":
        for path in outcome.paths.values():
            _report(path, settings)
    return outcome.exit_code()


# The parts of `kinetoctl demo`: a daemon, a training process, and the check that the trace can be read.
# All of it lives in a temporary folder and in child processes that end with the demo, whatever happens.
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
    arguments = [*python("kinetod", "--listen", address)]
    arguments += ["--agent-socket", str(folder / "agent.sock"), "--state-dir", str(folder / "state")]
    child = Child("the daemon", arguments, folder / "kinetod.log")
    with _running(child), Client(address) as client:
        _poll(child, lambda: _answers(client), START_DEADLINE_S, "did not answer")
        yield client


@contextmanager
def demo_target(folder: Path) -> Iterator[Child]:
    """A training process, started through `kinetoctl run`. Yields it once it trains."""
    arguments = [*python("kinetoctl", "run", "--agent-socket", str(folder / "agent.sock"), "--")]
    arguments += python("kinetoctl.demo_target")
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
