"""Columns of results made from a trace: its strings without an object per row, and statistics of values."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from kineto_trace.base.array_types import AnyArray
from kineto_trace.view_api.result import ResultColumn, columns

NAMES = ("count", "mean", "std", "min", "p25", "p50", "p75", "max")


def texts(strings: Sequence[str], numbers: AnyArray) -> pa.Array:
    """Returns the string of each number; missing for negative numbers."""
    return coded_texts(strings, numbers).dictionary_decode()


def coded_texts(strings: Sequence[str], numbers: AnyArray, form: str = "{}") -> pa.DictionaryArray:
    """Returns the text of each number, written in this form, as codes into the texts that are used; missing for
    negative numbers.
    """
    present = numbers >= 0
    numbers = np.maximum(numbers.astype(np.int64, copy=False), -1)
    used = np.zeros(len(strings) + 1, np.bool_)
    used[numbers] = True  # missing ones mark the last place
    used[-1] = False
    place = np.cumsum(used, dtype=np.int32) - 1
    wanted = [form.format(strings[row]) for row in np.flatnonzero(used).tolist()]
    try:
        dictionary = pa.array(wanted, pa.string())
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
        wanted = [text.encode("utf-8", "surrogatepass").decode("utf-8", "replace") for text in wanted]
        dictionary = pa.array(wanted, pa.string())
    mask = None if present.all() else ~present
    return pa.DictionaryArray.from_arrays(pa.array(place[numbers], mask=mask), dictionary)


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
