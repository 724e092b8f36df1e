"""Numbers as people read them."""

import time

from kineto_protos.units import BINARY_UNITS


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


def shortened(text: str, width: int) -> str:
    """At most width characters, the middle replaced by an ellipsis: both ends of a C++ name tell something."""
    if len(text) <= width:
        return text
    head = (width - 1) * 2 // 3
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def function_name(name: str) -> str:
    """A Python function as Kineto names it, `/long/way/package/file.py(12): f`, with the last folder only."""
    path, separator, rest = name.partition("(")
    return f"{'/'.join(path.split('/')[-2:])}{separator}{rest}"
