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

from kineto_trace.decode.xplane.protobuf import BYTES, FIXED64, VARINT, Damaged, fields, signed, step_over, varint

MOST_TEXT = 4096  # characters of a name or value
_PLANES_TAG, _ID_TAG, _NAME_TAG = 0x0A, 0x08, 0x12  # first bytes of the fields planes, and of a plane's id and name
_METADATA, _OFFSET, _DURATION, _STAT = 0x08, 0x10, 0x18, 0x22  # first bytes of an event's fields
_EVENT_TAGS = frozenset((_METADATA, _OFFSET, _DURATION, _STAT))
_SHORT, _MOST_KNOWN = 16, 1 << 16  # bytes of a statistic that is worth keeping, and how many
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
class ProfileLine:
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
    lines: Iterator[ProfileLine]  # may raise Damaged


def is_xspace(head: bytes) -> bool:
    """Tells whether a file that begins like this is a serialised XSpace: its first plane is called "/host:CPU" or so.

    Files of Perfetto begin with a message, too, but none of its packets has a text with a slash in this place.
    """
    try:
        if head[:1] != bytes([_PLANES_TAG]):
            return False
        _size, at = varint(head, 1, len(head))
        if head[at : at + 1] == bytes([_ID_TAG]):
            _number, at = varint(head, at + 1, len(head))
        if head[at : at + 1] != bytes([_NAME_TAG]):
            return False
        _size, at = varint(head, at + 1, len(head))
    except Damaged:
        return False
    return head[at : at + 1] == b"/"


def planes(data: bytes, wanted: Callable[[str, str], bool]) -> Iterator[Plane]:
    """Yields the planes of a serialised XSpace. wanted: by the names of plane and event. Raises Damaged."""
    for number, kind, begin, end in fields(data, 0, len(data)):
        if number == 1 and kind == BYTES:
            yield _Plane(data, begin, end, wanted).read()


class _Plane:
    def __init__(self, data: bytes, begin: int, end: int, wanted: Callable[[str, str], bool]) -> None:
        self._data, self._begin, self._end, self._wanted = data, begin, end, wanted
        self._stat_names: dict[int, str] = {}
        self._known: dict[bytes, tuple[str, Value | None]] = {}  # statistics as they are written
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

    def _line(self, begin: int, end: int) -> ProfileLine:
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
        return ProfileLine(row, shown or name, timestamp, self._line_events(begin, end))

    def _line_events(self, begin: int, end: int) -> Iterator[Event]:
        for number, kind, first, last in fields(self._data, begin, end):
            if number == 4 and kind == BYTES:
                event = self._event(first, last)
                if event is not None:
                    yield event

    def _event(self, at: int, end: int) -> Event | None:
        """Reads an event; None: it is not wanted. A profile's time goes by here: so no generator and few calls."""
        data = self._data
        known = None
        begin_ps = duration_ps = 0
        stats: dict[str, Value] = {}
        while at < end:
            tag = data[at]
            if tag not in _EVENT_TAGS:
                at = step_over(data, at, end)
                continue
            at += 1
            value = shift = 0
            while True:  # varint() in place
                if at >= end or shift > 63:
                    raise Damaged
                byte = data[at]
                at += 1
                value |= (byte & 127) << shift
                if byte < 128:
                    break
                shift += 7
            if tag == _STAT:
                if value > end - at:
                    raise Damaged
                name, found = self._stat(data[at : at + value])
                if found is not None:
                    stats[name] = found
                at += value
            elif tag == _METADATA:
                known = self._events.get(value)
                if known is None:
                    return None
            elif tag == _OFFSET:
                begin_ps = signed(value)
            else:
                duration_ps = signed(value)
        if known is None:
            return None
        name, common = known
        return Event(name, begin_ps, duration_ps, {**common, **stats} if stats else common)

    def _stats(self, places: list[tuple[int, int]]) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for begin, end in places:
            name, value = self._stat(self._data[begin:end])
            if value is not None:
                found[name] = value
        return found

    def _stat(self, data: bytes) -> tuple[str, Value | None]:
        """Returns name and value; None: it has none. The same few come again and again."""
        known = self._known.get(data)
        if known is not None:
            return known
        name = ""
        value: Value | None = None
        for number, kind, first, last in fields(data, 0, len(data)):
            if number == 1:
                name = self._stat_names.get(first, "")
            elif number in (3, 4) and kind == VARINT:
                value = first if number == 3 else signed(first)
            elif number == 7 and kind == VARINT:
                value = self._stat_names.get(first, "")
            elif number == 2 and kind == FIXED64:
                (value,) = struct.unpack("<d", struct.pack("<Q", first))
            elif number == 5 and kind == BYTES:
                value = _text(data, first, last)
        found = name, value if name else None
        if len(data) <= _SHORT and len(self._known) < _MOST_KNOWN:
            self._known[data] = found
        return found


def _text(data: bytes, begin: int, end: int) -> str:
    return data[begin : min(end, begin + 4 * MOST_TEXT)].decode("utf-8", "replace")[:MOST_TEXT]
