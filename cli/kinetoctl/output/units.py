"""Numbers as people read them."""

import time

_SIZES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_DURATIONS = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "µs"))


def size(count: int) -> str:
    """Bytes: 3.1 MiB."""
    for unit, name in _SIZES:
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} B"


def duration(nanoseconds: int) -> str:
    """A duration: 1.25 s, 14 ms, 310 µs, 5 min 3 s."""
    if nanoseconds >= 60_000_000_000:
        minutes, seconds = divmod(round(nanoseconds / 1e9), 60)
        return f"{minutes} min {seconds} s" if seconds else f"{minutes} min"
    for unit, name in _DURATIONS:
        if nanoseconds >= unit:
            return f"{nanoseconds / unit:.3g} {name}"
    return f"{nanoseconds} ns"


def moment(unix_ns: int) -> str:
    """A local date and time to the second; a dash for 0."""
    if not unix_ns:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_ns / 1e9))


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
