"""Times, shares and numbers in sentences."""

import time
from collections.abc import Sequence


def ms(ns: float) -> str:
    """Returns a time in ms with three digits."""
    return f"{ns / 1e6:.3g} ms"


def share(part: float, whole: float) -> str:
    """Returns a part of a whole in per cent with three digits."""
    return f"{100 * part / whole:.3g} %" if whole else "0 %"


def times(count: int, one: str, several: str = "") -> str:
    """Returns a number with its noun."""
    return f"{count} {one if count == 1 else several or one + 's'}"


def spans(numbers: Sequence[int]) -> str:
    """Formats ascending numbers such as 0, 1, 2, 3, 7 as 0-3, 7."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(f"{low}-{high}" if high > low else str(low) for low, high in found)


def time_text(us: float) -> str:
    """Returns a time in µs, ms or s with three digits."""
    for factor, unit in ((1e6, "s"), (1e3, "ms")):
        if abs(us) >= factor:
            return f"{us / factor:.3g} {unit}"
    return f"{us:.3g} µs"


def size_text(count: float) -> str:
    """Returns a number of bytes in B, KiB, MiB or GiB with three digits."""
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(count) >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


def shortened(text: str, most: int) -> str:
    """Returns the text, or its two ends if it has more characters: both ends of a C++ name tell something."""
    return text if len(text) <= most else f"{text[: most * 3 // 5]}…{text[-most * 2 // 5 :]}"


def time_of_day(unix_ns: int) -> str:
    """Returns the local time of day to the microsecond; the date is that of the trace."""
    if abs(unix_ns) >= 1 << 62:
        return str(unix_ns)
    seconds, rest = divmod(unix_ns, 1_000_000_000)
    return f"{time.strftime('%H:%M:%S', time.localtime(seconds))}.{rest // 1000:06}"
