"""Columns of results made from a trace: its strings without an object per row, and statistics of values."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from kineto_trace.base.array_types import AnyArray
from kineto_trace.view_api.result import ResultColumn, columns

NAMES = ("count", "mean", "std", "min", "p25", "p50", "p75", "max")


def texts(strings: Sequence[str], numbers: AnyArray) -> pa.Array:
    """Returns the string of each number; missing for negative numbers."""
    used = np.zeros(len(strings), np.bool_)
    used[numbers[numbers >= 0]] = True
    rows = np.flatnonzero(used)
    place = np.empty(len(strings), np.int32)
    place[rows] = np.arange(len(rows), dtype=np.int32)
    wanted = [strings[row] for row in rows.tolist()]
    try:
        dictionary = pa.array(wanted, pa.string())
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
        wanted = [text.encode("utf-8", "surrogatepass").decode("utf-8", "replace") for text in wanted]
        dictionary = pa.array(wanted, pa.string())
    missing = numbers < 0
    index = np.where(missing, 0, place[numbers] if len(strings) else 0).astype(np.int32)
    return dictionary.take(pa.array(index, mask=missing))


def statistics_columns(unit: str, of: str, suffix: str = "") -> tuple[ResultColumn, ...]:
    """Returns the columns for describe(). of: noun for the values. suffix: of the column names, such as "_us"."""
    return columns(
        ("count", "int", "", f"number of {of}"),
        (f"mean{suffix}", "float", unit, f"mean of {of}"),
        (f"std{suffix}", "float", unit, "sample standard deviation; missing for fewer than two values"),
        (f"min{suffix}", "float", unit, "smallest"),
        (f"p25{suffix}", "float", unit, "25th percentile, interpolated"),
        (f"p50{suffix}", "float", unit, "median"),
        (f"p75{suffix}", "float", unit, "75th percentile"),
        (f"max{suffix}", "float", unit, "largest"),
    )


def describe(values: AnyArray, suffix: str = "") -> dict[str, float]:
    """Returns the statistics of the values by column name; NaN if undefined."""
    count = len(values)
    if not count:
        found = [0.0] + [float("nan")] * (len(NAMES) - 1)
    else:
        low, first, middle, third, high = np.percentile(values, [0, 25, 50, 75, 100]).tolist()
        std = float(np.std(values, ddof=1)) if count > 1 else float("nan")
        found = [float(count), float(np.mean(values)), std, low, first, middle, third, high]
    return {name if name == "count" else name + suffix: value for name, value in zip(NAMES, found, strict=True)}
