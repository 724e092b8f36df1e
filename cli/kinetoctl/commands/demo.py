"""`kinetoctl demo`."""

import uuid
from pathlib import Path

import click
from kineto_protos.units import format_duration
from kineto_protos.v1 import profiler_pb2 as pb

from kinetoctl.base.common_options import Settings, common_options, current
from kinetoctl.base.value_types import DURATION
from kinetoctl.client.daemon_client import Client
from kinetoctl.client.tracing import Outcome, TraceRequest
from kinetoctl.commands.trace import run_trace
from kinetoctl.exit_codes import ExitCode
from kinetoctl.local.demo_processes import demo_daemon, demo_folder, demo_target, read_back, wait_for_agent
from kinetoctl.options.output_dir import FOLDER, prepare_folder
from kinetoctl.output import units
from kinetoctl.output.console import say


def _say(settings: Settings, text: str) -> None:
    if not settings.quiet:
        say(text, err=True, bold=settings.color)


def _check_files(settings: Settings, outcome: Outcome) -> None:
    for path in outcome.paths.values():
        counts = read_back(path)
        listed = ", ".join(f"{units.count(number)} {category}" for category, number in counts.most_common())
        _say(settings, f"json.load reads it back: {listed}")


def _trace(client: Client, pid: int, duration_ns: int, folder: Path, settings: Settings) -> int:
    spec = pb.CaptureSpec(selector=pb.Selector(pids=[pid]), duration_ns=duration_ns, labels={"made-by": "demo"})
    request = TraceRequest(spec=spec, idempotency_key=uuid.uuid4().hex, directory=folder)
    outcome = run_trace(client, request, settings)
    if outcome.exit_code() == ExitCode.DONE:
        _check_files(settings, outcome)
    return outcome.exit_code()


@click.command("demo")
@click.option("--output-dir", type=FOLDER, default=Path(), help="Folder for the trace.  [default: .]")
@click.option("--duration", type=DURATION, default="2s", help="Length of the trace.  [default: 2s]")
@common_options
def command(output_dir: Path, duration: int) -> int:
    """Try it all out: a daemon, a training process and a trace of it.

    Needs no GPU, no running daemon and no privilege. The daemon and the process are the demo's own (so
    --address has no meaning here) and end with it; only the trace stays.
    """
    settings = current()
    output_dir = prepare_folder(output_dir)
    with demo_folder() as folder:
        _say(settings, "[1/4] kinetod: start a daemon")
        with demo_daemon(folder) as client:
            _say(settings, "[2/4] kinetoctl run -- python -m kinetoctl.demo_target: start a process that trains")
            with demo_target(folder) as child:
                process = wait_for_agent(client, child)
                _say(settings, f"[3/4] kinetoctl ps: pid {process.pid} trains, its agent is ready")
                typed = format_duration(duration).replace(" ", "")
                _say(settings, f"[4/4] kinetoctl trace --pid {process.pid} --duration {typed}")
                return _trace(client, process.pid, duration, output_dir, settings)
