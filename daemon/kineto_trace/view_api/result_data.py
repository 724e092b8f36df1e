"""The data of a result: the columns with their units and meanings, and the values as an Arrow table.

Results for other libraries: Arrow, pandas and polars, with types that keep integers and missing values as they are.

pandas and polars are optional and imported on demand.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from kineto_trace.errors import TraceError
from kineto_trace.view_api.result_columns import ResultColumn, Type, columns

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl

__all__ = ["ARROW_TYPES", "ResultColumn", "ResultData", "Type", "columns"]
ARROW_TYPES: Mapping[Type, pa.DataType] = {
    "text": pa.string(),
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "ints": pa.list_(pa.int64()),
    "texts": pa.list_(pa.string()),
}
MOMENT = pa.timestamp("ns", "UTC")


@dataclass(frozen=True, slots=True)
class ResultData:
    """The values of one result.

    notes: important for the reader (missing data, assumptions).
    failure: why a view that was computed beside others has no rows; "" if it did not fail.
    """

    view: str
    columns: tuple[ResultColumn, ...]
    table: pa.Table
    notes: tuple[str, ...] = ()
    failure: str = ""

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def rows(self) -> list[dict[str, Any]]:
        """Returns one dictionary per row."""
        found: list[dict[str, Any]] = self.table.to_pylist()
        return found

    def values(self, name: str) -> list[Any]:
        """Returns the values of one column. Raises KeyError."""
        found: list[Any] = self.table[name].to_pylist()
        return found


def arrow_table(result: ResultData) -> pa.Table:
    """Returns the table of a result with Unix times as timestamps. See Result.to_arrow."""
    table = result.table
    for place, column in enumerate(result.columns):
        if column.unit == "ns" and table.schema.field(place).type == pa.int64():
            field = table.schema.field(place).with_type(MOMENT)
            table = table.set_column(place, field, table.column(place).cast(MOMENT))
    about = {"view": result.view, "notes": json.dumps(list(result.notes))}
    return table.replace_schema_metadata({**(table.schema.metadata or {}), **about})


def pandas_frame(result: ResultData) -> "pd.DataFrame":
    """Returns a result as a data frame. See Result.to_pandas."""
    pd = needed("pandas", "notebook")
    types = {
        pa.int64(): pd.Int64Dtype(),
        pa.float64(): pd.Float64Dtype(),
        pa.bool_(): pd.BooleanDtype(),
        pa.string(): pd.StringDtype(),
    }
    frame = arrow_table(result).to_pandas(types_mapper=types.get)
    frame.attrs.update(
        view=result.view, notes=list(result.notes), units={column.name: column.unit for column in result.columns}
    )
    return frame


def polars_frame(result: ResultData) -> "pl.DataFrame":
    """Returns a result as a data frame. See Result.to_polars."""
    return needed("polars", "polars").from_arrow(arrow_table(result))


def needed(module: str, extra: str) -> Any:
    """Returns the module. Raises TraceError that says how to install it."""
    try:
        return import_module(module)
    except ImportError as exc:
        reason = "is not installed" if isinstance(exc, ModuleNotFoundError) else f"cannot be imported ({exc})"
        raise TraceError(f"{module.partition('.')[0]} {reason}: run pip install 'kinetod[{extra}]'") from exc
