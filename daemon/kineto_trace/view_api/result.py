"""The result of an analysis: a table with units, ready for Arrow, pandas, polars, notebooks, SQL, CSV and JSON.

Frames of other libraries have types that keep integers and missing values as they are. pandas and polars are optional
and imported on demand.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from kineto_trace.base import visible_text as html
from kineto_trace.base.quantities import more, shortened, times
from kineto_trace.base.visible_text import one_line
from kineto_trace.view_api.cell_texts import cells, headings, unit
from kineto_trace.view_api.result_data import ARROW_TYPES, ResultColumn, ResultData, Type, columns, needed

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    from matplotlib.axes import Axes

__all__ = ["ARROW_TYPES", "Result", "ResultColumn", "Type", "columns", "make_result", "make_table"]
TEXT_ROWS, TEXT_WIDTH, TEXT_CELL = 5, 110, 32
HTML_ROWS = 20
LIST_COLUMNS = 11  # a single row with more is shown as a list
MAX_NOTES = 8
MAX_NOTE = 300
GAP = "  "
MOMENT = pa.timestamp("ns", "UTC")
_NUMBERS = ("int", "float")


@dataclass(frozen=True, slots=True)
class Result(ResultData):
    """The result of one view.

    notes: important for the reader (missing data, assumptions).
    failure: why a view that was computed beside others has no rows; "" if it did not fail.
    """

    def to_arrow(self) -> pa.Table:
        """Returns the table with Unix times as timestamps (ns, UTC).

        The metadata of each field has its `unit` and `meaning`, that of the schema `view` and `notes` (a JSON list).
        """
        table = self.table
        for place, column in enumerate(self.columns):
            if column.unit == "ns" and table.schema.field(place).type == pa.int64():
                field = table.schema.field(place).with_type(MOMENT)
                table = table.set_column(place, field, table.column(place).cast(MOMENT))
        about = {"view": self.view, "notes": json.dumps(list(self.notes))}
        return table.replace_schema_metadata({**(table.schema.metadata or {}), **about})

    def to_pandas(self) -> "pd.DataFrame":
        """Returns a pandas data frame; its attrs have `units` (by column), `view` and `notes`.

        Types are pandas' nullable ones (Int64, Float64, boolean, string), so that integers stay integers and missing
        values are pd.NA; Unix times are datetimes in UTC; lists are arrays. Raises TraceError without pandas.
        """
        pd = needed("pandas")
        types = {
            pa.int64(): pd.Int64Dtype(),
            pa.float64(): pd.Float64Dtype(),
            pa.bool_(): pd.BooleanDtype(),
            pa.string(): pd.StringDtype(),
        }
        frame = self.to_arrow().to_pandas(types_mapper=types.get)
        units = {column.name: column.unit for column in self.columns}
        frame.attrs.update(view=self.view, notes=list(self.notes), units=units)
        return frame

    def to_polars(self) -> "pl.DataFrame":
        """Returns a polars data frame; Unix times are datetimes in UTC. Raises TraceError without polars.

        polars keeps no units: they are in `columns`.
        """
        return needed("polars").from_arrow(self.to_arrow())

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draws the result with matplotlib and returns the axes: `ax` if given, otherwise those of a new figure.

        Values over time are lines, parts of a whole are bars, and spreads of values are boxes or histograms. Times and
        sizes have the unit that fits the largest. Raises ViewError for a view that has no such shape (the error lists
        those that have one) and for a result without rows, TraceError without matplotlib.
        """
        from kineto_trace.view_api.result_plots import plot

        return plot(self, ax)

    def __repr__(self) -> str:
        return result_text(self)

    def _repr_html_(self) -> str:
        """Called by notebooks."""
        return result_html(self)


def make_result(
    view: str, schema: Sequence[ResultColumn], values: Mapping[str, Any], notes: Sequence[str] = ()
) -> Result:
    """Makes a result from an array (of numpy or Arrow) or list for each column of the schema. NaN becomes missing.

    Raises ValueError if columns are missing, unknown or differ in length.
    """
    return Result(view, tuple(schema), make_table(view, schema, values), tuple(notes))


def make_table(view: str, schema: Sequence[ResultColumn], values: Mapping[str, Any]) -> pa.Table:
    """Makes the table of a result; the metadata of its fields has units and meanings. Raises ValueError."""
    if set(values) != {column.name for column in schema}:
        wrong = sorted(set(values) ^ {column.name for column in schema})
        raise ValueError(f"view {view}: columns do not match the schema: {', '.join(wrong)}")
    arrays = [_arrow(values[column.name], ARROW_TYPES[column.type]) for column in schema]
    fields = [
        pa.field(column.name, ARROW_TYPES[column.type], metadata={"unit": column.unit, "meaning": column.meaning})
        for column in schema
    ]
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def _arrow(values: Any, kind: pa.DataType) -> pa.Array | pa.ChunkedArray:
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return values if values.type == kind else values.cast(kind)
    try:
        return pa.array(values, kind, from_pandas=True)
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
        return pa.array([_valid(value) for value in values], kind, from_pandas=True)


def _valid(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return [_valid(item) for item in value] if isinstance(value, (list, tuple)) else value


def result_text(result: ResultData) -> str:
    """Returns the size of a result and as many of its first rows as fit into TEXT_WIDTH characters."""
    size = f"{times(len(result), 'row')}, {times(len(result.columns), 'column')}"
    notes = f", {times(len(result.notes), 'note')}" if result.notes else ""
    failure = f", {_line(result.failure)}" if result.failure else ""
    head = f"<Result {_line(result.view)}: {size}{notes}{failure}>"
    lines = _text_table(result) if len(result) else []
    left = len(result) - TEXT_ROWS
    return "\n".join([head, *lines, *([f"… {more(left, 'row')}"] if left > 0 else [])])


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
    """Returns the description of a view, its options and columns, for notebooks."""
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


def _cells(result: ResultData, columns: Sequence[ResultColumn], rows: int, most: int = 0) -> list[list[str]]:
    """Returns the texts of the first rows, column by column. most: as for cells()."""
    places = [result.columns.index(column) for column in columns]
    head = result.table.slice(0, rows)
    return [cells(head.column(place).to_pylist(), column, most) for place, column in zip(places, columns, strict=True)]


def _remarks(result: ResultData, shown: Sequence[ResultColumn]) -> list[str]:
    left, empty = len(result) - HTML_ROWS, len(result.columns) - len(shown)
    found = [f"… {more(left, 'row')}: use to_pandas(), rows() or table to get them all"] if left > 0 else []
    found += [f"{times(empty, 'column')} without a value {'is' if empty == 1 else 'are'} left out"] if empty else []
    found += [_line(result.failure)] if result.failure else []
    found += [f"note: {_line(note)}" for note in result.notes[:MAX_NOTES]]
    unsaid = len(result.notes) - MAX_NOTES
    return [*found, *([f"and {more(unsaid, 'note')}"] if unsaid > 0 else [])]


def _text_table(result: ResultData) -> list[str]:
    """Returns the lines of a table with the columns that fit, from the left, and the names of the others."""
    columns = _with_values(result)
    shown: list[list[str]] = []
    width = 0
    for column, values in zip(columns, _cells(result, columns, TEXT_ROWS, TEXT_CELL), strict=True):
        texts = [one_line(text) for text in (shortened(headings(columns)[column.name], TEXT_CELL), *values)]
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
