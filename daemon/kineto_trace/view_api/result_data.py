"""The data of a result: the columns with their units and meanings, and the values as an Arrow table."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pyarrow as pa

from kineto_trace.base.install_advice import install_advice
from kineto_trace.errors import TraceError
from kineto_trace.model.trace import TRUNCATED
from kineto_trace.view_api.result_columns import ResultColumn, Type, columns

__all__ = ["ARROW_TYPES", "ResultColumn", "ResultData", "Type", "columns"]
ARROW_TYPES: Mapping[Type, pa.DataType] = {
    "text": pa.string(),
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "ints": pa.list_(pa.int64()),
    "texts": pa.list_(pa.string()),
}


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

    @property
    def truncation(self) -> str:
        """The note on a truncated trace; "" if none is truncated."""
        return self.note(TRUNCATED)

    def note(self, words: str) -> str:
        """The first note with these words; "" if there is none."""
        return next((note for note in self.notes if words in note), "")

    def rows(self) -> list[dict[str, Any]]:
        """Returns one dictionary per row."""
        found: list[dict[str, Any]] = self.table.to_pylist()
        return found

    def values(self, name: str) -> list[Any]:
        """Returns the values of one column. Raises KeyError."""
        found: list[Any] = self.table[name].to_pylist()
        return found


def needed(module: str) -> Any:
    """Returns the module. Raises TraceError that says how to install it."""
    try:
        return import_module(module)
    except ImportError as exc:
        reason = "is not installed" if isinstance(exc, ModuleNotFoundError) else f"cannot be imported ({exc})"
        package = module.partition(".")[0]
        raise TraceError(f"{package} {reason}: {install_advice(package)}") from exc
