"""Lists of processes or captures: columns, orders, one row each, printed once or whenever something has changed.

Theory of operation
    What kind of list it is, is a value (`ListKind`); commands give entries of it. A watch asks for the entries again
    and again: a terminal shows the whole table, redrawn, and keeps the last one; elsewhere an entry is a line when it
    comes, changes or goes. Figures that change all the time, such as an age, are no change.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kinetoctl.base.common_options import CommonOptions
from kinetoctl.output.cell_values import NOTHING
from kinetoctl.output.console import GAP, print_table, rich_console, say, say_text, table_lines
from kinetoctl.output.json_yaml import as_json, as_yaml, emit

CHANGE = "CHANGE"
ADDED, CHANGED, GONE = "added", "changed", "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class ListColumn:
    """A column. wide: only with -o wide; optional: only if an entry has a value; moves: it changes all the time."""

    title: str
    cell: Callable[[Any], str]
    wide: bool = False
    optional: bool = False
    moves: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ListKind:
    """A kind of list.

    key: what tells an item from others of its host, whatever its state. document: the item for JSON. orders: what
    --sort names: the key, and whether the largest comes first.
    """

    columns: Sequence[ListColumn]
    key: Callable[[Any], tuple[Any, ...]]
    document: Callable[[Any], dict[str, Any]]
    orders: Mapping[str, tuple[Callable[[Any], Any], bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One item. host: its name, if there are several hosts; place: what JSON says of the host."""

    item: Any
    host: str = ""
    place: Mapping[str, str]


def ordered(entries: Sequence[Entry], kind: ListKind, order: str | None, *, reverse: bool) -> list[Entry]:
    """The entries by one of kind.orders, or as they came; those that are equal stay as they came."""
    if order is None:
        return list(reversed(entries)) if reverse else list(entries)
    key, largest_first = kind.orders[order]
    return sorted(entries, key=lambda entry: key(entry.item), reverse=largest_first is not reverse)


def show(entries: Sequence[Entry], kind: ListKind, settings: CommonOptions) -> None:
    """Prints the entries once, in the format of --output."""
    if settings.output == "table":
        print_table(*_table(entries, kind, settings), color=settings.color)
    else:
        emit([_document(entry, kind) for entry in entries], settings.output)


def watch(load: Callable[[], Sequence[Entry]], kind: ListKind, settings: CommonOptions, interval_s: float) -> None:
    """Shows the entries again every interval_s seconds, or what has changed, until Ctrl-C."""
    if settings.output == "table" and sys.stdout.isatty():
        _redraw(load, kind, settings, interval_s)
        return
    with contextlib.suppress(KeyboardInterrupt):  # how one ends it
        known: dict[tuple[Any, ...], Entry] = {}
        first = True
        while True:
            entries = load()
            found = {_key(entry, kind): entry for entry in entries}
            changes = list(_changes(known, found, kind))
            _print_changes(changes, kind, settings, heading=first)
            known, first = found, first and not changes
            time.sleep(interval_s)


def _redraw(load: Callable[[], Sequence[Entry]], kind: ListKind, settings: CommonOptions, interval_s: float) -> None:
    from rich.live import Live
    from rich.text import Text

    console = rich_console(sys.stdout, no_color=not settings.color)
    entries: Sequence[Entry] = ()
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live,
    ):
        while True:
            entries = load()
            columns, rows = _table(entries, kind, settings)
            lines = table_lines(columns, rows, console.size.width)
            live.update(Text("\n".join(lines), no_wrap=True), refresh=True)
            time.sleep(interval_s)
    show(entries, kind, settings)


def _key(entry: Entry, kind: ListKind) -> tuple[Any, ...]:
    return entry.host, *kind.key(entry.item)


def _changes(
    known: Mapping[tuple[Any, ...], Entry], found: Mapping[tuple[Any, ...], Entry], kind: ListKind
) -> Iterator[tuple[str, Entry]]:
    for key, entry in found.items():
        before = known.get(key)
        if before is None:
            yield ADDED, entry
        elif _steady(before, kind) != _steady(entry, kind):
            yield CHANGED, entry
    for key, entry in known.items():
        if key not in found:
            yield GONE, entry


def _steady(entry: Entry, kind: ListKind) -> list[str]:
    return [column.cell(entry.item) for column in kind.columns if not column.moves]


def _print_changes(
    changes: Sequence[tuple[str, Entry]], kind: ListKind, settings: CommonOptions, *, heading: bool
) -> None:
    if settings.output == "json":
        for change, entry in changes:
            say_text(as_json({"change": change, **_document(entry, kind)}))
        return
    if settings.output == "yaml":
        for change, entry in changes:
            say_text(f"---\n{as_yaml({'change': change, **_document(entry, kind)})}", nl=False)
        return
    columns = [column for column in kind.columns if settings.wide or not column.wide]
    if heading and changes:
        host = ["HOST"] if changes[0][1].host else []
        say(GAP.join([CHANGE, *host, *(column.title for column in columns)]))
    for change, entry in changes:
        say(GAP.join([change, *([entry.host] if entry.host else ()), *(column.cell(entry.item) for column in columns)]))


def _document(entry: Entry, kind: ListKind) -> dict[str, Any]:
    return {**entry.place, **kind.document(entry.item)}


def _table(entries: Sequence[Entry], kind: ListKind, settings: CommonOptions) -> tuple[list[str], list[list[str]]]:
    """Titles and rows."""
    shown = [
        (column.title, cells)
        for column, cells in shown_columns([entry.item for entry in entries], kind, wide=settings.wide)
    ]
    if any(entry.host for entry in entries):
        shown.insert(0, ("HOST", [entry.host for entry in entries]))
    return [title for title, _ in shown], [list(row) for row in zip(*(cells for _, cells in shown), strict=True)]


def shown_columns(items: Sequence[Any], kind: ListKind, *, wide: bool) -> list[tuple[ListColumn, list[str]]]:
    """The columns of a list of these items, each with its cells. wide: all of them, as with -o wide."""
    cells = [(column, [column.cell(item) for item in items]) for column in kind.columns if wide or not column.wide]
    return [
        (column, values) for column, values in cells if not column.optional or any(value != NOTHING for value in values)
    ]
