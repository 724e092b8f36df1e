"""What is computed from a finished run: medians of iterations, digests compared, memory, and the row of the table."""

from __future__ import annotations

import bisect
import statistics
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gpu.zoo.captures import DEFAULTS, Capture

SETTLE_NS = 1_000_000_000
STOOD_STILL_MS = 3_000  # longer than the untouched program; less may be the machine's load
OWN_TRACES_LEAST = 0.98  # of what the program's own traces hold without us
MEMORY_SLACK = 64 << 20
Window = tuple[int, int]


@dataclass(slots=True, kw_only=True)
class Memory:
    """Bytes at one moment."""

    rss: int = 0
    gpu: int = 0


@dataclass(slots=True, kw_only=True)
class Row:
    """What became of one program. state: "unharmed", "HARMED", "skipped" or "not run". Times in ms are medians.

    problems: why it is harmed. notes: what else is to be known. twin_ratio: of the untouched program over the same
    time. gap: the longest iteration from the first request to the last file, and from there to the end, of both. lost:
    captures of CUDA graphs that the program itself counts as lost. memory: at the points before, first, settled, last,
    end; of the untouched one: twin_memory.
    """

    name: str
    state: str = "unharmed"
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    captures: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    warnings: dict[str, int] = field(default_factory=dict)
    methods: dict[str, int] = field(default_factory=dict)
    kernels: list[int] = field(default_factory=list)
    iterations: int = 0
    compared: int = 0
    before_ms: float = 0.0
    during_ms: float = 0.0
    after_ms: float = 0.0
    untouched_ms: float = 0.0
    ratio: float = 0.0
    twin_ratio: float = 0.0
    gap_during_ms: float = 0.0
    gap_after_ms: float = 0.0
    twin_gap_during_ms: float = 0.0
    twin_gap_after_ms: float = 0.0
    lost: int = 0
    first_record_s: list[float] = field(default_factory=list)
    memory: dict[str, Memory] = field(default_factory=dict)
    twin_memory: dict[str, Memory] = field(default_factory=dict)
    seconds: float = 0.0
    stderr: str = ""

    def harm(self, problem: str, stderr: str = "") -> None:
        """Something that must not be."""
        self.state = "HARMED"
        self.problems.append(problem)
        self.stderr = stderr or self.stderr

    def as_json(self) -> dict[str, Any]:
        """For the file of results."""
        return asdict(self)


def median_ms(times: array[int], windows: Iterable[Window]) -> float:
    """Median length of the iterations that lay wholly inside one of the windows, in ms; 0.0: there was none."""
    found: list[int] = []
    for begin, end in windows:
        inside = times[bisect.bisect_left(times, begin) : bisect.bisect_right(times, end)]
        found += [b - a for a, b in zip(inside, inside[1:], strict=False)]
    return statistics.median(found) / 1e6 if found else 0.0


def longest_ms(times: array[int], window: Window) -> float:
    """The longest iteration that overlaps the window, in ms, also one that has not ended; 0.0: unknown."""
    begin, end = window
    if not times or end <= begin:
        return 0.0
    inside = times[max(0, bisect.bisect_right(times, begin) - 1) : bisect.bisect_left(times, end) + 1]
    unended = end - max(begin, times[-1])
    return max([unended, *(b - a for a, b in zip(inside, inside[1:], strict=False))], default=0) / 1e6


def ratio(after_ms: float, before_ms: float) -> float:
    """0.0: unknown."""
    return after_ms / before_ms if before_ms and after_ms else 0.0


def count_captures(row: Row, captures: Sequence[Capture]) -> None:
    """Verdicts, reasons and what else the captures say."""
    row.captures = len(captures)
    row.verdicts = dict(Counter(" ".join(filter(None, (one.verdict, one.reason_code))) for one in captures))
    row.reasons = dict(Counter(one.reason[:300] for one in captures if one.reason))
    row.warnings = dict(Counter(warning[:300] for one in captures for warning in one.warnings))
    row.methods = dict(Counter(one.method for one in captures if one.method))
    row.kernels = [one.kernels for one in captures if one.kind == DEFAULTS]
    row.first_record_s = [round(one.first_record_s, 3) for one in captures if one.first_record_s]


def time_iterations(
    row: Row, times: array[int], captures: Sequence[Capture], ready_ns: int, untouched: array[int] | None
) -> None:
    """Medians before, during and after the captures; of the untouched program over the same time.

    Where it ran before the other one, that is the same time since its first iteration: a GPU that has just been taken
    into use becomes slower by itself (a replay of 559 us took 610 us some seconds later, with nobody near).
    """
    row.iterations = len(times)
    if not times:
        return
    recorded = [one for one in captures if one.begin_ns and one.end_ns]
    ended = [one for one in captures if one.stored_ns]  # also those that recorded nothing
    first = min((one.requested_ns for one in ended), default=times[-1])
    last = max((one.stored_ns for one in ended), default=times[-1])
    before, after = (ready_ns + (first - ready_ns) // 5, first), (last + SETTLE_NS, times[-1])
    row.before_ms, row.after_ms = median_ms(times, [before]), median_ms(times, [after])
    row.during_ms = median_ms(times, [(one.begin_ns, one.end_ns) for one in recorded])
    row.ratio = ratio(row.after_ms, row.before_ms)
    windows = (first, last), (last, times[-1])
    row.gap_during_ms, row.gap_after_ms = (longest_ms(times, window) for window in windows)
    if untouched:
        row.untouched_ms = median_ms(untouched, [(untouched[0] + SETTLE_NS, untouched[-1])])
        shift = untouched[0] - times[0] if untouched[-1] < times[0] else 0
        shifted = [(begin + shift, end + shift) for begin, end in (before, after)]
        row.twin_gap_during_ms, row.twin_gap_after_ms = (
            longest_ms(untouched, (begin + shift, min(end + shift, untouched[-1]))) for begin, end in windows
        )
        row.twin_ratio = ratio(median_ms(untouched, shifted[1:]), median_ms(untouched, shifted[:1]))
    for gap, of_twin in ((row.gap_during_ms, row.twin_gap_during_ms), (row.gap_after_ms, row.twin_gap_after_ms)):
        if gap > of_twin + STOOD_STILL_MS:
            row.harm(f"stood still for {gap / 1e3:.1f} s, untouched {of_twin / 1e3:.1f} s")


def compare_digests(row: Row, traced: Mapping[int, str], untouched: Mapping[int, str]) -> None:
    """All that both have come to must be equal."""
    common = sorted(traced.keys() & untouched.keys())
    row.compared = len(common)
    wrong = [number for number in common if traced[number] != untouched[number]]
    if wrong:
        row.harm(f"changed results: {len(wrong)} of {len(common)} digests differ, the first at iteration {wrong[0]}")
    elif not common:
        row.notes.append("no digest could be compared")


def count_lost(row: Row, traced: Sequence[Mapping[str, Any]], untouched: Sequence[Mapping[str, Any]]) -> None:
    """Captures of graphs that a program has lost, which an untouched one does not."""
    row.lost = len(traced)
    if traced and not untouched:
        row.harm(f"lost {len(traced)} of its own captures, the first: {traced[0].get('what')}")
    elif untouched:
        row.notes.append(f"lost {len(traced)} of its own captures, untouched {len(untouched)}")


def compare_own_traces(row: Row, traced: Sequence[int], untouched: Sequence[int]) -> None:
    """The traces that the program takes of itself hold as much as without us."""
    if not traced or not untouched:
        return
    usual = statistics.median(untouched)
    poor = [count for count in traced if count < usual * OWN_TRACES_LEAST]
    row.notes.append(
        f"own traces: {min(traced)}-{max(traced)} events in {len(traced)}, untouched {min(untouched)}-{max(untouched)}"
    )
    if poor and min(untouched) >= usual * OWN_TRACES_LEAST:
        row.harm(
            f"{len(poor)} of {len(traced)} of its own traces are poorer: {poor[:10]}, untouched {usual:.0f} events"
        )


def judge_memory(row: Row) -> None:
    """Once some captures have been taken memory stays where it is, beyond what the untouched program takes, too."""
    for part in ("rss", "gpu"):
        grown = growth(row.memory, part) - max(0, growth(row.twin_memory, part))
        if grown > MEMORY_SLACK:
            row.harm(f"{'resident' if part == 'rss' else 'GPU'} memory grew by {grown >> 20} MiB")


def growth(memory: Mapping[str, Memory], part: str) -> int:
    """From the point at which it has settled to the end, in bytes; 0: unknown."""
    points = [getattr(memory[point], part) for point in ("settled", "end") if point in memory]
    return points[1] - points[0] if len(points) == 2 and all(points) else 0
