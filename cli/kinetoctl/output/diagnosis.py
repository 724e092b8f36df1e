"""What stands in the way of tracing a process, check by check. In a terminal long texts are wrapped."""

import sys

import click
from kineto_protos.v1 import profiler_pb2 as pb
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kinetoctl.output import names
from kinetoctl.output.console import PIPE_WIDTH

STYLES = {"OK": "green", "NOTE": "yellow", "PROBLEM": "bold red", "UNKNOWN": "magenta"}
ARROW = "\N{RIGHTWARDS ARROW}"


def verdict(diagnosis: pb.Diagnosis) -> str:
    """One line for the end."""
    process = diagnosis.process
    if diagnosis.method:
        return f"process {process.pid} can be traced ({diagnosis.method})"
    problems = [check.name for check in diagnosis.checks if check.status == pb.CHECK_STATUS_PROBLEM]
    causes = [name for name in problems if name != "method"]
    return f"process {process.pid} cannot be traced: {', '.join(dict.fromkeys(causes)) or 'no way in'}"


def _table(diagnosis: pb.Diagnosis) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("CHECK", no_wrap=True)
    table.add_column("STATUS", no_wrap=True)
    table.add_column("DETAIL", overflow="fold")
    for check in diagnosis.checks:
        status = names.check_status(check.status)
        detail = Text(check.detail)
        if check.advice:
            detail.append(f"\n{ARROW} {check.advice}", style="italic")
        table.add_row(check.name, Text(status, style=STYLES.get(status, "")), detail)
    return table


def print_diagnosis(diagnosis: pb.Diagnosis, *, color: bool) -> None:
    """On stdout: who it is, the checks, and the verdict."""
    process = diagnosis.process
    title = f"process {process.pid} of {process.user or process.uid}: {' '.join(process.command)}"
    if sys.stdout.isatty():
        console = Console(file=sys.stdout, no_color=not color, highlight=False)
        console.print(Text(title), _table(diagnosis), Text(verdict(diagnosis), style="bold"), sep="\n")
        return
    console = Console(file=sys.stdout, width=PIPE_WIDTH, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(_table(diagnosis))
    lines = [title, *(line.rstrip() for line in capture.get().splitlines()), verdict(diagnosis)]
    click.echo("\n".join(lines))
