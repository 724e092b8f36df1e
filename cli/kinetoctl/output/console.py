"""Rich consoles for stdout (results) and stderr (progress), and tables that survive a pipe."""

import os
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console, OverflowMethod
    from rich.table import Table

GAP = "  "  # between two columns
PIPE_WIDTH = 100_000  # nothing is cut when no terminal reads it


def stdout_console(*, color: bool) -> "Console":
    """The console for results."""
    from rich.console import Console  # 30 ms, which plain tables do without

    return Console(file=sys.stdout, no_color=not color, highlight=False, soft_wrap=True)


def stderr_console(*, color: bool) -> "Console":
    """The console for progress and messages."""
    from rich.console import Console

    return Console(file=sys.stderr, no_color=not color, highlight=False, soft_wrap=True)


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
    """The lines as Rich would make them, the last column cut to fit.

    None where only Rich can: a column must fold, or a cell has characters whose width only it knows.
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
    """A table on stdout. In a terminal the last column is cut to fit, or folded; in a pipe nothing is."""
    terminal = sys.stdout.isatty()
    lines = None if terminal and folds else _plain_lines(columns, rows, _width() if terminal else PIPE_WIDTH)
    if lines is not None:
        if terminal and os.environ.get("TERM", "dumb") != "dumb":
            lines[0] = click.style(lines[0], bold=True)
        click.echo("\n".join(lines))
        return
    from rich.console import Console

    if terminal:
        Console(file=sys.stdout, no_color=not color, highlight=False).print(_table(columns, rows, folds=folds))
        return
    console = Console(file=sys.stdout, width=PIPE_WIDTH, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(_table(columns, rows))
    click.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))


def _width() -> int:
    return shutil.get_terminal_size().columns
