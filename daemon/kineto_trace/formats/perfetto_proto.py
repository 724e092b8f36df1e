"""Messages of Perfetto's trace format that are built one at a time: tracks, interned texts, ready-made annotations.

Field numbers are those of Perfetto's public protos (trace_packet.proto, track_event.proto, track_descriptor.proto,
debug_annotation.proto, interned_data.proto, clock_snapshot.proto).

Theory of operation
    Each track has its texts in the file once and then refers to them by id. The id of a name or category is its number
    plus one. The lowest bit of an annotation text's `text_id` marks JSON: a list or an object among the row's arguments
    is shown as its JSON text, and a reader must distinguish it from a plain text that looks like one.

The native writer of Perfetto packets through ctypes. See daemon/native/perfetto/write_packets.h.

The classes keep alive the arrays that the native code reads.
"""

import ctypes
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kineto_trace.arrays.codec import PreparedTexts, declare, load, members
from kineto_trace.base.array_types import AnyArray, Ints, Ints32, UInts8, UInts16, UInts32, UInts64
from kineto_trace.model.trace import StringTable

TRACK_CLOCK = 64  # the first number of clocks that belong to a sequence
BOOT_CLOCK, REAL_CLOCK = 6, 1
CLEARED = 1  # PACKET_FLAGS: earlier interned data is no longer valid
UNIT_UNSPECIFIED, UNIT_COUNT, UNIT_BYTES = 0, 2, 3  # of counters
EXPLICIT_ORDER = 3  # child_ordering: by sibling_order_rank
KEPT_ROWS = 24301  # of ChromeEventBundle: a field of ours, which other readers skip
_PACKET = b"\x0a"
# kc_packet_field.operation
UNSIGNED, SIGNED, DOUBLE, OPTIONAL, READY = range(5)
# kc_packet_kind.type
SLICE, INSTANT, COUNTER, DOUBLE_COUNTER = 1, 3, 4, 5
LANE_LIMIT = 1024  # KC_PACKET_LANES
SEQUENCE_LIMIT = 1 << 28
ALWAYS = -1  # Field.bit


class Counter(NamedTuple):
    """What a counter track shows. unit: UNIT_COUNT or UNIT_BYTES; unit_name: any other unit, with UNIT_UNSPECIFIED."""

    unit: int = UNIT_COUNT
    unit_name: str = ""


class TrackInfo(NamedTuple):
    """A row of the viewer.

    uuid: of this track.
    parent: uuid of the track above it, 0 if there is none.
    pid and tid: both for a thread, pid alone for a process, otherwise -1.
    rank: its order among its siblings.
    """

    uuid: int
    name: str
    parent: int = 0
    pid: int = -1
    tid: int = -1
    label: str = ""
    rank: int = 0
    counter: Counter | None = None


class Ready(NamedTuple):
    """Encoded annotations, and the ids of the names and of the text values that they refer to."""

    content: bytes
    names: frozenset[int]
    texts: frozenset[int]


NOTHING_READY = Ready(b"", frozenset(), frozenset())


class Annotations:
    """Encodes annotations and collects their texts."""

    def __init__(self) -> None:
        self._names, self._texts = StringTable(), StringTable()

    def name(self, text: str) -> int:
        """Returns the id of an annotation's name."""
        return self._names.add(text) + 1

    def name_texts(self, ids: Iterable[int]) -> list[tuple[int, str]]:
        """Returns (id, text) for these names."""
        return [(identity, self._names.strings[identity - 1]) for identity in sorted(ids)]

    def value_texts(self, ids: Iterable[int]) -> list[tuple[int, str]]:
        """Returns (id, text) for these text values."""
        return [(identity, self._texts.strings[identity // 2 - 1]) for identity in sorted(ids)]

    def ready(self, members: Mapping[str, Any]) -> Ready:
        """Returns annotations with the members of a JSON object."""
        content, texts = [], set()
        names = {name: self.name(name) for name in members}
        for name, value in members.items():
            body = number(1, names[name])
            if isinstance(value, bool):
                body += number(2, value)
            elif isinstance(value, int):
                body += self._integer(value)
            elif isinstance(value, float):
                body += varint(5 << 3 | 1) + struct.pack("<d", value)
            else:
                is_json = not isinstance(value, str)
                text = json.dumps(value, ensure_ascii=False) if is_json else value
                identity = text_id(self._texts.add(text), is_json)
                texts.add(identity)
                body += number(17, identity)
            content.append(data(4, body))
        return Ready(b"".join(content), frozenset(names.values()), frozenset(texts))

    def _integer(self, value: int) -> bytes:
        if -(2**63) <= value < 2**63:
            return number(4, value)
        if 0 <= value < 2**64:
            return number(3, value)
        return varint(5 << 3 | 1) + struct.pack("<d", float(value) if abs(value) < 2**1000 else float("inf"))

    def ready_text(self, members: str) -> Ready:
        """Returns annotations for the JSON text of an object's members, without braces; outer commas are ignored."""
        stripped = members.strip().strip(",")
        if not stripped:
            return NOTHING_READY
        try:
            found = json.loads("{" + stripped + "}", strict=False)
        except ValueError:
            found = {"arguments": members}
        return self.ready(found)


class _Nesting(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_uint64),
        *members(ctypes.c_void_p, "track", "start", "end", "leaf", "above", "lane"),
        *members(ctypes.c_uint32, "lane_limit", "deepest"),
        ("shortened", ctypes.c_uint64),
    )


class _Field(ctypes.Structure):
    _fields_ = (
        *members(ctypes.c_uint32, "name", "operation"),
        ("column", ctypes.c_void_p),
        *members(ctypes.c_uint32, "width", "bit"),
        ("present", ctypes.c_void_p),
        ("base", ctypes.c_int64),
        *members(ctypes.c_void_p, "ready", "ready_ends"),
        ("ready_count", ctypes.c_uint64),
    )


class _Kind(ctypes.Structure):
    _fields_ = (
        *members(ctypes.c_uint32, "type", "category"),
        *members(ctypes.c_void_p, "categories", "name", "value"),
        *members(ctypes.c_uint32, "first_field", "field_count"),
    )


class _Events(ctypes.Structure):
    _fields_ = (
        *members(ctypes.c_void_p, "kind", "row", "start", "end", "kinds", "fields", "flow_event", "flow_id"),
        ("flow_count", ctypes.c_uint64),
    )


class _Track(ctypes.Structure):
    _fields_ = (
        *members(ctypes.c_uint64, "next", "last", "flow"),
        ("time", ctypes.c_int64),
        ("stack", ctypes.c_void_p),
        *members(ctypes.c_uint32, "depth", "sequence"),
    )


class _Written(ctypes.Structure):
    _fields_ = members(ctypes.c_uint64, "rows", "bytes")


class Lanes(NamedTuple):
    """The lane of each event, and its end (ns) there.

    deepest: the maximum nesting depth; shortened: the number of ends moved because even the last lane had no room.
    """

    lane: UInts16
    end: Ints
    deepest: int
    shortened: int


class PacketField(NamedTuple):
    """One debug annotation of all rows of a kind. `name`: id of its interned name.

    READY: the column has numbers into `ready`, whose texts are whole annotations. OPTIONAL: a signed number, left out
        if it equals `base`.

    bit: a row has the annotation only if this bit of `present` is set.
    """

    name: int
    operation: int
    column: AnyArray
    base: int = 0
    ready: PreparedTexts | None = None
    present: UInts64 | None = None
    bit: int = ALWAYS


class PacketKind(NamedTuple):
    """Rows of one table.

    category: id of the interned category (0 for none), or one id per row.
    name: a number per row, one below the id of the interned name.
    value: the values of counters, int64 or double.
    """

    type: int
    category: int | UInts32
    name: Ints32 | None
    fields: Sequence[PacketField]
    value: AnyArray | None = None


class PacketWriter:
    """Writes the events of one track after the other.

    kind, row, start, end: one value per event; events of one track are adjacent and sorted by start.
    flow_event (ascending), flow_id: the flows of each event.
    deepest: as nest_lanes() returns it.
    """

    def __init__(
        self,
        kinds: Sequence[PacketKind],
        events: tuple[UInts8, UInts32, Ints, Ints],
        flows: tuple[UInts64, UInts64],
        deepest: int,
    ) -> None:
        fields = [field._replace(column=np.ascontiguousarray(field.column)) for kind in kinds for field in kind.fields]
        self._fields = (_Field * max(1, len(fields)))(*map(_native_field, fields))
        self._kinds = (_Kind * max(1, len(kinds)))()
        first = 0
        for native, kind in zip(self._kinds, kinds, strict=False):
            self._set_kind(native, kind, first)
            first += len(kind.fields)
        types = (np.uint8, np.uint32, np.int64, np.int64)
        arrays = [np.ascontiguousarray(array, dtype) for array, dtype in zip(events, types, strict=True)]
        self.flow_event, flow_id = (np.ascontiguousarray(array, np.uint64) for array in flows)
        self._kept = (kinds, fields, arrays, flow_id)
        self._start = arrays[2]
        self._stack = np.empty(deepest + 1, np.int64)
        pointers = (array.ctypes.data for array in arrays)
        self._events = _Events(
            *pointers,
            ctypes.addressof(self._kinds),
            ctypes.addressof(self._fields),
            self.flow_event.ctypes.data,
            flow_id.ctypes.data,
            len(flow_id),
        )

    @staticmethod
    def _set_kind(native: _Kind, kind: PacketKind, first: int) -> None:
        native.type, native.first_field, native.field_count = kind.type, first, len(kind.fields)
        if isinstance(kind.category, int):
            native.category = kind.category
        else:
            native.categories = _checked(kind.category, "uint32")
        native.name = None if kind.name is None else _checked(kind.name, "int32")
        if kind.value is not None:
            native.value = _checked(kind.value, "float64" if kind.type == DOUBLE_COUNTER else "int64")

    def track(self, sequence: int, first: int, last: int) -> "TrackRows":
        """Returns the rows of one track: the events first … last - 1."""
        flow = int(np.searchsorted(self.flow_event, np.uint64(first)))
        time = int(self._start[first])
        return TrackRows(self._events, _Track(first, last, flow, time, self._stack.ctypes.data, 0, sequence))


class TrackRows:
    """The packets of one track for TextSink: one row per event, and one that closes open events."""

    def __init__(self, events: _Events, track: _Track) -> None:
        self._events, self._track = events, track
        self.count = track.last - track.next + 1

    def write(self, out: AnyArray, first: int, count: int) -> tuple[int, int]:
        """Writes up to `count` rows; returns the rows and bytes written. Rows can only be written in order."""
        result = _Written()
        _library().kc_packet_write(
            ctypes.byref(self._events),
            ctypes.byref(self._track),
            count,
            out.ctypes.data,
            out.nbytes,
            ctypes.byref(result),
        )
        return result.rows, result.bytes


def varint(value: int) -> bytes:
    """Encodes an unsigned number, or the two's complement of a negative one."""
    value &= 0xFFFFFFFFFFFFFFFF
    done = bytearray()
    while value > 127:
        done.append(value & 127 | 128)
        value >>= 7
    done.append(value)
    return bytes(done)


def number(field: int, value: int) -> bytes:
    """Encodes a field that is a number."""
    return varint(field << 3) + varint(value)


def data(field: int, content: bytes | str) -> bytes:
    """Encodes a field that is a message, bytes or a text."""
    content = utf8(content) if isinstance(content, str) else content
    return varint(field << 3 | 2) + varint(len(content)) + content


def utf8(text: str) -> bytes:
    """Encodes the text; characters that UTF-8 cannot encode become question marks."""
    return text.encode("utf-8", "replace")


def packet(*fields: bytes) -> bytes:
    """Encodes one packet of the trace."""
    content = b"".join(fields)
    return _PACKET + varint(len(content)) + content


def track_packet(track: TrackInfo) -> bytes:
    """Returns the packet that describes a track."""
    fields = [number(1, track.uuid)]
    if track.parent:
        fields.append(number(5, track.parent))
    if track.tid >= 0:
        fields.append(data(4, number(1, track.pid) + number(2, track.tid) + data(5, track.name)))
    elif track.pid >= 0:
        fields.append(
            data(3, number(1, track.pid) + data(6, track.name) + (data(8, track.label) if track.label else b""))
        )
    else:
        fields.append(data(2, track.name))
    if track.counter is not None:
        unit_name = data(6, track.counter.unit_name) if track.counter.unit_name else b""
        fields.append(data(8, number(3, track.counter.unit) + unit_name))
    fields += [number(11, EXPLICIT_ORDER), number(12, track.rank)]
    return packet(data(60, b"".join(fields)))


def sequence_packet(sequence: int, uuid: int, start_ns: int, interned: bytes) -> bytes:
    """Returns the packet that begins a sequence: its clock with incremental times, its track and its texts."""
    clock = number(1, TRACK_CLOCK) + number(2, start_ns) + number(3, 1)
    boot = number(1, BOOT_CLOCK) + number(2, start_ns)
    defaults = number(58, TRACK_CLOCK) + data(11, number(11, uuid))
    return packet(
        data(6, data(1, boot) + data(1, clock)),
        number(10, sequence),
        data(12, interned),
        number(13, CLEARED),
        data(59, defaults),
    )


def clock_packet(time_ns: int) -> bytes:
    """Returns the packet that declares the file's times, which are Unix ns, to be on the boot clock.

    Viewers show times of that clock without conversion.
    """
    clocks = (data(1, number(1, clock) + number(2, time_ns)) for clock in (BOOT_CLOCK, REAL_CLOCK))
    return packet(data(6, b"".join(clocks)), number(10, 1))


def metadata_packet(name: str, text: str) -> bytes:
    """Returns a packet with a text about the whole trace."""
    return packet(data(5, data(2, data(1, name) + data(2, text))), number(10, 1))


def rows_packet(block: bytes) -> bytes:
    """Returns a packet with rows of a Chrome trace that Perfetto cannot express (perfetto_writer.py)."""
    return packet(data(5, data(KEPT_ROWS, block)), number(10, 1))


def interned(
    categories: Iterable[tuple[int, str]],
    names: Iterable[tuple[int, str]],
    annotation_names: Iterable[tuple[int, str]],
    texts: Iterable[tuple[int, str]],
) -> bytes:
    """Returns the content of InternedData, from pairs (id, text)."""
    parts = []
    for field, entries in ((1, categories), (2, names), (3, annotation_names), (29, texts)):
        parts += [data(field, number(1, identity) + data(2, text)) for identity, text in entries]
    return b"".join(parts)


def text_id(place: int, is_json: bool) -> int:
    """Returns the id of a text value."""
    return 2 * (place + 1) + is_json


@cache
def _library() -> ctypes.CDLL:
    library = load()
    pointer, number = ctypes.c_void_p, ctypes.c_uint64
    declare(library, None, "kc_packet_lanes", pointer)
    declare(library, None, "kc_packet_write", pointer, pointer, number, pointer, number, pointer)
    return library


def nest_lanes(
    track: UInts32,
    start: Ints,
    end: Ints,
    leaf: UInts8,
    limit: int = LANE_LIMIT,
) -> Lanes:
    """Assigns a lane to each event so that the events of a lane nest. Events are sorted by track, start, -end.

    leaf: 1 for events in which no other event may be nested.
    """
    track, leaf = np.ascontiguousarray(track, np.uint32), np.ascontiguousarray(leaf, np.uint8)
    start, end = np.ascontiguousarray(start, np.int64), np.array(end, np.int64)
    if not len(track) == len(start) == len(end) == len(leaf) < 2**31:
        raise ValueError("columns of events differ in length, or are too long")
    above, lane = np.empty(len(track), np.int32), np.empty(len(track), np.uint16)
    pointers = (array.ctypes.data for array in (track, start, end, leaf, above, lane))
    nesting = _Nesting(len(track), *pointers, min(limit, LANE_LIMIT))
    _library().kc_packet_lanes(ctypes.byref(nesting))
    return Lanes(lane, end, nesting.deepest, nesting.shortened)


def _checked(array: AnyArray, dtype: str) -> int:
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(f"expected a contiguous column of {dtype}, got {array.dtype}")
    return array.ctypes.data


def _native_field(field: PacketField) -> _Field:
    native = _Field(field.name, field.operation, field.column.ctypes.data, field.column.itemsize)
    native.base = field.base
    if field.present is not None:
        native.present, native.bit = _checked(field.present, "uint64"), field.bit
    if field.ready is not None:
        native.ready, native.ready_ends = field.ready.data.ctypes.data, field.ready.ends.ctypes.data
        native.ready_count = field.ready.count
    return native
