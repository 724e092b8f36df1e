"""Results of analyses on stdout or in a file: tables for people, exact values for programs.

Theory of operation
    A table for people fits the terminal: texts are shortened in the middle, and columns that do not fit are left out
    from the right and named below. In a pipe all columns are there, and texts are shortened only if they are very
    long. Columns without any value are left out. JSON, YAML, CSV and files have everything, unrounded, with the
    columns' own names, which say the unit; what the reader must know then goes to stderr.
"""

import csv
import io
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kinetoctl.output import units
from kinetoctl.output.console import PIPE_WIDTH
from kinetoctl.output.documents import emit
from kinetoctl.output.values import NOTHING, exact, heading, human, is_number
from kinetoctl.settings import Settings

if TYPE_CHECKING:
    from kineto_trace.analysis.result import Result

PIPE_TEXT_WIDTH = 120
SHORTEST_TEXT = 24
GAP = 2  # between columns


@dataclass(frozen=True, slots=True)
class _Shown:
    """One column as texts."""

    title: str
    cells: Sequence[str]
    number: bool

    def width(self, text_width: int) -> int:
        """In a terminal, if texts have at most text_width characters."""
        widest = max((len(cell) for cell in self.cells), default=0)
        return max(len(self.title), widest if self.number else min(widest, text_width))


def show_results(results: Mapping[str, "Result"], settings: Settings, *, limit: int = 0, title: bool = True) -> None:
    """Several results under their names. limit: rows of each table for people; 0: all."""
    if settings.output == "table":
        for place, (name, result) in enumerate(results.items()):
            if title:
                _print_title(("\n" if place else "") + name.replace("_", " "), settings)
            print_result(result, settings, limit=limit)
        return
    if settings.output == "csv" and len(results) > 1:
        raise click.UsageError(f"CSV holds one table: name one --view of {', '.join(results)}")
    for result in results.values():
        tell_notes(result.notes, settings)
    if settings.output == "csv":
        for result in results.values():
            click.echo(csv_text(result), nl=False)
    else:
        emit({name: exact(_limited(result.rows(), limit)) for name, result in results.items()}, settings.output)


def show_result(result: "Result", settings: Settings, *, limit: int = 0) -> None:
    """One result without its name: a table, CSV, or a list of objects."""
    if settings.output == "table":
        print_result(result, settings, limit=limit)
        return
    tell_notes(result.notes, settings)
    if settings.output == "csv":
        click.echo(csv_text(result), nl=False)
    else:
        emit(exact(_limited(result.rows(), limit)), settings.output)


def tell_notes(notes: Iterable[str], settings: Settings) -> None:
    """On stderr, beside a form for programs."""
    for note in () if settings.quiet else notes:
        click.echo(f"note: {note}", err=True)


def csv_text(result: "Result") -> str:
    """A line of names and one per row; lists are JSON-like texts, missing values empty."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([column.name for column in result.columns])
    columns = [
        [exact(value) for value in result.table.column(place).to_pylist()] for place in range(len(result.columns))
    ]
    writer.writerows(zip(*columns, strict=True))
    return stream.getvalue()


def _limited(rows: list[Any], limit: int) -> list[Any]:
    return rows[:limit] if limit else rows


def print_result(result: "Result", settings: Settings, *, limit: int = 0) -> None:
    """A table for people, with what is left out and the notes below."""
    count = min(limit, len(result)) if limit else len(result)
    if not count:
        click.echo("(nothing)")
    else:
        _print_columns(_columns(result, count), settings)
    if count < len(result):
        click.echo(f"… {len(result) - count:,} more rows: --limit 0 shows all")
    for note in result.notes:
        click.echo(f"note: {note}")


def _columns(result: "Result", count: int) -> list[_Shown]:
    shown = []
    head = result.table.slice(0, count)
    for place, column in enumerate(result.columns):
        values = head.column(place).to_pylist()
        cells = [human(value, column.unit) for value in values]
        if len(result.columns) > 1 and all(cell == NOTHING for cell in cells):
            continue
        shown.append(_Shown(heading(column.name, column.unit), cells, is_number(values)))
    return shown or [
        _Shown(heading(column.name, column.unit), [NOTHING] * count, False) for column in result.columns[:1]
    ]


def _print_title(text: str, settings: Settings) -> None:
    Console(file=sys.stdout, no_color=not settings.color, highlight=False, soft_wrap=True).print(
        Text(text, style="bold cyan" if sys.stdout.isatty() else "")
    )


def _print_columns(columns: list[_Shown], settings: Settings) -> None:
    if not sys.stdout.isatty():
        console = Console(file=sys.stdout, width=PIPE_WIDTH, color_system=None, highlight=False)
        with console.capture() as capture:
            console.print(_table(columns, PIPE_TEXT_WIDTH))
        click.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))
        return
    console = Console(file=sys.stdout, no_color=not settings.color, highlight=False)
    fitting, text_width = fit(columns, console.width)
    console.print(_table(fitting, text_width))
    left_out = [column.title for column in columns if column not in fitting]
    if left_out:
        click.echo(f"… more columns: {', '.join(left_out).lower()} (--columns, a wider terminal, or -o csv)")


def fit(columns: Sequence[_Shown], width: int) -> tuple[list[_Shown], int]:
    """The columns that fit into a terminal of this width, from the left, and how wide their texts may be."""
    chosen: list[_Shown] = []
    for column in columns:
        needed = sum(each.width(SHORTEST_TEXT) + GAP for each in (*chosen, column)) - GAP
        if needed > width and chosen:
            break
        chosen.append(column)
    texts = [column for column in chosen if not column.number]
    fixed = sum(column.width(0) + GAP for column in chosen if column.number) - GAP
    text_width = (width - fixed) // max(len(texts), 1) - GAP
    while texts and sum(each.width(text_width + 1) + GAP for each in chosen) - GAP <= width and text_width < width:
        text_width += 1
    return chosen, max(text_width, 8)


def _table(columns: Sequence[_Shown], text_width: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
    for column in columns:
        table.add_column(column.title, no_wrap=True, justify="right" if column.number else "left")
    cells = [
        column.cells if column.number else [units.shortened(_one_line(cell), text_width) for cell in column.cells]
        for column in columns
    ]
    for row in zip(*cells, strict=True):
        table.add_row(*(Text(cell) for cell in row))
    return table


def _one_line(text: str) -> str:
    return " ".join(text.split()) if "\n" in text else text
