"""`kinetoctl doctor`, and `kinetoctl explain` for the reason codes that it and others give."""

import sys
from typing import Any

import click
from click.shell_completion import CompletionItem

from kinetoctl.base.common_options import common_options, completed, current
from kinetoctl.base.reason_codes import explained, explanations
from kinetoctl.exit_codes import ExitCode
from kinetoctl.options.selection_options import MAX_PID
from kinetoctl.output.console import emit, plain, print_table, say, say_text
from kinetoctl.output.diagnosis import (
    explanation_lines,
    host_verdict,
    print_checks,
    problems,
    process_title,
    verdict,
)

COLUMNS = ("CODE", "STATUS", "MEANING")


@click.command("doctor")
@click.argument("pid", type=click.IntRange(1, MAX_PID), required=False, shell_complete=completed("pids"))
@common_options
def command(pid: int | None) -> int:
    """Check whether a process can be traced, and if not, what to do about it.

    Shows how a capture would attach to process PID, and the result of every check: OK, NOTE (works, but at a cost or
    with something left out), PROBLEM (no trace until this is fixed) or UNKNOWN (not allowed to look). The process is
    not touched. Without PID, it checks the daemon's host: permissions, other profilers, GPUs, disk and clock. The exit
    code is 5 if the process cannot be traced, or if a check of the host is a PROBLEM.
    """
    from kinetoctl.base.own_daemon import reachable_daemon  # 60 ms that `explain` does not need

    settings = current()
    with reachable_daemon(settings, say) as client:
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


def _complete(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    rows = {row.code: row.meaning for row in explanations()}
    return [CompletionItem(code, help=text) for code, text in rows.items() if code.startswith(incomplete.upper())]


@click.command("explain")
@click.argument("code", required=False, shell_complete=_complete)
@common_options
def explain(code: str | None) -> int:
    """Explain the reason code of a verdict or an error: what it means and what to do.

    \b
    kinetoctl explain RECORDS_DROPPED
    kinetoctl explain                    all codes
    """
    settings = current()
    rows: list[Any] = explanations() if code is None else explained(code)
    if settings.output != "table":
        emit([row.plain() for row in rows], settings.output)
    elif code is None:
        print_table(COLUMNS, [(row.code, row.status, row.meaning) for row in rows], color=settings.color)
    else:
        for text, is_title in explanation_lines(rows):
            if is_title:
                say(text, bold=sys.stdout.isatty())
            else:
                say_text(text)
    return ExitCode.DONE
