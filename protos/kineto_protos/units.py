"""Durations and sizes as people write and read them: one rule for the daemon's options and messages and the CLI."""

import re
from decimal import Decimal

DURATION_UNITS_NS = {
    "ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9,
    "m": 60 * 10**9, "min": 60 * 10**9, "h": 3600 * 10**9, "d": 86_400 * 10**9,
}  # fmt: skip
SIZE_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip
BINARY_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))  # the largest first
_NUMBER_AND_UNIT = re.compile(r"([+-]?\d+(?:\.\d+)?)\s*([a-zµ]*)")
_SHORT_UNITS_NS = (("s", 10**9), ("ms", 10**6), ("µs", 10**3))
_LONG_UNITS_S = (("days", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1))  # and the next smaller


def parse_duration_ns(text: str) -> int:
    """Nanoseconds in a text like 500ms, 5s, 1.5s, 2min, 0. Raises ValueError; the caller checks the sign."""
    if text.strip() == "0":
        return 0
    value = _parse(text, DURATION_UNITS_NS)
    if value is None:
        raise ValueError(f"expected a duration like 500ms, 5s or 2min, got {text!r}")
    return value


def parse_size_bytes(text: str) -> int:
    """Bytes, zero or more, in a text like 128MiB, 1.5GB or 4096. Raises ValueError."""
    value = _parse(text, SIZE_UNITS)
    if value is None or value < 0:
        raise ValueError(f"expected a size like 128MiB, 8GiB or 4096, got {text!r}")
    return value


def _parse(text: str, units: dict[str, int]) -> int | None:
    match = _NUMBER_AND_UNIT.fullmatch(text.strip().lower())
    if match is None or match[2] not in units:
        return None
    return int(Decimal(match[1]) * units[match[2]])


def format_duration(duration_ns: int) -> str:
    """Three digits or two units: `7 ns`, `1.25 s`, `5 min 3 s`, `10 min`, `7 days`."""
    if duration_ns >= 60 * 10**9:
        return _long_duration(round(duration_ns / 1e9))
    for unit, unit_ns in _SHORT_UNITS_NS:
        if duration_ns >= unit_ns:
            return f"{float(f'{duration_ns / unit_ns:.3g}'):g} {unit}"
    return f"{duration_ns} ns"


def _long_duration(seconds: int) -> str:
    unit, unit_s, lower, lower_s = next(row for row in _LONG_UNITS_S if seconds >= row[1])
    count, rest = divmod(seconds // lower_s, unit_s // lower_s)
    whole = "1 day" if (count, unit) == (1, "days") else f"{count} {unit}"
    return f"{whole} {rest} {lower}" if rest else whole


def format_size(size: int) -> str:
    """At most four digits: `1.5 GiB`, `128 MiB`, `12 bytes`."""
    for unit, factor in BINARY_UNITS:
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size} bytes"
