"""The parts of a trace's window that a source of the agent did not record.

A source may begin late, end early, or drop records while its buffers are full. Time that it did not record is unknown:
it must not be mistaken for time in which nothing happened.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from kineto_trace.base.quantities import format_duration
from kineto_trace.model.activity_tables import table_of

MAX_PARTS = 1024
_MAX_NS = 1 << 62
_NEGLIGIBLE = 0.01  # of the window
_SHOWN = 3
Part = tuple[int, int]  # [start, end), Unix ns


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCoverage:
    """The coverage of one source.

    kinds: the tables that it fills.
    missing: disjoint parts of the window that it does not cover, ascending.
    dropped: records that were lost because buffers were full.
    """

    source: str
    kinds: tuple[str, ...]
    missing: tuple[Part, ...]
    dropped: int = 0

    @property
    def missing_ns(self) -> int:
        """Total length of the missing parts, in ns."""
        return sum(end - start for start, end in self.missing)

    def moved(self, shift_ns: int) -> Self:
        """Returns the coverage with every time `shift_ns` later."""
        parts = tuple((start + shift_ns, end + shift_ns) for start, end in self.missing)
        return type(self)(source=self.source, kinds=self.kinds, missing=parts, dropped=self.dropped)

    def to_json(self, category: Callable[[str], str] = str) -> dict[str, Any]:
        """Returns the values for json.dumps. category: the file's category for the rows of a table."""
        return {**asdict(self), "kinds": [category(kind) for kind in self.kinds]}


def from_json(values: Any) -> tuple[SourceCoverage, ...]:
    """Returns several sources from the output of `to_json`, with the tables of the categories; skips invalid
    entries.
    """
    found = []
    for entry in values if isinstance(values, list) else ():
        if isinstance(entry, Mapping) and isinstance(entry.get("source"), str) and _are_texts(entry.get("kinds")):
            parts, dropped = parts_of(entry.get("missing")), entry.get("dropped")
            dropped = dropped if type(dropped) is int and 0 <= dropped < _MAX_NS else 0
            if parts is not None:
                kinds = tuple(map(table_of, entry["kinds"]))
                found.append(SourceCoverage(source=entry["source"], kinds=kinds, missing=parts, dropped=dropped))
    return tuple(found)


def parts_of(values: Any) -> tuple[Part, ...] | None:
    """Returns [[start, end], …] as disjoint parts in ascending order; None if it is anything else."""
    if not isinstance(values, (list, tuple)) or len(values) > MAX_PARTS:
        return None
    for each in values:
        if not isinstance(each, (list, tuple)) or len(each) != 2 or not all(_is_time(time_ns) for time_ns in each):
            return None
    found: list[Part] = []
    for start, end in sorted((start, end) for start, end in values if start < end):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return tuple(found)


def coverage_note(coverage: SourceCoverage, start_ns: int, end_ns: int) -> str:
    """Describes the part of the window that a source did not record; "" if it is negligible."""
    length = end_ns - start_ns
    if coverage.missing_ns <= _NEGLIGIBLE * length:
        return ""
    parts = [
        f"{format_duration(begin - start_ns)} to {format_duration(end - start_ns)}"
        for begin, end in coverage.missing[:_SHOWN]
    ]
    more = ", …" if len(coverage.missing) > _SHOWN else ""
    dropped = f" ({coverage.dropped:,} records were dropped: buffers were full)" if coverage.dropped else ""
    return (
        f"{coverage.source} covers {100 * (1 - coverage.missing_ns / length):.3g} % of the window of "
        f"{format_duration(length)}{dropped}; missing: {', '.join(parts)}{more}"
    )


def _is_time(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_NS


def _are_texts(values: Any) -> bool:
    return isinstance(values, (list, tuple)) and len(values) > 0 and all(isinstance(value, str) for value in values)
