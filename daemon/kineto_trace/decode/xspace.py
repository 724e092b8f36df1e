"""Reads XLA's profiles (XSpace) from the wire format of protobuf, without protobuf.

Field numbers are those of tsl/profiler/protobuf/xplane.proto.

Theory of operation
    An event has the number of its metadata, which has its name, and statistics with numbers of their own metadata. Most
    of a large profile is unwanted events (markers of XLA's thread pools): the caller selects events by name, and the
    others are skipped without being read. Events are made one at a time, on request. Times are picoseconds after the
    beginning of the line.

Reads serialised protobuf messages field by field, from hostile input, too.
    A message is a sequence of fields: a varint with number and wire type, then the value. A reader asks for the fields
    of a message and descends into those that it knows; the others are skipped. No message is kept: values are numbers
    and places in the data. Data that does not fit into its message, or is not a field, raises Damaged; so no length in
    the input is trusted, and the work is bounded by its size: every step forward takes at least one byte.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

MOST_TEXT = 4096  # characters of a name or value
_PLANES_TAG, _ID_TAG, _NAME_TAG = 0x0A, 0x08, 0x12  # first bytes of the fields planes, and of a plane's id and name
_METADATA, _OFFSET, _DURATION, _STAT = 0x08, 0x10, 0x18, 0x22  # first bytes of an event's fields
_EVENT_TAGS = frozenset((_METADATA, _OFFSET, _DURATION, _STAT))
_SHORT, _MOST_KNOWN = 16, 1 << 16  # size limit (bytes) of a cached statistic, and limit of their number
MOST_COMMON = 64  # statistics that all events of a metadata have: each event gets them
Value = int | float | str
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
_FIXED = {FIXED64: 8, FIXED32: 4}  # bytes
_MOST_SHIFT = 63
_MASK = (1 << 64) - 1


@dataclass(slots=True)
class Event:
    """One event. begin and duration in ps, begin relative to its line; stats by name, the last one of each."""

    name: str
    begin_ps: int
    duration_ps: int
    stats: dict[str, Value]


@dataclass(slots=True)
class ProfileLine:
    """A thread, a stream or another row. timestamp_ns: Unix, or relative to the beginning of the profile."""

    number: int
    name: str
    timestamp_ns: int
    events: Iterator[Event]  # may raise Damaged


@dataclass(slots=True)
class Plane:
    """A device, the host, or information on the profile itself."""

    name: str
    stats: dict[str, Value]
    lines: Iterator[ProfileLine]  # may raise Damaged


class _Plane:
    def __init__(self, data: bytes, begin: int, end: int, wanted: Callable[[str, str], bool]) -> None:
        self._data, self._begin, self._end, self._wanted = data, begin, end, wanted
        self._stat_names: dict[int, str] = {}
        self._known: dict[bytes, tuple[str, Value | None]] = {}  # statistics by their bytes
        self._events: dict[int, tuple[str, dict[str, Value]]] = {}  # wanted ones: name, statistics that all have

    def read(self) -> Plane:
        """Reads the plane; names first, which may come after their uses."""
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
        """Reads an event; None if it is not wanted. Most reading time is spent here, hence no generator and
        few calls.
        """
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
            while True:  # varint(), inlined
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
        """Returns name and value (None if it has none). The same few recur again and again."""
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


class Damaged(ValueError):
    """The bytes are not such a message."""


def is_xspace(head: bytes) -> bool:
    """Returns whether a file with this beginning is a serialised XSpace: its first plane is called "/host:CPU" or so.

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


def _text(data: bytes, begin: int, end: int) -> str:
    return data[begin : min(end, begin + 4 * MOST_TEXT)].decode("utf-8", "replace")[:MOST_TEXT]


def varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Returns the number that begins there, and the place after it. Raises Damaged."""
    value = shift = 0
    while True:
        if at >= end or shift > _MOST_SHIFT:
            raise Damaged
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & _MASK, at
        shift += 7


def fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields (field number, wire type, value or begin, end) of each field of the message in data[at:end].

    Numbers: value and 0; FIXED64 and FIXED32 likewise, as unsigned. BYTES: where they begin and end. Raises Damaged.
    """
    if not 0 <= at <= end <= len(data):
        raise Damaged
    while at < end:
        tag, at = varint(data, at, end)
        kind = tag & 7
        if kind == VARINT:
            value, at = varint(data, at, end)
            yield tag >> 3, kind, value, 0
        elif kind == BYTES:
            size, at = varint(data, at, end)
            if size > end - at:
                raise Damaged
            yield tag >> 3, kind, at, at + size
            at += size
        elif kind in _FIXED:
            size = _FIXED[kind]
            if size > end - at:
                raise Damaged
            yield tag >> 3, kind, int.from_bytes(data[at : at + size], "little"), 0
            at += size
        else:
            raise Damaged


def step_over(data: bytes, at: int, end: int) -> int:
    """Returns the place after the field that begins there. Raises Damaged."""
    tag, at = varint(data, at, end)
    kind = tag & 7
    if kind == VARINT:
        return varint(data, at, end)[1]
    size, at = varint(data, at, end) if kind == BYTES else (_FIXED.get(kind, end + 1), at)
    if size > end - at:
        raise Damaged
    return at + size


def numbers(data: bytes, kind: int, value: int, end: int) -> list[int]:
    """Returns the values of a repeated number, of which a field holds one or, if packed, many. Raises Damaged."""
    if kind == VARINT:
        return [value]
    found = []
    at = value
    while at < end:
        number, at = varint(data, at, end)
        found.append(number)
    return found


def signed(value: int) -> int:
    """Returns an int64 that was written as a varint."""
    return value - (1 << 64) if value >> 63 else value
