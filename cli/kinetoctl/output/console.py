"""Printing: lines, Rich consoles for stdout (results) and stderr (progress), and tables that survive a pipe.

Everything that kinetoctl prints goes through `say`, `say_text` or `rich_console` (a test checks this). Much of it comes
from other people, so control characters are spelled out here (`kineto_trace.base.visible_text`). Styles come later.
"""

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TextIO

import click
from kineto_trace.base.visible_text import one_line, visible

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, OverflowMethod, RenderableType
    from rich.segment import Segment
    from rich.table import Table

GAP = "  "  # between two columns
PIPE_WIDTH = 100_000  # nothing is cut when no terminal reads it


def say(text: str, *, err: bool = False, label: str = "", bold: bool = False) -> None:
    """Prints one line on stdout or stderr. label: printed before it, unchanged and with its style; bold: the line."""
    shown = one_line(text)
    click.echo(label + (click.style(shown, bold=True) if bold else shown), err=err)


def say_text(text: str, *, err: bool = False, nl: bool = True, label: str = "") -> None:
    """Like say, for a text of several lines. nl: whether to end it with a newline."""
    click.echo(label + visible(text), err=err, nl=nl)


@cache
def _console_class() -> "type[Console]":
    from rich.console import Console  # 30 ms, which plain tables do without

    class VisibleConsole(Console):
        """Spells out control characters in what is rendered; Rich itself lets most of them pass."""

        def render(self, renderable: "RenderableType", options: "ConsoleOptions | None" = None) -> "Iterable[Segment]":
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=visible(segment.text))

    return VisibleConsole


def rich_console(file: TextIO, **options: Any) -> "Console":
    """A console of Rich, without highlighting."""
    return _console_class()(file=file, highlight=False, **options)


def stdout_console(*, color: bool) -> "Console":
    """The console for results."""
    return rich_console(sys.stdout, no_color=not color, soft_wrap=True)


def stderr_console(*, color: bool) -> "Console":
    """The console for progress and messages."""
    return rich_console(sys.stderr, no_color=not color, soft_wrap=True)


def pipe_console() -> "Console":
    """A console whose output is captured for a pipe: nothing is cut."""
    return rich_console(sys.stdout, width=PIPE_WIDTH, color_system=None)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, folds: bool = False) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for position, column in enumerate(columns):
        last = position == len(columns) - 1
        overflow: OverflowMethod = "ellipsis" if last and not folds else "fold"
        table.add_column(column, no_wrap=not (last and folds), overflow=overflow, min_width=len(column))
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _plain_lines(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str] | None:
    """The lines as Rich would render them, with the last column cut to fit.

    None if only Rich can: a column must fold, or a cell has characters whose width only Rich knows.
    """
    if not all(cell.isascii() and cell.isprintable() for row in (columns, *rows) for cell in row):
        return None
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    widths[-1] = min(widths[-1], width - sum(widths[:-1]) - len(GAP) * (len(widths) - 1))
    if widths[-1] < len(columns[-1]):
        return None
    return [
        GAP.join(_fitted(cell, size) for cell, size in zip(row, widths, strict=True)).rstrip()
        for row in (columns, *rows)
    ]


def _fitted(cell: str, size: int) -> str:
    return cell.ljust(size) if len(cell) <= size else cell[: size - 1] + "…"


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, color: bool, folds: bool = False) -> None:
    """Prints a table on stdout. In a terminal the last column is cut to fit, or folded; in a pipe nothing is cut."""
    terminal = sys.stdout.isatty()
    rows = [[one_line(cell) for cell in row] for row in rows]
    lines = None if terminal and folds else _plain_lines(columns, rows, _width() if terminal else PIPE_WIDTH)
    if lines is not None:
        say(lines[0], bold=terminal and os.environ.get("TERM", "dumb") != "dumb")
        if lines[1:]:
            say_text("\n".join(lines[1:]))
    elif terminal:
        rich_console(sys.stdout, no_color=not color).print(_table(columns, rows, folds=folds))
    else:
        say_text("\n".join(captured(_table(columns, rows))))


def captured(*renderables: "RenderableType") -> list[str]:
    """The lines that are printed in a pipe."""
    printer = pipe_console()
    with printer.capture() as capture:
        printer.print(*renderables)
    return [line.rstrip() for line in capture.get().split("\n")[:-1]]


def _width() -> int:
    return shutil.get_terminal_size().columns
