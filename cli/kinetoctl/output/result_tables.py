"""Results of analyses on stdout or in a file: tables for people, exact values for programs.

Theory of operation
    A table for people fits the terminal: texts are shortened in the middle, and columns that do not fit are left out
    from the right and named below. In a pipe, and with -o wide, all columns are printed, and texts are shortened only
    if they are very long. Columns without any value are left out. JSON, YAML, CSV and files have everything, unrounded,
    with the columns' own names, which give the unit; notes then go to stderr.
"""

import json
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click
from kineto_trace.base.visible_text import one_line, visible
from kineto_trace.view_api.cell_texts import VERDICT, view_title
from rich.table import Table
from rich.text import Text

from kinetoctl.base.common_options import CommonOptions
from kinetoctl.client.result_rows import plain_rows
from kinetoctl.errors import write_errors
from kinetoctl.output import units
from kinetoctl.output.console import captured, emit, rich_console, say, say_text, stdout_console
from kinetoctl.output.units import NOTHING, heading, headings, human, is_number

if TYPE_CHECKING:
    from kineto_trace.view_api.result import Result, ResultColumn
    from rich.console import Console

SCHEMA_VERSION = 1  # of results as JSON; a new one if anything is taken away or means something else
PIPE_TEXT_WIDTH = 120
SHORTEST_TEXT = 36
GAP = 2  # between columns
PROSE = ("advice", "evidence")  # columns that hold sentences
SAVING = {"title", "saving_us", "saving_pct", "saving_per_step_us", "uncertainty_pct", "guess"}  # of findings
MEANING, ANSWERS = "MEANING", ("WHAT", "CAUSE")  # titles of columns
LEAST_PCT = 0.05  # of an uncertainty that is shown
HIDDEN = ("unit", "finding")  # beside these: of other columns' figures, and a short form of the title
PROSE_WIDTH = 100  # in a pipe
LIST_COLUMNS = 11  # a single row with more than these is a list


@dataclass(frozen=True, slots=True)
class _Shown:
    """One column as texts."""

    title: str
    cells: Sequence[str]
    number: bool

    def width(self, text_width: int) -> int:
        """Its width in a terminal if texts have at most text_width characters."""
        widest = max((len(cell) for cell in self.cells), default=0)
        return max(len(self.title), widest if self.number else min(widest, text_width))


def show_results(
    results: Mapping[str, "Result"],
    settings: CommonOptions,
    *,
    limit: int = 0,
    limits: Mapping[str, int] | None = None,
    title: bool = True,
) -> None:
    """Prints results under their names. limit: rows of each, 0 for all; limits: exceptions for tables for people."""
    if settings.output == "table":
        results = dict(results)
        if (first := results.pop(VERDICT, None)) is not None:
            _print_verdict(first, settings)
        told: set[str] = set()
        for place, (name, result) in enumerate(results.items()):
            if title:
                _print_title(("\n" if place or first else "") + _title(name, result), settings)
            new = tuple(note for note in result.notes if note not in told)
            print_result(replace(result, notes=new), settings, limit=(limits or {}).get(name, limit))
            told.update(new)
        return
    if settings.output == "csv":
        _print_csv(one_of(results, "CSV"), settings, limit)
        return
    for result in results.values():
        tell_notes(remarks(result), settings)
    emit(documents(results, limit), settings.output)


def show_result(result: "Result", settings: CommonOptions, *, limit: int = 0) -> None:
    """Prints one result without its name: a table, CSV, or a list of objects."""
    if settings.output == "table":
        print_result(result, settings, limit=limit)
    elif settings.output == "csv":
        _print_csv(result, settings, limit)
    else:
        tell_notes(result.notes, settings)
        emit(plain_rows(limited(result, limit)), settings.output)


def documents(results: Mapping[str, "Result"], limit: int = 0) -> dict[str, Any]:
    """For each name: columns with units, notes and rows, and why a view failed, as values for JSON.

    docs/report.schema.json describes one of them.
    """
    return {
        name: {
            "schema_version": SCHEMA_VERSION,
            "rows": plain_rows(limited(result, limit)),
            **({"failure": result.failure} if result.failure else {}),
            "notes": list(result.notes),
            "columns": [column._asdict() for column in result.columns],
        }
        for name, result in results.items()
    }


def one_of(results: Mapping[str, "Result"], what: str) -> "Result":
    """The only result. Raises UsageError if there are several."""
    if len(results) > 1:
        raise click.UsageError(f"{what} can only hold one table: choose one of {', '.join(results)}")
    return next(iter(results.values()))


def limited(result: "Result", limit: int) -> "Result":
    """The result's first rows; limit 0 for all."""
    return replace(result, table=result.table.slice(0, limit)) if limit else result


def _print_csv(result: "Result", settings: CommonOptions, limit: int) -> None:
    from kineto_trace.view_api.result_files import csv_bytes

    tell_notes(result.notes, settings)
    say_text(csv_bytes(limited(result, limit)).decode(), nl=False)


def remarks(result: "Result") -> list[str]:
    """What is said about a result beside its rows: its notes, and why its view failed."""
    return [*result.notes, *([result.failure] if result.failure else [])]


def tell_notes(notes: Iterable[str], settings: CommonOptions) -> None:
    """Prints notes on stderr, beside a format for programs."""
    for note in () if settings.quiet else notes:
        say(f"note: {note}", err=True)


def print_result(result: "Result", settings: CommonOptions, *, limit: int = 0) -> None:
    """Prints a table for people, with the notes and what is left out below."""
    count = min(limit, len(result)) if limit else len(result)
    if result.failure:
        say(result.failure)
    elif not count:
        say("(nothing)")
    elif any(column.name in PROSE for column in result.columns):
        _print_records(result, count, settings)
    elif len(result) == 1 and len(result.columns) > LIST_COLUMNS:
        _print_list(_columns(result, count), settings)
    else:
        _print_columns(_columns(result, count), settings)
    if count < len(result):
        say(f"… {len(result) - count:,} more rows (--limit 0 shows all)")
    for note in result.notes:
        say(f"note: {note}")


def _titles(result: "Result") -> list[str]:
    """The titles of the columns, no two alike; in queries, the user has chosen the names."""
    if result.view == "query":
        return [column.name.upper() for column in result.columns]
    return headings([(column.name, column.unit) for column in result.columns])


def _columns(result: "Result", count: int) -> list[_Shown]:
    shown = []
    head, titles = result.table.slice(0, count), _titles(result)
    for place, column in enumerate(result.columns):
        values = head.column(place).to_pylist()
        cells = [human(value, column.unit) for value in values]
        if len(result.columns) > 1 and all(cell == NOTHING for cell in cells):
            continue
        shown.append(_Shown(titles[place], cells, is_number(values)))
    return shown or [_Shown(title, [NOTHING] * count, False) for title in titles[:1]]


def _print_list(columns: Sequence[_Shown], settings: CommonOptions) -> None:
    """Prints the only row, one value per line."""
    console = stdout_console(color=settings.color and sys.stdout.isatty())
    width = max(len(column.title) for column in columns) + GAP
    for column in columns:
        title = column.title.lower().ljust(width)
        console.print(Text.assemble((title, "cyan" if sys.stdout.isatty() else ""), one_line(column.cells[0])))


def _print_records(result: "Result", count: int, settings: CommonOptions) -> None:
    """Prints each row as a heading with its figures, followed by its sentences and their subjects."""
    console = stdout_console(color=settings.color and sys.stdout.isatty())
    width = _prose_width(console)
    texts = [column.name for column in result.columns if column.type == "text" and column.name not in HIDDEN]
    title = "title" if "title" in texts else texts[0]
    figures = [c for c in result.columns if c.type not in ("text", "texts") and c.name not in ("rank", "place")]
    details = [c for c in result.columns if c.type in ("text", "texts") and c.name not in (title, *PROSE, *HIDDEN)]
    for row in result.table.slice(0, count).to_pylist():
        head = (one_line(human(row[title])), "bold")
        if row.keys() >= SAVING:
            console.print(Text.assemble(head))
            console.print(Text(f"    {_saving(row)}"))
        else:
            facts = _facts(row, figures)
            rank = f"rank {row['rank']}: " if "rank" in row else ""
            console.print(Text.assemble(rank, head, f"  {facts}" if facts else ""))
        for name in PROSE:
            if row.get(name):
                console.print(
                    Text(textwrap.fill(visible(row[name]), width, initial_indent="    ", subsequent_indent="    "))
                )
        for column in details:
            value = row[column.name] or []
            label = f"    {column.name.replace('_', ' ')}: "
            items = [_one_line(visible(item)) for item in ([value] if isinstance(value, str) else value)]
            for place, item in enumerate(units.shortened_apart(items, width - len(label))):
                console.print(Text((" " * len(label) if place else label) + item))


def _print_verdict(result: "Result", settings: CommonOptions) -> None:
    text = result.rows()[0][VERDICT]
    if text:
        console = stdout_console(color=settings.color)
        console.print(Text(textwrap.fill(visible(text), _prose_width(console)), style="bold"))


def _title(name: str, result: "Result") -> str:
    """The title of a view, with its name for --view where that differs; of a part of a comparison, its name."""
    title = view_title(name) if name == result.view else name
    return title if title.lower() == name.replace("_", " ") else f"{title} ({name})"


def _prose_width(console: "Console") -> int:
    return min(console.width, PROSE_WIDTH) if sys.stdout.isatty() else PROSE_WIDTH


def _facts(row: Mapping[str, Any], figures: Iterable["ResultColumn"]) -> str:
    unit = row.get("unit") or ""
    return ", ".join(
        f"{heading(column.name, column.unit).lower()} {human(row[column.name], column.unit or unit)}"
        for column in figures
        if row[column.name] is not None
    )


def _saving(row: Mapping[str, Any]) -> str:
    """What a finding promises, how sure that is, and its rank."""
    from kineto_trace.analysis.finding import ON_RANKS, percent, saving

    parts = [f"could {saving(row)}"] if row["saving_us"] else []
    parts += ["a rough estimate"] if row["guess"] and parts else []
    parts += [f"± {percent(row['uncertainty_pct'])}"] if (row["uncertainty_pct"] or 0.0) >= LEAST_PCT else []
    if "rank" in row:
        parts.append(f"most on rank {row['rank']}" if row["title"].endswith(ON_RANKS) else f"on rank {row['rank']}")
    return ", ".join(parts)


def _print_title(text: str, settings: CommonOptions) -> None:
    stdout_console(color=settings.color).print(Text(text, style="bold cyan" if sys.stdout.isatty() else ""))


def _print_columns(columns: list[_Shown], settings: CommonOptions) -> None:
    if settings.wide or not sys.stdout.isatty():
        say_text("\n".join(captured(_table(columns, PIPE_TEXT_WIDTH))))
        return
    console = rich_console(sys.stdout, no_color=not settings.color)
    fitting, text_width = fit(columns, console.width)
    if len(fitting) < len(columns):
        fitting, text_width = fit(answers_first(columns), console.width)
    console.print(_table(fitting, text_width))
    left_out = [column.title for column in columns if column not in fitting]
    if left_out:
        say(f"… more columns: {', '.join(left_out).lower()} (-o wide, --columns or a wider terminal)")


def answers_first(columns: Sequence[_Shown]) -> list[_Shown]:
    """For a narrow terminal: functions, lines and short names stay, and what a row means in general goes."""
    place = next((number for number, column in enumerate(columns) if column.title == MEANING), len(columns))
    before, meaning, behind = columns[:place], columns[place : place + 1], columns[place + 1 :]
    return [*before, *sorted(behind, key=lambda column: column.title not in ANSWERS), *meaning]


def fit(columns: Sequence[_Shown], width: int) -> tuple[list[_Shown], int]:
    """The columns that fit into a terminal of this width, from the left, and the width of their texts."""
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
        column.cells if column.number else units.shortened_apart(list(map(_one_line, column.cells)), text_width)
        for column in columns
    ]
    for row in zip(*cells, strict=True):
        table.add_row(*(Text(cell) for cell in row))
    return table


def _one_line(text: str) -> str:
    return one_line(" ".join(text.split()) if "\n" in text else text)


def save_results(
    results: Mapping[str, "Result"], settings: CommonOptions, *, limit: int = 0, named: bool = True
) -> None:
    """Writes the file that --output names atomically. Raises UsageError, NotWritten.

    limit: rows of each, 0 for all. named: whether JSON has the names and columns of the results or only the rows.
    """
    path = settings.file
    assert path is not None
    from kineto_trace.base.atomic_files import write_atomically
    from kineto_trace.view_api.result_files import write_result

    with write_errors(path):
        if settings.output == "json":
            (only,) = results.values() if not named else (None,)
            value = documents(results, limit) if only is None else plain_rows(limited(only, limit))
            write_atomically(path, json.dumps(value, indent=1, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        else:
            write_result(limited(one_of(results, str(path)), limit), path, settings.output)
    for result in results.values():
        tell_notes(remarks(result), settings)
    if not settings.quiet:
        count = sum(len(limited(result, limit)) for result in results.values())
        say(f"{path}: {count:,} {'row' if count == 1 else 'rows'}", err=True)
