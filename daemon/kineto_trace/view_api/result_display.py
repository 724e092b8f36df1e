"""Results and views as text for terminals and as HTML for notebooks: the first rows, and how many more there are."""

from collections.abc import Mapping, Sequence
from typing import Any

from kineto_trace.base import notebook_html as html
from kineto_trace.base.quantities import shortened, times
from kineto_trace.base.visible_text import one_line
from kineto_trace.view_api.cell_texts import cell, headings, unit
from kineto_trace.view_api.result_data import ResultColumn, ResultData

TEXT_ROWS, TEXT_WIDTH, TEXT_CELL = 5, 110, 32
HTML_ROWS = 20
LIST_COLUMNS = 11  # a single row with more than these is a list
MAX_NOTES = 8
MAX_NOTE = 300
GAP = "  "
_NUMBERS = ("int", "float")


def result_text(result: ResultData) -> str:
    """Returns the size of a result and its first rows, as far as they fit into TEXT_WIDTH characters."""
    size = f"{times(len(result), 'row')}, {times(len(result.columns), 'column')}"
    notes = f", {times(len(result.notes), 'note')}" if result.notes else ""
    failure = f", {_line(result.failure)}" if result.failure else ""
    head = f"<Result {_line(result.view)}: {size}{notes}{failure}>"
    lines = _text_table(result) if len(result) else []
    left = len(result) - TEXT_ROWS
    return "\n".join([head, *lines, *([f"… {left:,} more rows"] if left > 0 else [])])


def result_html(result: ResultData) -> str:
    """Returns the first rows of a result with its notes for notebooks."""
    shown = _with_values(result)
    cells = _cells(result, shown, HTML_ROWS)
    titles = headings(shown)
    if len(result) == 1 and len(shown) > LIST_COLUMNS:
        table = html.facts((titles[column.name], values[0]) for column, values in zip(shown, cells, strict=True))
    else:
        numbers = [column.type in _NUMBERS for column in shown]
        table = html.table([titles[c.name] for c in shown], zip(*cells, strict=True), numbers=numbers)
    return str(html.title(f"{result.view}: {times(len(result), 'row')}") + table + html.notes(_remarks(result, shown)))


def view_html(name: str, description: str, options: Mapping[str, Any], columns: Sequence[ResultColumn]) -> str:
    """Returns what a view computes, with its options and columns, for notebooks."""
    parts = [html.title(name), html.notes(description.splitlines())]
    parts += (
        [html.table(("option", "default"), [(key, repr(value)) for key, value in options.items()])] if options else []
    )
    meanings = [(column.name, unit(column), column.meaning) for column in columns]
    return "".join(map(str, [*parts, html.table(("column", "unit", "meaning"), meanings)]))


def _with_values(result: ResultData) -> list[ResultColumn]:
    """Returns the columns that have a value; all of them if none has."""
    found = [
        column
        for place, column in enumerate(result.columns)
        if result.table.column(place).null_count < max(len(result), 1)
    ]
    return found or list(result.columns)


def _cells(result: ResultData, columns: Sequence[ResultColumn], rows: int) -> list[list[str]]:
    """Returns the texts of the first rows, column by column."""
    places = [result.columns.index(column) for column in columns]
    head = result.table.slice(0, rows)
    return [
        [cell(value, column) for value in head.column(place).to_pylist()]
        for place, column in zip(places, columns, strict=True)
    ]


def _remarks(result: ResultData, shown: Sequence[ResultColumn]) -> list[str]:
    left, empty = len(result) - HTML_ROWS, len(result.columns) - len(shown)
    found = [f"… {left:,} more rows: to_pandas(), rows() and table have all"] if left > 0 else []
    found += [f"{times(empty, 'column')} without a value {'is' if empty == 1 else 'are'} left out"] if empty else []
    found += [_line(result.failure)] if result.failure else []
    found += [f"note: {_line(note)}" for note in result.notes[:MAX_NOTES]]
    more = len(result.notes) - MAX_NOTES
    return [*found, *([f"and {times(more, 'more note')}"] if more > 0 else [])]


def _text_table(result: ResultData) -> list[str]:
    """Returns the lines of a table with the columns that fit, from the left, and the names of the others."""
    columns = _with_values(result)
    shown: list[list[str]] = []
    width = 0
    for column, values in zip(columns, _cells(result, columns, TEXT_ROWS), strict=True):
        texts = [one_line(shortened(text, TEXT_CELL)) for text in (headings(columns)[column.name], *values)]
        longest = max(map(len, texts))
        width += longest + len(GAP)
        if width > TEXT_WIDTH and shown:
            break
        right = column.type in _NUMBERS
        shown.append([text.rjust(longest) if right else text.ljust(longest) for text in texts])
    lines = [GAP.join(parts).rstrip() for parts in zip(*shown, strict=True)]
    rest = ", ".join(column.name for column in columns[len(shown) :])
    return [*lines, *([shortened(f"… more columns: {_line(rest)}", TEXT_WIDTH)] if rest else [])]


def _line(text: str) -> str:
    return one_line(shortened(text, MAX_NOTE))
