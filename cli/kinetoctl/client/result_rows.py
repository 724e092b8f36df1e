"""The rows of an analysis as values for JSON."""

import math
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kineto_trace.view_api.result import Result


def plain_rows(result: "Result") -> list[dict[str, Any]]:
    """The rows as values for JSON: nothing is rounded, and NaN is null."""
    names = [column.name for column in result.columns]
    return [dict(zip(names, row, strict=True)) for row in zip(*_plain_columns(result), strict=True)]


def _plain_columns(result: "Result") -> list[list[Any]]:
    columns = [result.table.column(place).to_pylist() for place in range(len(result.columns))]
    return [
        values if column.type in ("int", "bool") else [exact(value) for value in values]
        for column, values in zip(result.columns, columns, strict=True)
    ]


def exact(value: Any) -> Any:
    """The value for JSON: nothing is rounded, and what JSON lacks becomes null or a string."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, dict):
        return {str(key): exact(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [exact(item) for item in value]
    if isinstance(value, (datetime, date)):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.hex()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value.total_seconds()) if isinstance(value, timedelta) else str(value)
