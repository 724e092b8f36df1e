"""What an analysis answers: a table with units, ready for Arrow, pandas, polars, notebooks, SQL, CSV and JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from kineto_trace.view_api.result_data import ARROW_TYPES, ResultColumn, ResultData, Type, columns

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    from matplotlib.axes import Axes

__all__ = ["ARROW_TYPES", "Result", "ResultColumn", "Type", "columns", "make_result", "make_table"]


@dataclass(frozen=True, slots=True)
class Result(ResultData):
    """The result of one view. notes: what the reader must know about it (what was missing or assumed).

    failure: why a view that was computed beside others has no rows; "" if it did not fail.
    """

    def to_arrow(self) -> pa.Table:
        """Returns the table with Unix times as timestamps (ns, UTC).

        The metadata of each field has its `unit` and `meaning`, that of the schema `view` and `notes` (a JSON list).
        """
        from kineto_trace.view_api.result_frames import arrow_table

        return arrow_table(self)

    def to_pandas(self) -> "pd.DataFrame":
        """Returns a pandas data frame; its attrs have `units` (by column), `view` and `notes`.

        Types are pandas' nullable ones (Int64, Float64, boolean, string), so that integers stay integers and missing
        values are pd.NA; Unix times are datetimes in UTC; lists are arrays. Raises TraceError without pandas.
        """
        from kineto_trace.view_api.result_frames import pandas_frame

        return pandas_frame(self)

    def to_polars(self) -> "pl.DataFrame":
        """Returns a polars data frame; Unix times are datetimes in UTC. Raises TraceError without polars.

        polars keeps no units: they are in `columns`.
        """
        from kineto_trace.view_api.result_frames import polars_frame

        return polars_frame(self)

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draws the result with matplotlib and returns the axes; into `ax` if it is given, otherwise into a new figure.

        Values over time are lines, parts of a whole are bars, and values that spread are boxes or histograms. Times and
        sizes have the unit that fits the largest. Raises ViewError for a view that has no such shape (the error lists
        those that have one) and for a result without rows, TraceError without matplotlib.
        """
        from kineto_trace.view_api.result_plots import plot

        return plot(self, ax)

    def __repr__(self) -> str:
        from kineto_trace.view_api.result_display import result_text

        return result_text(self)

    def _repr_html_(self) -> str:
        """Called by notebooks."""
        from kineto_trace.view_api.result_display import result_html

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
        raise ValueError(f"view {view}: columns do not follow the schema: {', '.join(wrong)}")
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
