"""The native writer of Perfetto packets through ctypes. See daemon/native/perfetto/write_packets.h.

The classes keep alive the arrays that the native code reads.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.codec import PreparedTexts, load

# kc_packet_field.operation
UNSIGNED, SIGNED, DOUBLE, OPTIONAL, READY = range(5)
# kc_packet_kind.type
SLICE, INSTANT, COUNTER, DOUBLE_COUNTER = 1, 3, 4, 5
LANE_LIMIT = 1024  # KC_PACKET_LANES
SEQUENCE_LIMIT = 1 << 28
ALWAYS = -1  # Field.bit

AnyArray = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]


class _Nesting(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_uint64),
        ("track", ctypes.c_void_p),
        ("start", ctypes.c_void_p),
        ("end", ctypes.c_void_p),
        ("leaf", ctypes.c_void_p),
        ("above", ctypes.c_void_p),
        ("lane", ctypes.c_void_p),
        ("lane_limit", ctypes.c_uint32),
        ("deepest", ctypes.c_uint32),
        ("shortened", ctypes.c_uint64),
    )


class _Field(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_uint32),
        ("operation", ctypes.c_uint32),
        ("column", ctypes.c_void_p),
        ("width", ctypes.c_uint32),
        ("bit", ctypes.c_uint32),
        ("present", ctypes.c_void_p),
        ("base", ctypes.c_int64),
        ("ready", ctypes.c_void_p),
        ("ready_ends", ctypes.c_void_p),
        ("ready_count", ctypes.c_uint64),
    )


class _Kind(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_uint32),
        ("category", ctypes.c_uint32),
        ("categories", ctypes.c_void_p),
        ("name", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("first_field", ctypes.c_uint32),
        ("field_count", ctypes.c_uint32),
    )


class _Events(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_void_p),
        ("row", ctypes.c_void_p),
        ("start", ctypes.c_void_p),
        ("end", ctypes.c_void_p),
        ("kinds", ctypes.c_void_p),
        ("fields", ctypes.c_void_p),
        ("flow_event", ctypes.c_void_p),
        ("flow_id", ctypes.c_void_p),
        ("flow_count", ctypes.c_uint64),
    )


class _Track(ctypes.Structure):
    _fields_ = (
        ("next", ctypes.c_uint64),
        ("last", ctypes.c_uint64),
        ("flow", ctypes.c_uint64),
        ("time", ctypes.c_int64),
        ("stack", ctypes.c_void_p),
        ("depth", ctypes.c_uint32),
        ("sequence", ctypes.c_uint32),
    )


class _Written(ctypes.Structure):
    _fields_ = (("rows", ctypes.c_uint64), ("bytes", ctypes.c_uint64))


@cache
def _library() -> ctypes.CDLL:
    library = load()
    library.kc_packet_lanes.argtypes = [ctypes.c_void_p]
    library.kc_packet_lanes.restype = None
    library.kc_packet_write.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p]
    library.kc_packet_write.argtypes += [ctypes.c_uint64, ctypes.c_void_p]
    library.kc_packet_write.restype = None
    return library


class Lanes(NamedTuple):
    """The lane of each event, and its end (ns) there.

    deepest: the maximum nesting depth; shortened: the number of ends moved because even the last lane had no room.
    """

    lane: npt.NDArray[np.uint16]
    end: Ints
    deepest: int
    shortened: int


def nest_lanes(
    track: npt.NDArray[np.uint32],
    start: Ints,
    end: Ints,
    leaf: npt.NDArray[np.uint8],
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


class PacketField(NamedTuple):
    """One debug annotation of all rows of a kind. `name`: id of its interned name.

    READY: the column has numbers into `ready`, whose texts are whole annotations. OPTIONAL: a signed number, left out
    if it equals `base`. bit: a row has the annotation only if this bit of `present` is set.
    """

    name: int
    operation: int
    column: AnyArray
    base: int = 0
    ready: PreparedTexts | None = None
    present: npt.NDArray[np.uint64] | None = None
    bit: int = ALWAYS


class PacketKind(NamedTuple):
    """Rows of one table.

    category: id of the interned category (0: none), or one id per row. name: a number per row, one below the id of the
    interned name. value: the values of counters, int64 or double.
    """

    type: int
    category: int | npt.NDArray[np.uint32]
    name: npt.NDArray[np.int32] | None
    fields: Sequence[PacketField]
    value: AnyArray | None = None


class PacketWriter:
    """Writes the events of one track after the other.

    kind, row, start, end: one value per event; events of one track are adjacent and sorted by start. flow_event
    (ascending) and flow_id: the flows of each event. deepest: as nest_lanes() returns it.
    """

    def __init__(
        self,
        kinds: Sequence[PacketKind],
        events: tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32], Ints, Ints],
        flows: tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]],
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
    """The packets of one track in the form that TextSink takes: one row per event, and one that closes open events."""

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


def _checked(array: AnyArray, dtype: str) -> int:
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(f"a column of {array.dtype}, not of {dtype} in one piece")
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
