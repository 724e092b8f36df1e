"""Times, sizes, shares and numbers as people write and read them, and the free memory."""

import contextlib
import math
import os
import re
import resource
import time
from collections.abc import Iterator, Sequence
from decimal import Decimal
from itertools import count
from pathlib import Path, PurePosixPath

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
MAX_WHOLE = 1 << 53  # larger integers are ids or times, so their digits are not grouped
KEPT_FREE_BYTES = 256 << 20  # with less, the kernel ends some program, which may be anybody's
_NEEDS = " needs "  # in every MemoryError of ours
_STACK_BYTES = 8 << 20  # of a thread, by default
_WORD_END = re.compile(r"\w+$")
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")
_NUMBER_AND_UNIT = re.compile(r"([+-]?\d+(?:\.\d+)?)\s*([a-zµ]*)")
_SHORT_UNITS_NS = (("s", 10**9), ("ms", 10**6), ("µs", 10**3), ("ns", 1))
_LONG_UNITS_S = (("days", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1))  # and the next smaller


def parse_duration_ns(text: str) -> int:
    """Returns the nanoseconds in a text like 500ms, 5s, 1.5s, 2min, 0. Raises ValueError; the caller checks the sign.

    A number without a unit is in seconds, as for sleep and timeout.
    """
    value = _parse(f"{text.strip()}s" if _NUMBER.fullmatch(text.strip()) else text, DURATION_UNITS_NS)
    if value is None:
        raise ValueError(f"expected a duration like 500ms, 5s or 2min, got {text!r}")
    return value


def parse_size_bytes(text: str) -> int:
    """Returns the bytes, zero or more, in a text like 128MiB, 1.5GB or 4096. Raises ValueError."""
    value = _parse(text, SIZE_UNITS)
    if value is None or value < 0:
        raise ValueError(f"expected a size like 128MiB, 8GiB or 4096, got {text!r}")
    return value


def _parse(text: str, units: dict[str, int]) -> int | None:
    match = _NUMBER_AND_UNIT.fullmatch(text.strip().lower())
    if match is None or match[2] not in units:
        return None
    return int(Decimal(match[1]) * units[match[2]])


def format_duration(duration_ns: float) -> str:
    """Formats with three digits or two units: `7 ns`, `1.25 s`, `5 min 3 s`, `10 min`, `7 days`."""
    if not math.isfinite(duration_ns):
        return str(duration_ns)
    if duration_ns < 0:
        return f"-{format_duration(-duration_ns)}"
    rounded = float(f"{duration_ns:.3g}")
    if rounded >= 60e9:
        return _long_duration(round(duration_ns / 1e9))
    unit, unit_ns = next((each for each in _SHORT_UNITS_NS if rounded >= each[1]), _SHORT_UNITS_NS[-1])
    return f"{rounded / unit_ns:.3g} {unit}"


def lasted(since_ns: int, now_ns: int) -> str:
    """Formats the time since a moment; without a time if the clock has been set back since."""
    return format_duration(max(now_ns - since_ns, 0))


def _long_duration(seconds: int) -> str:
    unit, unit_s, lower, lower_s = next(row for row in _LONG_UNITS_S if seconds >= row[1])
    count, rest = divmod(seconds // lower_s, unit_s // lower_s)
    whole = "1 day" if (count, unit) == (1, "days") else f"{count} {unit}"
    return f"{whole} {rest} {lower}" if rest else whole


def format_size(size: float) -> str:
    """Formats with at most four digits: `1.5 GiB`, `128 MiB`, `12 bytes`."""
    for unit, factor in BINARY_UNITS:
        if abs(size) >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size:.0f} bytes"


def format_number(value: float) -> str:
    """Formats a number with four digits, or with groups of three digits from 1,000 on: 8, 8.333, 1,234.5."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < MAX_WHOLE:
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"


def share(part: float, whole: float) -> str:
    """Returns a part of a whole in per cent with three digits."""
    return f"{100 * part / whole:.3g} %" if whole else "0 %"


def times(count: int, one: str, several: str = "") -> str:
    """Returns a number with its noun."""
    return f"{count} {one if count == 1 else several or one + 's'}"


def more(count: int, one: str, several: str = "") -> str:
    """Returns how many are left out: `1,200 more rows`."""
    return f"{count:,} more {one if count == 1 else several or one + 's'}"


def format_ranges(numbers: Sequence[int]) -> str:
    """Formats ascending numbers such as 0, 1, 2, 3, 7 as 0-3, 7."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(f"{low}-{high}" if high > low else str(low) for low, high in found)


def shortened(text: str, most: int) -> str:
    """Returns at most so many characters of the text, its two ends: both ends of a C++ name are informative."""
    if len(text) <= most:
        return text
    head = (most - 1) * 2 // 3
    return f"{text[:head]}…{text[len(text) - (most - 1 - head) :]}"


def shortened_apart(texts: Sequence[str], most: int) -> list[str]:
    """Returns texts that are listed together, each shortened to so many characters.

    Different texts stay different: those that would be equal keep the parts in which they differ, too.
    """
    alike: dict[str, list[str]] = {}
    for text in dict.fromkeys(texts):
        alike.setdefault(shortened(text, most), []).append(text)
    shown: dict[str, str] = {}
    for short, same in alike.items():
        parted = _apart(same, most) if len(same) > 1 else {}
        shown |= {text: own if len(own := parted.get(text, short)) <= most else short for text in same}
    taken: set[str] = set()
    for text, short in shown.items():
        if short in taken:  # too many differences for so few characters
            marks = (f"… ({number})" for number in count(2))
            shown[text] = next(each for mark in marks if (each := text[: most - len(mark)] + mark) not in taken)
        taken.add(shown[text])
    return [shown[text] for text in texts]


def _apart(texts: Sequence[str], most: int) -> dict[str, str]:
    """Shortens different texts to their ends and to what is at each place at which some of them part."""
    places: dict[str, list[int]] = {text: [] for text in texts}
    groups = [list(texts)]
    while groups:
        group = groups.pop()
        low, high = min(group), max(group)
        place = next((n for n, (one, other) in enumerate(zip(low, high, strict=False)) if one != other), len(low))
        parted: dict[str, list[str]] = {}
        for text in group:
            places[text].append(place)
            parted.setdefault(text[place : place + 1], []).append(text)
        groups += [each for each in parted.values() if len(each) > 1]
    return {text: _kept(text, own, most) for text, own in places.items()}


def _kept(text: str, places: Sequence[int], most: int) -> str:
    """Returns the two ends of a text and what is at these places, from the beginning of a word where there is room."""
    end = most // 5
    width = max((most - 2 * end - len(places) - 1) // len(places), 1)
    parts = [(0, end)]
    for place in sorted(places):
        word = len(_WORD_END.sub("", text[:place]))
        first = word if place - word <= width // 2 else place
        parts.append((first, first + width))
    kept, until = "", 0
    for first, last in (*parts, (max(len(text) - end, 0), len(text))):
        kept += "…" if first > until else ""
        kept += text[max(first, until) : last]
        until = max(until, last)
    return kept


def time_of_day(unix_ns: int) -> str:
    """Returns the local time of day to the microsecond; the date is that of the trace."""
    if abs(unix_ns) >= 1 << 62:
        return str(unix_ns)
    seconds, rest = divmod(unix_ns, 1_000_000_000)
    return f"{time.strftime('%H:%M:%S', time.localtime(seconds))}.{rest // 1000:06}"


def free_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> float:
    """Returns the free memory of this machine and of its control groups in bytes; infinity if it is unknown."""
    rooms = [float("inf"), *_rooms_of_groups(proc, groups)]
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = (proc / "meminfo").read_text().splitlines()
        rooms += [int(line.split()[1]) * 1024.0 for line in lines if line.startswith("MemAvailable:")]
    return min(rooms)


def _rooms_of_groups(proc: Path, groups: Path) -> Iterator[float]:
    """Yields what is left below each limit of this process's groups; a container shows its own one as the root."""
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root, limit, used = (
                (groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
                if controllers
                else (groups, "memory.max", "memory.current")
            )
            for above in (PurePosixPath(path), *PurePosixPath(path).parents):
                group = root / str(above).lstrip("/")
                with contextlib.suppress(OSError, ValueError):  # none, or "max"
                    left = int((group / limit).read_text()) - int((group / used).read_text())
                    pairs = (each.split() for each in (group / "memory.stat").read_text().splitlines())
                    yield left + max((int(number) for name, number in pairs if name == "inactive_file"), default=0)


@contextlib.contextmanager
def held_to_free_memory(share: float = 1.0) -> Iterator[None]:
    """Lets this process take so much of what is free now and no more, so that more is a MemoryError.

    Otherwise a small file that asks for very much would have the kernel end a program, which may be anybody's. What
    is reserved for stacks of threads counts as taken, so each CPU's thread gets one more.
    """
    before, most = resource.getrlimit(resource.RLIMIT_DATA)
    room = free_memory() - KEPT_FREE_BYTES
    if not math.isfinite(room):
        yield
        return
    pages = int(Path("/proc/self/statm").read_text().split()[5])  # data and stack
    stacks = _STACK_BYTES * (os.cpu_count() or 1)
    limit = pages * resource.getpagesize() + stacks + int(max(room, 0) * share)
    known = [each for each in (before, most, limit) if each != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(known), most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, most))


@contextlib.contextmanager
def memory_errors(what: str) -> Iterator[None]:
    """Has a MemoryError say for what there was too little memory, and which limit there is, unless it says it."""
    try:
        yield
    except MemoryError as exc:
        if _NEEDS in str(exc):
            raise
        limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
        may = "" if limit == resource.RLIM_INFINITY else f"; this process is limited to {format_size(limit)}"
        raise MemoryError(f"{what}{_NEEDS}more memory than is available{may}") from exc


def require_memory(size: float, what: str) -> None:
    """Raises MemoryError unless so many bytes are free: a small file may ask for very many.

    what: the purpose, for the error's text.
    """
    if (free := free_memory()) < size + KEPT_FREE_BYTES:
        raise MemoryError(f"{what}{_NEEDS}another {format_size(size)} of memory, but only {format_size(free)} are free")
