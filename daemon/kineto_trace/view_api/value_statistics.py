"""The usual statistics of a set of values, as columns of results."""

from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.view_api.result import ResultColumn, columns

NAMES = ("count", "mean", "std", "min", "p25", "p50", "p75", "max")


def statistics_columns(unit: str, of: str, suffix: str = "") -> tuple[ResultColumn, ...]:
    """Returns the columns for describe(). of: what the values are. suffix: of the column names, such as "_us"."""
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


def describe(values: npt.NDArray[Any], suffix: str = "") -> dict[str, float]:
    """Returns the statistics of the values by column name; NaN if undefined."""
    count = len(values)
    if not count:
        found = [0.0] + [float("nan")] * (len(NAMES) - 1)
    else:
        low, first, middle, third, high = np.percentile(values, [0, 25, 50, 75, 100]).tolist()
        std = float(np.std(values, ddof=1)) if count > 1 else float("nan")
        found = [float(count), float(np.mean(values)), std, low, first, middle, third, high]
    return {name if name == "count" else name + suffix: value for name, value in zip(NAMES, found, strict=True)}
