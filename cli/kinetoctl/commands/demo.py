"""`kinetoctl demo`."""

import shlex
import uuid
from pathlib import Path

import click
from kineto_protos.units import format_duration
from kineto_protos.v1 import profiler_pb2 as pb

from kinetoctl.base.common_options import CommonOptions, common_options, current
from kinetoctl.base.value_types import DURATION
from kinetoctl.client.daemon_client import Client
from kinetoctl.client.tracing import Outcome, TraceRequest
from kinetoctl.commands import report
from kinetoctl.commands.trace import run_trace
from kinetoctl.exit_codes import ExitCode
from kinetoctl.local.demo_processes import demo_daemon, demo_folder, demo_target, read_back, wait_for_agent
from kinetoctl.options.output_dir import FOLDER, prepare_folder
from kinetoctl.output import units
from kinetoctl.output.console import say

VIEWS_WITHOUT_GPU = {"cpu_op": "operators", "python_function": "python_samples"}  # by the category of events they show
ROWS = 5


def _say(settings: CommonOptions, text: str) -> None:
    if not settings.quiet:
        say(text, err=True, bold=settings.color)


def _report(path: Path, settings: CommonOptions) -> None:
    """`kinetoctl report` of the trace, with the views that say something of it."""
    counts = read_back(path)
    listed = ", ".join(f"{units.count(number)} {category}" for category, number in counts.most_common())
    _say(settings, f"json.load reads it back: {listed}")
    arguments = [str(path)]
    if "kernel" not in counts:
        views = [view for category, view in VIEWS_WITHOUT_GPU.items() if category in counts]
        arguments = [*(word for view in views for word in ("--view", view)), "--limit", str(ROWS), *arguments]
    _say(settings, f"[5/5] kinetoctl report {shlex.join(arguments)}")
    with report.command.make_context("report", arguments, parent=click.get_current_context()) as context:
        report.command.invoke(context)
    _say(settings, f"Next: kinetoctl open {shlex.quote(str(path))} shows the trace in the Perfetto UI.")
    _say(settings, "To trace a process of your own, start kinetod and run kinetoctl trace --pid PID.")


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
