"""`kinetoctl demo`."""

import gzip
import json
import shlex
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.own_processes import python, tied_python
from kineto_trace.base.quantities import format_duration

from kinetoctl.base.common_options import CommonOptions, common_options, current
from kinetoctl.base.own_daemon import START_DEADLINE_S, Child, OwnDaemon, own_daemon
from kinetoctl.base.value_types import DURATION, FOLDER, prepare_folder
from kinetoctl.client.daemon_client import Client
from kinetoctl.client.tracing import Outcome, TraceRequest
from kinetoctl.commands.report import print_report
from kinetoctl.commands.trace import run_trace
from kinetoctl.errors import TraceUnreadable
from kinetoctl.exit_codes import ExitCode
from kinetoctl.output import units
from kinetoctl.output.console import say

TARGET_DEADLINE_S = 120.0  # importing torch from a cold network disk takes this long, at worst


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
    _say(settings, "To trace a process of your own: kinetoctl trace PID --report")


def _trace(client: Client, pid: int, duration_ns: int, folder: Path, settings: CommonOptions) -> Outcome:
    spec = pb.CaptureSpec(selector=pb.Selector(pids=[pid]), duration_ns=duration_ns, labels={"made-by": "demo"})
    request = TraceRequest(spec=spec, idempotency_key=uuid.uuid4().hex, directory=folder)
    return run_trace(client, request, settings, reports=settings.output == "table")


@click.command("demo")
@click.option("--output-dir", type=FOLDER, default=Path(), help="Folder for the trace.  [default: .]")
@click.option("--duration", type=DURATION, default="2s", help="Length of the trace.  [default: 2s]")
@common_options
def command(output_dir: Path, duration: int) -> int:
    """Try it all out: a daemon, a training process, a trace of it and a report.

    The demo needs no GPU, no running daemon and no privileges. It starts a daemon and a training process of its own
    (so --address has no effect) and stops both at the end; only the trace is kept.
    """
    settings = current()
    output_dir = prepare_folder(output_dir)
    _say(settings, "[1/5] kinetod: start a daemon")
    with own_daemon("kineto-demo-") as client:
        _say(settings, "[2/5] kinetoctl run -- python -m kinetoctl.demo_target: start a training process")
        with demo_target(client) as child:
            process = wait_for_agent(client, child)
            _say(settings, f"[3/5] kinetoctl ps: process {process.pid} is training and its agent is ready")
            typed = format_duration(duration).replace(" ", "")
            _say(settings, f"[4/5] kinetoctl trace --pid {process.pid} --duration {typed}")
            outcome = _trace(client, process.pid, duration, output_dir, settings)
    if outcome.exit_code() == ExitCode.DONE and settings.output == "table":
        for path in outcome.paths.values():
            _report(path, settings)
    return outcome.exit_code()


@contextmanager
def demo_target(daemon: OwnDaemon) -> Iterator[Child]:
    """A training process, started through `kinetoctl run`. Yields it once it trains."""
    trains = python("kinetoctl.demo_target")
    arguments = tied_python("kinetoctl", "run", "--agent-socket", str(daemon.agent_socket), "--", *trains)
    with Child("the training process", arguments, daemon.folder / "target.log", pipe=True) as child:
        child.wait_for_output(TARGET_DEADLINE_S)
        yield child


def wait_for_agent(client: Client, child: Child) -> pb.Process:
    """What the daemon says of the process, once its agent is ready."""
    selector = pb.Selector(pids=[child.process.pid])
    found: list[pb.Process] = []

    def is_ready() -> bool:
        found[:] = client.processes(selector)
        return any(process.agent_state == pb.AGENT_STATE_READY for process in found)

    child.poll(is_ready, START_DEADLINE_S, "had no ready agent")
    return found[0]


def read_back(path: Path) -> Counter[str]:
    """Load the trace with json.load and count its events by category. Raises TraceUnreadable if there are none."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as stream:
            document = json.load(stream)
        events = document["traceEvents"]
        counts = Counter(event["cat"] for event in events if event.get("ph") == "X" and "cat" in event)
    except (OSError, EOFError, ValueError, KeyError, TypeError) as exc:
        raise TraceUnreadable(f"{path} is not a readable trace: {exc!r}") from exc
    if not counts:
        raise TraceUnreadable(f"{path} contains no activity")
    return counts
