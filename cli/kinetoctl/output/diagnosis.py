"""Prints what prevents traces, check by check. Long texts are wrapped in a terminal."""

import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from kineto_trace.base.visible_text import one_line
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kinetoctl.client import enum_names
from kinetoctl.output.console import captured, rich_console, say_text

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

    from kinetoctl.base.reason_codes import Explanation

STYLES = {"OK": "green", "NOTE": "yellow", "PROBLEM": "bold red", "UNKNOWN": "magenta"}
ARROW = "\N{RIGHTWARDS ARROW}"
WIDTH = 100
Line = tuple[str, bool]  # the text, and whether it is a title


def problems(checks: "Iterable[pb.Check]") -> list[str]:
    """The names of the checks that found a problem, without duplicates."""
    return list(dict.fromkeys(check.name for check in checks if enum_names.check_status(check.status) == "PROBLEM"))


def verdict(diagnosis: "pb.Diagnosis") -> str:
    """One line for the end."""
    process = diagnosis.process
    if diagnosis.method:
        return f"process {process.pid} can be traced ({diagnosis.method})"
    causes = [name for name in problems(diagnosis.checks) if name != "method"]
    return f"process {process.pid} cannot be traced: {', '.join(causes) or 'no method works'}"


def host_verdict(diagnosis: "pb.HostDiagnosis") -> str:
    """One line for the end."""
    found = problems(diagnosis.checks)
    if not found:
        return f"nothing on {diagnosis.hostname} prevents tracing"
    return f"problems on {diagnosis.hostname}: {', '.join(found)}"


def _table(checks: "Iterable[pb.Check]") -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("CHECK", no_wrap=True)
    table.add_column("STATUS", no_wrap=True)
    table.add_column("DETAIL", overflow="fold")
    for check in checks:
        status = enum_names.check_status(check.status)
        detail = Text(one_line(check.detail))
        if check.advice:
            detail.append(f"\n{ARROW} {one_line(check.advice)}", style="italic")
        table.add_row(Text(one_line(check.name)), Text(status, style=STYLES.get(status, "")), detail)
    return table


def process_title(diagnosis: "pb.Diagnosis") -> str:
    """Whose checks they are."""
    process = diagnosis.process
    return f"process {process.pid} of {process.user or process.uid}: {' '.join(process.command)}"


def diagnosis_page(diagnosis: "pb.Diagnosis") -> RenderableType:
    """The verdict, the process and the checks, for a page of the live view: what matters most is in sight."""
    return Group(
        Text(verdict(diagnosis), style="bold"), Text(one_line(process_title(diagnosis))), _table(diagnosis.checks)
    )


def print_checks(title: str, checks: "Iterable[pb.Check]", last: str, *, color: bool) -> None:
    """Prints a title, the checks and a last line on stdout."""
    title, last = one_line(title), one_line(last)
    if sys.stdout.isatty():
        console = rich_console(sys.stdout, no_color=not color)
        console.print(Text(title), _table(checks), Text(last, style="bold"), sep="\n")
        return
    say_text("\n".join([title, *captured(_table(checks)), last]))


# What a reason code means and what to do, as lines for people. Pure.
def explanation_lines(rows: "Sequence[Explanation]") -> Iterator[Line]:
    """The rows of one code, with a blank line between two."""
    for place, row in enumerate(rows):
        if place:
            yield "", False
        title = textwrap.wrap(f"{row.code}: {row.meaning}", WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        yield from ((line, True) for line in title)
        if row.remedy:
            yield _paragraph(f"What to do: {row.remedy}"), False
        status = f": {row.status}" if row.status else ""
        yield _paragraph(f"Where: {row.where.lower()}{status}"), False


def _paragraph(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
