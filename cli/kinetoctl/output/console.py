"""Rich consoles for stdout (results) and stderr (progress), and tables that survive a pipe."""

import sys
from collections.abc import Sequence

import click
from rich.console import Console, OverflowMethod
from rich.table import Table
from rich.text import Text

PIPE_WIDTH = 100_000  # nothing is cut when no terminal reads it


def stdout_console(*, color: bool) -> Console:
    """The console for results."""
    return Console(file=sys.stdout, no_color=not color, highlight=False, soft_wrap=True)


def stderr_console(*, color: bool) -> Console:
    """The console for progress and messages."""
    return Console(file=sys.stderr, no_color=not color, highlight=False, soft_wrap=True)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, folds: bool = False) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for position, column in enumerate(columns):
        last = position == len(columns) - 1
        overflow: OverflowMethod = "ellipsis" if last and not folds else "fold"
        table.add_column(column, no_wrap=not (last and folds), overflow=overflow, min_width=len(column))
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, color: bool, folds: bool = False) -> None:
    """A table on stdout. In a terminal the last column is cut to fit, or folded; in a pipe nothing is."""
    if sys.stdout.isatty():
        Console(file=sys.stdout, no_color=not color, highlight=False).print(_table(columns, rows, folds=folds))
        return
    console = Console(file=sys.stdout, width=PIPE_WIDTH, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(_table(columns, rows))
    click.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))
