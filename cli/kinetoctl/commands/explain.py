"""`kinetoctl explain`."""

import sys
from typing import Any

import click
from click.shell_completion import CompletionItem

from kinetoctl.base.common_options import common_options, current
from kinetoctl.base.reason_codes import explained, explanations
from kinetoctl.exit_codes import ExitCode
from kinetoctl.output.console import emit, print_table, say, say_text
from kinetoctl.output.diagnosis import explanation_lines

COLUMNS = ("CODE", "STATUS", "MEANING")


def _complete(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    rows = {row.code: row.meaning for row in explanations()}
    return [CompletionItem(code, help=text) for code, text in rows.items() if code.startswith(incomplete.upper())]


@click.command("explain")
@click.argument("code", required=False, shell_complete=_complete)
@common_options
def command(code: str | None) -> int:
    """Explain a reason code of a verdict or an error: what it means and what to do.

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
