"""Sizes and durations as people write them: `128MiB`, `10min`."""

import re

_NUMBER_AND_UNIT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-zµ]*)\s*")
_SIZE_UNITS = {
    "": 1, "B": 1,
    "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
    "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
_DURATION_UNITS_NS = {"ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9, "min": 60 * 10**9, "h": 3600 * 10**9}


def parse_size(text: str) -> int:
    """Bytes. Raises ValueError that says what was expected."""
    return _parse(text, _SIZE_UNITS, "a size like 128MiB, 8GiB or 4096")


def parse_duration(text: str) -> int:
    """Nanoseconds. Raises ValueError that says what was expected."""
    return _parse(text, _DURATION_UNITS_NS, "a duration like 500ms, 5s or 10min")


def _parse(text: str, units: dict[str, int], expected: str) -> int:
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is None or match[2] not in units:
        raise ValueError(f"expected {expected}, got {text!r}")
    return round(float(match[1]) * units[match[2]]) if "." in match[1] else int(match[1]) * units[match[2]]


def format_duration(duration_ns: int) -> str:
    """Short text for messages: `1.5 s`, `20 ms`, `10 min`."""
    for unit, least_s, unit_ns in (("days", 172_800, 86_400e9), ("h", 7200, 3600e9), ("min", 120, 60e9), ("s", 1, 1e9)):
        if duration_ns >= least_s * 10**9:
            return f"{duration_ns / unit_ns:.3g} {unit}"
    return f"{duration_ns / 1e6:.3g} ms"


def format_size(size: int) -> str:
    """Short text for messages: `1.5 GiB`, `128 MiB`, `12 bytes`."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size} bytes"
