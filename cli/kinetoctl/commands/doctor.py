"""`kinetoctl doctor`."""

from typing import Any

import click

from kinetoctl.base.common_options import common_options, completed, current
from kinetoctl.client.daemon_client import Client
from kinetoctl.exit_codes import ExitCode
from kinetoctl.options.selection_options import MAX_PID
from kinetoctl.output.console import emit, plain
from kinetoctl.output.diagnosis import host_verdict, print_checks, problems, process_title, verdict


@click.command("doctor")
@click.argument("pid", type=click.IntRange(1, MAX_PID), required=False, shell_complete=completed("pids"))
@common_options
def command(pid: int | None) -> int:
    """Check whether a process can be traced, and if not, what to do about it.

    Shows how a capture would attach to process PID, and the result of every check: OK, NOTE (works, at a cost or with
    something left out), PROBLEM (no trace until this is fixed) or UNKNOWN (not allowed to look). The process is not
    touched. Without PID, it checks the daemon's host: rights, other profilers, GPUs, disk and clock. The exit code is
    5 if the process cannot be traced, or if a check of the host is a PROBLEM.
    """
    settings = current()
    with Client(settings.address, timeout_s=settings.timeout_s) as client:
        found: Any = client.diagnose_host() if pid is None else client.diagnose(pid)
    if pid is None:
        title, last, prevented = f"host {found.hostname}", host_verdict(found), bool(problems(found.checks))
    else:
        title, last, prevented = process_title(found), verdict(found), not found.method
    if settings.output == "table":
        print_checks(title, found.checks, last, color=settings.color)
    else:
        emit(plain(found), settings.output)
    return ExitCode.FAILED if prevented else ExitCode.DONE
