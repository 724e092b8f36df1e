"""Results of analyses on stdout or in a file: tables for people, exact values for programs.

Theory of operation
    A table for people fits the terminal: texts are shortened in the middle, and columns that do not fit are left out
    from the right, MEANING first, and named below. Functions, files, lines and short names of causes always stay, and
    the first two are not shortened either: both together may take two lines. In a pipe, and with -o wide, all columns
    are printed, and texts are shortened only if they are very long. Columns without any value are left out. JSON, YAML,
    CSV and files have everything, unrounded, with the columns' own names, which give the unit, and with whole paths;
    notes then go to stderr.

    Below the verdict, a line of blocks shows the causes of the time of each GPU, or of the host, in different blocks,
    so that no colour is needed.
"""

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import click
from kineto_trace.base.quantities import more, shortened_apart
from kineto_trace.base.source_places import place_parts, short_place
from kineto_trace.base.visible_text import one_line, visible
from kineto_trace.view_api.cell_texts import PLACES, VERDICT, gain, percent, view_title
from rich.table import Table
from rich.text import Text

from kinetoctl.base.common_options import CommonOptions
from kinetoctl.client.result_rows import plain_rows
from kinetoctl.errors import write_errors
from kinetoctl.output.console import (
    captured,
    emit,
    filled,
    print_verdict,
    prose_width,
    rich_console,
    say,
    say_text,
    stdout_console,
)
from kinetoctl.output.units import NOTHING, heading, headings, human, is_number

if TYPE_CHECKING:
    from kineto_trace.view_api.result import Result, ResultColumn

SCHEMA_VERSION = 1  # of results as JSON; a new one if anything is taken away or means something else
PIPE_TEXT_WIDTH = 120
SHORTEST_TEXT, LEAST_TEXT = 36, 8  # of columns that are added, and of those that are left
GAP = 2  # between columns
PROSE = ("advice", "evidence")  # columns that hold sentences
# Columns of findings that one line says.
SAVING = {"finding", "title", "saving_us", "saving_pct", "saving_per_step_us", "uncertainty_pct", "guess"}
MEANING, ANSWERS = "MEANING", ("WHAT", "FUNCTION", "FILE", "LINE", "CAUSE")  # titles of columns
HIDDEN = ("unit", "finding")  # beside these: of other columns' figures, and a short form of the title
LIST_COLUMNS = 11  # a single row with more than these is a list
BARS, MAX_BARS = "time_causes", 16  # the view whose rows are bars, and how many of them
BLOCKS, ASCII_BLOCKS = "█▓▒░▚·", "#=+-:."  # one for each of the largest causes, the last one for the rest
LEAST_BAR, PIPE_BAR = 10, 80  # characters
OTHERS = "others"  # the cause of what is merged
COERCED = ("C.UTF-8", "C.utf8", "UTF-8")  # what Python sets LC_CTYPE to where LC_CTYPE or LANG is C (PEP 538)


@dataclass(frozen=True)
class _Shown:
    """One column as texts. places: whether cells may be places in source code, whose parts stay whole."""

    title: str
    cells: Sequence[str]
    number: bool
    places: bool = False

    def width(self, text_width: int) -> int:
        """Its width in a terminal if texts have at most text_width characters."""
        return max(len(self.title), self._widest if self.number else min(self._widest, self.text_width(text_width)))

    def text_width(self, text_width: int) -> int:
        """The length of its longest text: text_width, or more if the function or the file of a place is longer."""
        return max(text_width, self._widest_part)

    def fitted(self, text_width: int) -> list[str]:
        """The cells, shortened if they are too long, those that differ differently; a place in two lines instead."""
        width = self.text_width(text_width)
        short = shortened_apart(list(map(_one_line, self.cells)), width)
        places = [_place_lines(cell) if self.places and len(cell) > width else [] for cell in self.cells]
        return ["\n".join(map(_one_line, lines)) or cell for lines, cell in zip(places, short, strict=True)]

    @cached_property
    def _widest(self) -> int:
        return max(map(len, self.cells), default=0)

    @cached_property
    def _widest_part(self) -> int:
        return max((len(line) for cell in self.cells if self.places for line in _place_lines(cell)), default=0)


def _place_lines(text: str) -> list[str]:
    """A place in source code in two lines, the second one indented; nothing for other text."""
    return [part if not number else " " * GAP + part for number, part in enumerate(place_parts(text))]


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
            print_verdict(first.rows()[0][VERDICT] or "", color=settings.color)
            _print_bars(results.get(BARS), settings)
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
    if (left := len(result) - count) > 0:
        say(f"… {more(left, 'row')} (--limit 0 shows all)")
    for note in result.notes:
        _print_note(f"note: {note}")


def _print_note(text: str) -> None:
    """Prints a line, in a terminal in several if it is too long."""
    say_text(filled(one_line(text), prose_width(rich_console(sys.stdout))) if sys.stdout.isatty() else one_line(text))


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
        places = column.name in PLACES and result.view != "query"
        texts = [short_place(cell) for cell in cells] if places else cells
        shown.append(_Shown(titles[place], texts, is_number(values), places))
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
    width = prose_width(console)
    texts = [column.name for column in result.columns if column.type == "text" and column.name not in HIDDEN]
    title = "title" if "title" in texts else texts[0]
    figures = [c for c in result.columns if c.type not in ("text", "texts") and c.name not in ("rank", "place")]
    details = [c for c in result.columns if c.type in ("text", "texts") and c.name not in (title, *PROSE, *HIDDEN)]
    for row in result.table.slice(0, count).to_pylist():
        head = (one_line(human(row[title])), "bold")
        if row.keys() >= SAVING:
            console.print(Text(filled(head[0], width) if sys.stdout.isatty() else head[0], style=head[1]))
            console.print(Text(f"    {gain(row, several='rank' in row)}"))
        else:
            facts = _facts(row, figures)
            rank = f"rank {row['rank']}: " if "rank" in row else ""
            console.print(Text.assemble(rank, head, f"  {facts}" if facts else ""))
        for name in PROSE:
            if row.get(name):
                console.print(Text(filled(visible(row[name]), width, "    ")))
        for column in details:
            value = row[column.name] or []
            label = f"    {column.name.replace('_', ' ')}: "
            for place, item in enumerate(_in_lines(value, column.name, width - len(label))):
                console.print(Text((" " * len(label) if place else label) + item))


def _in_lines(value: str | Sequence[str], name: str, width: int) -> list[str]:
    """The texts of a column of this name, each shortened to the width; a place in one line or two."""
    texts = [_one_line(visible(item)) for item in ([value] if isinstance(value, str) else value)]
    parts = place_parts(texts[0]) if name in PLACES and texts else ()
    if parts:
        return [" ".join(parts)] if len(" ".join(parts)) <= width else list(parts)
    return shortened_apart(texts, width)


def _print_bars(result: "Result | None", settings: CommonOptions) -> None:
    if result is None or result.truncation:  # whose shares are not certain
        return
    console = stdout_console(color=settings.color)
    width = console.width if sys.stdout.isatty() else PIPE_BAR
    for place, line in enumerate(share_bars(result.rows(), width, BLOCKS if _has_blocks() else ASCII_BLOCKS)):
        console.print(Text(line if place else f"\n{line}"))


def _has_blocks() -> bool:
    """Whether stdout can show more than ASCII."""
    whole, characters, usual = (os.environ.get(name, "") for name in ("LC_ALL", "LC_CTYPE", "LANG"))
    named = whole or (characters if characters not in COERCED else "") or usual
    try:
        BLOCKS.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return named not in ("C", "POSIX")  # where Python would write UTF-8 all the same


def share_bars(rows: Sequence[Mapping[str, Any]], width: int, blocks: str = BLOCKS) -> list[str]:
    """Lines of blocks, one for each GPU or host, as long as its causes' shares of the time, and what the blocks mean.

    rows: of view time_causes. width: of a line, in characters. blocks: one for each of the largest causes, and one for
    the rest.
    """
    bars: dict[str, dict[str, float]] = {}
    total: dict[str, float] = {}
    with_gpu = len({(row.get("rank"), row["device"]) for row in rows}) > len({row.get("rank") for row in rows})
    for row in rows:
        rank = "" if row.get("rank") is None else f"rank {row['rank']} "
        gpu = f"GPU {row['device']} " if with_gpu and row["device"] is not None else ""
        for shares in (bars.setdefault(rank + gpu, {}), total):
            shares[row["cause"]] = shares.get(row["cause"], 0.0) + row["share_pct"]
    named = sorted((cause for cause in total if cause != OTHERS), key=lambda cause: -total[cause])[: len(blocks) - 1]
    rest = [cause for cause in total if cause not in named]
    marks = [*zip(blocks, ([cause] for cause in named), strict=False), *([(blocks[-1], rest)] if rest else [])]
    lead = max(map(len, bars)) if len(bars) > 1 else 0
    lines = []
    for label, shares in list(bars.items())[:MAX_BARS]:
        parts = [sum(shares.get(cause, 0.0) for cause in causes) for _, causes in marks]
        whole, room = sum(parts) or 1.0, max(width - lead, LEAST_BAR)
        ends = [round(room * end / whole) for end in accumulate(parts, initial=0.0)]
        pieces = (mark * (end - start) for (mark, _), start, end in zip(marks, ends, ends[1:], strict=False))
        lines.append(f"{label:{lead}}{''.join(pieces)}" if lead else "".join(pieces))
    if len(bars) > MAX_BARS:
        lines.append(f"and {len(bars) - MAX_BARS} more: kinetoctl report --view {BARS}")
    keys = [
        f"{mark} {'' if lead else f'{percent(sum(total[cause] for cause in causes))} '}"
        f"{OTHERS if causes is rest else causes[0].replace('_', ' ')}"
        for mark, causes in marks
    ]
    return [*lines, *_packed(keys, width)]


def _packed(texts: Sequence[str], width: int) -> list[str]:
    """The texts in as few lines of this width as they fit into."""
    lines: list[str] = []
    for text in texts:
        if lines and len(lines[-1]) + GAP + len(text) <= width:
            lines[-1] += " " * GAP + text
        else:
            lines.append(text)
    return lines


def _title(name: str, result: "Result") -> str:
    """The title of a view, with its name for --view where that differs; of a part of a comparison, its name."""
    title = view_title(name) if name == result.view else name
    return title if title.lower() == name.replace("_", " ") else f"{title} ({name})"


def _facts(row: Mapping[str, Any], figures: Iterable["ResultColumn"]) -> str:
    unit = row.get("unit") or ""
    return ", ".join(
        f"{heading(column.name, column.unit).lower()} {human(row[column.name], column.unit or unit)}"
        for column in figures
        if row[column.name] is not None
    )


def _print_title(text: str, settings: CommonOptions) -> None:
    stdout_console(color=settings.color).print(Text(text, style="bold cyan" if sys.stdout.isatty() else ""))


def _print_columns(columns: list[_Shown], settings: CommonOptions) -> None:
    if settings.wide or not sys.stdout.isatty():
        say_text("\n".join(captured(_table(columns, PIPE_TEXT_WIDTH))))
        return
    console = rich_console(sys.stdout, no_color=not settings.color)
    fitting, text_width = fit(columns, console.width)
    console.print(_table(fitting, text_width))
    left_out = [column.title for column in columns if column not in fitting]
    if left_out:
        _print_note(f"… more columns: {', '.join(left_out).lower()} (-o wide, --columns or a wider terminal)")


def fit(columns: Sequence[_Shown], width: int) -> tuple[list[_Shown], int]:
    """The columns that fit into a terminal of this width, in their order, and the width of their texts.

    Functions, lines and short names come first, then the columns from the left, and what a row means in general last.
    """
    chosen = [column for column in columns if column.title in ANSWERS]
    for column in sorted(columns, key=lambda column: column.title == MEANING):
        if column in chosen:
            continue
        if chosen and _total((*chosen, column), SHORTEST_TEXT) > width:
            break
        chosen.append(column)
    chosen.sort(key=columns.index)
    text_width = width
    while text_width > LEAST_TEXT and _total(chosen, text_width) > width:
        text_width -= 1
    return chosen, text_width


def _total(columns: Sequence[_Shown], text_width: int) -> int:
    """The width of the columns, with what is between them."""
    return sum(column.width(text_width) + GAP for column in columns) - GAP


def _table(columns: Sequence[_Shown], text_width: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
    for column in columns:
        table.add_column(column.title, no_wrap=True, justify="right" if column.number else "left")
    cells = [column.cells if column.number else column.fitted(text_width) for column in columns]
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
