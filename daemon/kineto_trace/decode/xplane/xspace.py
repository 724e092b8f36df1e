"""Reads a serialised XSpace: planes with lines of events, and what their numbers stand for.

Field numbers are those of tsl/profiler/protobuf/xplane.proto.

Theory of operation
    An event has the number of its metadata, which has its name, and statistics with numbers of their own metadata. Most
    of a large profile is events that nobody wants (markers of XLA's thread pools): the caller says by name which are
    wanted, and the others are stepped over without being read. Events are made one at a time, when they are asked for.
    Times are picoseconds after the begin of the line.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kineto_trace.decode.xplane.protobuf import BYTES, FIXED64, VARINT, fields, signed, varint

MOST_TEXT = 4096  # characters of a name or value
MOST_COMMON = 64  # statistics that all events of a metadata have: each event gets them
Value = int | float | str


@dataclass(slots=True)
class Event:
    """One event. begin and duration in ps, begin after that of its line; stats by name, the last one of each."""

    name: str
    begin_ps: int
    duration_ps: int
    stats: dict[str, Value]


@dataclass(slots=True)
class Line:
    """A thread, a stream or another row. timestamp_ns: Unix, or after the begin of the profile."""

    number: int
    name: str
    timestamp_ns: int
    events: Iterator[Event]  # may raise Damaged


@dataclass(slots=True)
class Plane:
    """A device, the host, or what is known of the profile itself."""

    name: str
    stats: dict[str, Value]
    lines: Iterator[Line]  # may raise Damaged


def planes(data: bytes, wanted: Callable[[str, str], bool]) -> Iterator[Plane]:
    """Yields the planes of a serialised XSpace. wanted: by the names of plane and event. Raises Damaged."""
    for number, kind, begin, end in fields(data, 0, len(data)):
        if number == 1 and kind == BYTES:
            yield _Plane(data, begin, end, wanted).read()


class _Plane:
    def __init__(self, data: bytes, begin: int, end: int, wanted: Callable[[str, str], bool]) -> None:
        self._data, self._begin, self._end, self._wanted = data, begin, end, wanted
        self._stat_names: dict[int, str] = {}
        self._events: dict[int, tuple[str, dict[str, Value]]] = {}  # wanted ones: name, statistics that all have

    def read(self) -> Plane:
        """Reads the names first, which may come after what they name."""
        data = self._data
        name, lines, metadata, stats = "", [], [], []
        for number, kind, begin, end in fields(data, self._begin, self._end):
            if kind != BYTES:
                continue
            if number == 2:
                name = _text(data, begin, end)
            elif number == 3:
                lines.append((begin, end))
            elif number == 4:
                metadata.append((begin, end))
            elif number == 5:
                self._name_stat(begin, end)
            elif number == 6:
                stats.append((begin, end))
        for begin, end in metadata:
            self._name_event(name, begin, end)
        return Plane(name, self._stats(stats), (self._line(begin, end) for begin, end in lines))

    def _entry(self, begin: int, end: int) -> tuple[int, int, int]:
        """Returns key, and where the value begins and ends, of an entry of a map."""
        key, value = 0, (0, 0)
        for number, kind, first, last in fields(self._data, begin, end):
            if number == 1 and kind == VARINT:
                key = first
            elif number == 2 and kind == BYTES:
                value = first, last
        return key, *value

    def _name_stat(self, begin: int, end: int) -> None:
        key, first, last = self._entry(begin, end)
        for number, kind, text, text_end in fields(self._data, first, last):
            if number == 2 and kind == BYTES:
                self._stat_names[key] = _text(self._data, text, text_end)

    def _name_event(self, plane: str, begin: int, end: int) -> None:
        key, first, last = self._entry(begin, end)
        name, shown, stats = "", "", []
        for number, kind, text, text_end in fields(self._data, first, last):
            if kind != BYTES:
                continue
            if number == 2:
                name = _text(self._data, text, text_end)
            elif number == 4:
                shown = _text(self._data, text, text_end)
            elif number == 5:
                stats.append((text, text_end))
        name = shown or name
        if self._wanted(plane, name):
            self._events[key] = name, self._stats(stats[:MOST_COMMON])

    def _line(self, begin: int, end: int) -> Line:
        data = self._data
        name, shown, row, timestamp = "", "", 0, 0
        for number, kind, first, last in fields(data, begin, end):
            if number == 1 and kind == VARINT:
                row = first
            elif number == 3 and kind == VARINT:
                timestamp = signed(first)
            elif number == 2 and kind == BYTES:
                name = _text(data, first, last)
            elif number == 11 and kind == BYTES:
                shown = _text(data, first, last)
        return Line(row, shown or name, timestamp, self._line_events(begin, end))

    def _line_events(self, begin: int, end: int) -> Iterator[Event]:
        for number, kind, first, last in fields(self._data, begin, end):
            if number == 4 and kind == BYTES:
                event = self._event(first, last)
                if event is not None:
                    yield event

    def _event(self, at: int, end: int) -> Event | None:
        """Reads an event whose metadata number comes first, as it mostly does, without a generator."""
        data = self._data
        known = None
        if at < end and data[at] == 0x08:
            key, at = varint(data, at + 1, end)
            known = self._events.get(key)
            if known is None:
                return None
        begin_ps = duration_ps = 0
        stats = []
        for number, kind, first, last in fields(data, at, end):
            if number == 2 and kind == VARINT:
                begin_ps = signed(first)
            elif number == 3 and kind == VARINT:
                duration_ps = signed(first)
            elif number == 4 and kind == BYTES:
                stats.append((first, last))
            elif number == 1 and kind == VARINT:
                known = self._events.get(first)
        if known is None:
            return None
        name, common = known
        return Event(name, begin_ps, duration_ps, {**common, **self._stats(stats)} if stats else common)

    def _stats(self, places: list[tuple[int, int]]) -> dict[str, Value]:
        found: dict[str, Value] = {}
        data, names = self._data, self._stat_names
        for begin, end in places:
            name = ""
            value: Value | None = None
            for number, kind, first, last in fields(data, begin, end):
                if number == 1:
                    name = names.get(first, "")
                elif number in (3, 4) and kind == VARINT:
                    value = first if number == 3 else signed(first)
                elif number == 7 and kind == VARINT:
                    value = names.get(first, "")
                elif number == 2 and kind == FIXED64:
                    (value,) = struct.unpack("<d", struct.pack("<Q", first))
                elif number == 5 and kind == BYTES:
                    value = _text(data, first, last)
            if name and value is not None:
                found[name] = value
        return found


def _text(data: bytes, begin: int, end: int) -> str:
    return data[begin : min(end, begin + 4 * MOST_TEXT)].decode("utf-8", "replace")[:MOST_TEXT]
