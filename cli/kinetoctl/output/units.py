"""Numbers and values as people read them. Pure."""

import math
import time
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from kineto_trace.base.quantities import BINARY_UNITS, MAX_WHOLE, format_duration, format_number, time_of_day
from kineto_trace.base.visible_text import visible

GAP = "  "  # between two columns
INDENT = "    "  # of what stands below the line that it belongs to


def size(count: int) -> str:
    """Bytes for a column, always with one decimal: 3.1 MiB, 40.0 MiB, 17 B."""
    for name, factor in BINARY_UNITS:
        if count >= factor:
            return f"{count / factor:.1f} {name}"
    return f"{count} B"


def moment(unix_ns: int) -> str:
    """A local date and time to the second; a dash for 0."""
    if not unix_ns:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_ns / 1e9))


def age(unix_ns: int, now_ns: int = 0) -> str:
    """How long ago that was, in its largest unit: 12s, 5min, 3h, 2d; a dash for 0."""
    if not unix_ns:
        return "-"
    seconds = max(0, (now_ns or time.time_ns()) - unix_ns) // 10**9
    for unit, unit_s in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= unit_s:
            return f"{seconds // unit_s}{unit}"
    return f"{seconds}s"


def count(number: int) -> str:
    """12,345."""
    return f"{number:,}"


# Formats values of result tables for people. Pure.
NOTHING = "-"
US = 1000  # ns
# Unit -> the suffix of the names of columns with that unit.
SUFFIXES = {
    "us": "_us", "ns": "_ns", "%": "_pct", "bytes": "_bytes", "GB/s": "_gb_s", "GFLOP": "_gflop", "TFLOP": "_tflop",
    "TFLOP/s": "_tflop_s", "FLOP/byte": "_flop_byte",
}  # fmt: skip
KINDS = {"us": "TIME", "bytes": "SIZE"}


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
        return format_duration(float(value) * US)
    if unit == "ns":
        return time_of_day(int(value))
    if unit == "bytes":
        return f"-{size(-int(value))}" if value < 0 else size(int(value))
    if unit == "%":
        return f"{float(value):.1f}%"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < MAX_WHOLE else str(value)
    text = format_number(float(value))
    return f"{text} {unit}" if unit else text


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
