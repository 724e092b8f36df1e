"""`kinetoctl doctor`."""

import click

from kinetoctl.base.common_options import CommonOptions, common_options, completed, current
from kinetoctl.client.daemon_client import Client
from kinetoctl.exit_codes import ExitCode
from kinetoctl.options.selection_options import MAX_PID
from kinetoctl.output.console import emit, plain
from kinetoctl.output.diagnosis import print_diagnosis, print_host_diagnosis, problems


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
        return _host(client, settings) if pid is None else _process(client, pid, settings)


def _process(client: Client, pid: int, settings: CommonOptions) -> int:
    diagnosis = client.diagnose(pid)
    if settings.output == "table":
        print_diagnosis(diagnosis, color=settings.color)
    else:
        emit(plain(diagnosis), settings.output)
    return ExitCode.DONE if diagnosis.method else ExitCode.FAILED


def _host(client: Client, settings: CommonOptions) -> int:
    diagnosis = client.diagnose_host()
    if settings.output == "table":
        print_host_diagnosis(diagnosis, color=settings.color)
    else:
        emit(plain(diagnosis), settings.output)
    return ExitCode.FAILED if problems(diagnosis.checks) else ExitCode.DONE
