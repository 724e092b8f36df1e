"""Formats values of result tables for people. Pure."""

import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from kineto_protos.units import format_duration
from kineto_trace.base.quantities import time_of_day
from kineto_trace.base.visible_text import visible

from kinetoctl.output import units

NOTHING = "-"
US = 1000  # ns
# Unit -> the suffix of the names of columns with that unit.
SUFFIXES = {
    "us": "_us", "ns": "_ns", "%": "_pct", "bytes": "_bytes", "GB/s": "_gb_s", "GFLOP": "_gflop", "TFLOP": "_tflop",
    "TFLOP/s": "_tflop_s", "FLOP/byte": "_flop_byte",
}  # fmt: skip
KINDS = {"us": "TIME", "bytes": "SIZE"}
MAX_WHOLE = 1 << 53  # larger integers are ids or times, so their digits are not grouped


def human(value: Any, unit: str = "") -> str:
    """A value of a column with this unit: `12.3 µs`, `45.6%`, `1.2 GiB`, `12,345`, `-` for a missing one."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(human(item) for item in value) or NOTHING
    if isinstance(value, (int, float, Decimal)):
        return _number(value, unit)
    return visible(str(value))


def _number(value: Any, unit: str) -> str:
    if unit == "us":
        return _duration(float(value) * US)
    if unit == "ns":
        return time_of_day(int(value))
    if unit == "bytes":
        return f"-{units.size(-int(value))}" if value < 0 else units.size(int(value))
    if unit == "%":
        return f"{float(value):.1f}%"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < MAX_WHOLE else str(value)
    text = _plain(float(value))
    return f"{text} {unit}" if unit else text


def _duration(ns: float) -> str:
    if not math.isfinite(ns):
        return str(ns)
    if ns < 0:
        return f"-{_duration(-ns)}"
    if 0 < ns < 1:
        return f"{ns:.2g} ns"
    return format_duration(round(ns))


def _plain(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < MAX_WHOLE:
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"


def heading(name: str, unit: str = "") -> str:
    """The title of a column, whose values show their unit."""
    title = name.removesuffix(SUFFIXES.get(unit, "")).replace("_", " ").upper()
    return f"{title} %" if unit == "%" else title


def headings(columns: Sequence[tuple[str, str]]) -> list[str]:
    """The titles of columns (name, unit); of those that would be alike, times and sizes say what they are."""
    titles = [heading(name, unit) for name, unit in columns]
    return [
        f"{title} {KINDS[unit]}" if titles.count(title) > 1 and unit in KINDS and title != KINDS[unit] else title
        for title, (_, unit) in zip(titles, columns, strict=True)
    ]


def is_number(values: Sequence[Any]) -> bool:
    """Whether a column is aligned to the right: it has only numbers or nothing."""
    return all(
        value is None or (isinstance(value, (int, float, Decimal)) and not isinstance(value, bool)) for value in values
    )
