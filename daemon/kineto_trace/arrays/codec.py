"""The native trace codec through ctypes: interning, record decoding, row writing. See daemon/native/codec/codec.h.

Every call releases the interpreter lock. Arrays that are handed over must stay alive during the call; the
classes here keep them.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kineto_trace.base.array_types import AnyArray, Ints, Ints32, UInts8, UInts32, UInts64
from kineto_trace.errors import CodecError

LIBRARY = Path(__file__).parents[1] / "_native" / "libkineto_codec.so"
ABI_VERSION = 11
PADDING = 32  # bytes that the native side may read after a literal or text
MAX_KINDS = 16  # of record kinds in one decode
KIND_LIMIT = 64  # a record's kind is below this

# kc_column.operation
COPY, SPAN, INTERN = range(3)
# kc_field.operation
END, UNSIGNED, SIGNED, MICROSECONDS, DECIMAL, TEXT, OPTIONAL, REAL, TIME, WHOLE = range(10)
# kc_decoded.status
OK, TORN, UNKNOWN_KIND, FULL, NO_MEMORY = range(5)


def members(kind: Any, *names: str) -> tuple[tuple[str, Any], ...]:
    """Returns members of one type, for `_fields_` of a structure."""
    return tuple((name, kind) for name in names)


class _Column(ctypes.Structure):
    _fields_ = (
        *members(ctypes.c_uint32, "operation", "width", "offset", "offset_2"),
        *members(ctypes.c_void_p, "out", "out_2", "interner"),
    )


class _Kind(ctypes.Structure):
    _fields_ = (
        *members(ctypes.c_uint32, "kind", "record_bytes", "first_column", "column_count"),
        *members(ctypes.c_uint64, "capacity", "rows"),
    )


class NativeResult(ctypes.Structure):
    """kc_decoded: how a pass through one buffer ended."""

    _fields_ = (*members(ctypes.c_uint64, "consumed", "records"), *members(ctypes.c_uint32, "status", "kind"))


class _Field(ctypes.Structure):
    _fields_ = (
        ("literal", ctypes.c_char_p),
        *members(ctypes.c_uint32, "literal_bytes", "operation"),
        ("column", ctypes.c_void_p),
        *members(ctypes.c_uint32, "width", "text_count"),
        *members(ctypes.c_void_p, "text", "text_ends"),
        ("base", ctypes.c_int64),
    )


class _Written(ctypes.Structure):
    _fields_ = members(ctypes.c_uint64, "rows", "bytes")


class _RowGroup(ctypes.Structure):
    _fields_ = members(ctypes.c_uint32, "first_field", "field_count")


class _Events(ctypes.Structure):
    _fields_ = (("count", ctypes.c_uint64), *members(ctypes.c_void_p, "track", "start", "end", "rank"))


class _Tree(ctypes.Structure):
    _fields_ = members(ctypes.c_void_p, "parent", "depth", "children", "stop", "end", "self")


def declare(library: ctypes.CDLL, result: Any, name: str, *arguments: Any) -> None:
    """States the types of a function of the library. result: None for none."""
    function = getattr(library, name)
    function.restype, function.argtypes = result, arguments


@cache
def load(path: Path = LIBRARY) -> ctypes.CDLL:
    """Loads the library once. Raises CodecError."""
    advice = "build it with: python agent/native/build_hook.py (needs a C compiler), or reinstall the package"
    try:
        library = ctypes.CDLL(str(path))
        library.kc_abi_version.restype = ctypes.c_uint32
        version = library.kc_abi_version()
    except (OSError, AttributeError) as exc:
        raise CodecError(f"cannot load the native trace codec {path} ({exc}); {advice}") from exc
    if version != ABI_VERSION:
        raise CodecError(f"the native trace codec {path} has version {version}, not {ABI_VERSION}; {advice}")
    number, pointer, status, word = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32
    declare(library, pointer, "kc_interner_new")
    declare(library, None, "kc_interner_free", pointer)
    declare(library, number, "kc_interner_count", pointer)
    declare(library, None, "kc_interner_keys", pointer, pointer)
    declare(library, status, "kc_intern", pointer, pointer, number, pointer)
    declare(library, None, "kc_decode", pointer, number, pointer, word, pointer, pointer)
    declare(library, None, "kc_walk", pointer, number, word, pointer, word, pointer, pointer)
    declare(library, None, "kc_write", pointer, word, number, number, pointer, number, pointer)
    declare(library, None, "kc_write_mixed", *[pointer] * 4, number, number, pointer, number, pointer)
    declare(library, None, "kc_lanes", pointer, pointer, pointer, number, word, pointer)
    declare(library, None, "kc_order", *[pointer] * 3)
    declare(library, None, "kc_nest", pointer, ctypes.c_int64, pointer)
    declare(library, None, "kc_contain", pointer, pointer)
    declare(library, None, "kc_enclosing", *[pointer] * 4)
    declare(library, status, "kc_spill_pool", number, number)
    declare(library, status, "kc_spill_open", status, status, number, number, number)
    declare(library, status, "kc_spill_watch", pointer, number)
    return library


class Interner:
    """Numbers 64-bit keys in the order of their first appearance."""

    def __init__(self) -> None:
        self._library = load()
        self.handle = self._library.kc_interner_new()
        if not self.handle:
            raise MemoryError("not enough memory for an interner")

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._library.kc_interner_free(self.handle)
            self.handle = None

    def __len__(self) -> int:
        return int(self._library.kc_interner_count(self.handle))

    def keys(self) -> UInts64:
        """Returns the key of each number."""
        keys = np.empty(len(self), np.uint64)
        self._library.kc_interner_keys(self.handle, keys.ctypes.data)
        return keys

    def intern(self, keys: UInts64) -> UInts32:
        """Returns the number of each key; new keys get new numbers."""
        keys = np.ascontiguousarray(keys, np.uint64)
        numbers = np.empty(len(keys), np.uint32)
        if self._library.kc_intern(self.handle, keys.ctypes.data, len(keys), numbers.ctypes.data):
            raise MemoryError("not enough memory for an interner")
        return numbers


class ColumnPlan(NamedTuple):
    """One column of one record kind: what to read where (bytes), and the output array.

    SPAN reads a start at `offset` and an end at `offset_2`; `out_2` gets the durations.
    """

    operation: int
    width: int
    offset: int
    out: AnyArray
    offset_2: int = 0
    out_2: AnyArray | None = None
    interner: Interner | None = None


class KindPlan(NamedTuple):
    """One record kind: its size in bytes and its columns (none: skip). All arrays have room for `capacity` rows."""

    kind: int
    record_bytes: int
    capacity: int
    columns: Sequence[ColumnPlan]


class BufferResult(NamedTuple):
    """The result of one buffer: bytes and records read, why it stopped (OK, TORN, …), and at which kind."""

    consumed: int
    records: int
    status: int
    kind: int


class Decoder:
    """Reads buffers one after the other into the arrays of the plans."""

    def __init__(self, plans: Sequence[KindPlan]) -> None:
        if len(plans) > MAX_KINDS:
            raise ValueError(f"{len(plans)} record kinds, but at most {MAX_KINDS} fit")
        self._library = load()
        self._plans = plans
        columns = [column for plan in plans for column in plan.columns]
        self._columns = (_Column * max(1, len(columns)))(*map(_native_column, columns))
        self._kinds = (_Kind * max(1, len(plans)))()
        first = 0
        for native, plan in zip(self._kinds, plans, strict=False):
            _check_plan(plan)
            native.kind, native.record_bytes, native.capacity = plan.kind, plan.record_bytes, plan.capacity
            native.first_column, native.column_count = first, len(plan.columns)
            first += len(plan.columns)

    def decode(self, data: AnyArray) -> BufferResult:
        """Appends the records of one buffer (bytes as uint8)."""
        result = NativeResult()
        self._library.kc_decode(
            data.ctypes.data, data.nbytes, self._kinds, len(self._plans), self._columns, ctypes.byref(result)
        )
        if result.status == NO_MEMORY:
            raise MemoryError("not enough memory to decode records")
        return BufferResult(result.consumed, result.records, result.status, result.kind)

    def rewind(self) -> None:
        """Makes the next decode() write from the first row on."""
        for native in self._kinds:
            native.rows = 0

    def rows(self) -> dict[int, int]:
        """Returns the number of records read so far by kind."""
        return {native.kind: native.rows for native in self._kinds[: len(self._plans)]}


def _native_column(column: ColumnPlan) -> _Column:
    return _Column(
        column.operation,
        column.width,
        column.offset,
        column.offset_2,
        column.out.ctypes.data,
        None if column.out_2 is None else column.out_2.ctypes.data,
        None if column.interner is None else column.interner.handle,
    )


def _check_plan(plan: KindPlan) -> None:
    """Checks the plan, because the native code trusts it."""
    if not 0 <= plan.kind < KIND_LIMIT or plan.record_bytes < 8:
        raise ValueError(f"kind {plan.kind} with {plan.record_bytes} bytes cannot be decoded")
    for column in plan.columns:
        last = max(column.offset + column.width, column.offset_2 + (8 if column.out_2 is not None else 0))
        fits = _takes(column.out, 4 if column.operation == INTERN else column.width, plan.capacity)
        if column.operation == SPAN:
            fits = fits and column.width == 8 and column.out_2 is not None and _takes(column.out_2, 8, plan.capacity)
        if last > plan.record_bytes or not fits or (column.operation == INTERN and column.interner is None):
            raise ValueError(f"kind {plan.kind}: column at byte {column.offset} does not fit its record or array")


def _takes(array: AnyArray, width: int, rows: int) -> bool:
    return bool(array.flags.c_contiguous) and array.itemsize == width and len(array) >= rows


class PreparedTexts:
    """Finished pieces of text by number, for TEXT fields."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.count = len(pieces)
        self.data = np.frombuffer(b"".join(pieces) + bytes(PADDING), np.uint8)
        self.ends = np.zeros(self.count + 1, np.uint64)
        np.cumsum([len(piece) for piece in pieces], out=self.ends[1:], dtype=np.uint64)


class Field(NamedTuple):
    """One literal and the value after it.

    base: is subtracted from MICROSECONDS (ns); an OPTIONAL field is left out if its value equals it.
    """

    literal: bytes
    operation: int = END
    column: AnyArray | None = None
    texts: PreparedTexts | None = None
    base: int = 0


class RowWriter:
    """Writes rows of text that all have the same fields."""

    def __init__(self, fields: Sequence[Field]) -> None:
        self._library = load()
        self._keep = [
            (field._replace(column=_contiguous(field.column)), field.literal + bytes(PADDING)) for field in fields
        ]
        self._rows = min((len(field.column) for field, _ in self._keep if field.column is not None), default=0)
        self._fields = (_Field * len(fields))(*(_native_field(field, literal) for field, literal in self._keep))

    def write(self, out: AnyArray, first: int, count: int) -> tuple[int, int]:
        """Writes rows first, first + 1, … into `out`. Returns (rows, bytes) that fitted."""
        if first < 0 or first + count > self._rows:
            raise IndexError(f"rows {first} to {first + count} do not exist")
        result = _Written()
        self._library.kc_write(
            self._fields, len(self._fields), first, count, out.ctypes.data, out.nbytes, ctypes.byref(result)
        )
        return result.rows, result.bytes


class MixedWriter:
    """Writes rows of several forms in one order: the i-th one is row[i] of the columns of forms[form[i]]."""

    def __init__(self, forms: Sequence[Sequence[Field]], form: AnyArray, row: AnyArray) -> None:
        self._library = load()
        self._form, self._row = np.ascontiguousarray(form, np.uint32), np.ascontiguousarray(row, np.uint32)
        if len(form) != len(row):
            raise ValueError(f"expected one form for each row, got {len(form)} for {len(row)} rows")
        self._groups = (_RowGroup * max(1, len(forms)))()
        fields: list[Field] = []
        for native, own in zip(self._groups, forms, strict=False):
            native.first_field, native.field_count = len(fields), len(own)
            fields += own
        self._keep = [
            (field._replace(column=_contiguous(field.column)), field.literal + bytes(PADDING)) for field in fields
        ]
        self._fields = (_Field * max(1, len(fields)))(*(_native_field(field, text) for field, text in self._keep))
        self._check(forms)

    def _check(self, forms: Sequence[Sequence[Field]]) -> None:
        """Checks the rows, because the native code trusts them."""
        if len(self._form) and int(self._form.max()) >= len(forms):
            raise IndexError("a row has an unknown form")
        last = np.zeros(len(forms), np.int64)
        np.maximum.at(last, self._form.astype(np.intp), self._row.astype(np.int64))  # other types take ten times longer
        for fields, row in zip(forms, last.tolist(), strict=True):
            if any(field.column is not None and row >= len(field.column) for field in fields):
                raise IndexError(f"row {row} does not exist")

    def write(self, out: AnyArray, first: int, count: int) -> tuple[int, int]:
        """Writes the rows first, first + 1, … of the order into `out`. Returns (rows, bytes) that fitted."""
        if first < 0 or first + count > len(self._row):
            raise IndexError(f"rows {first} to {first + count} do not exist")
        result = _Written()
        self._library.kc_write_mixed(
            self._fields,
            self._groups,
            self._form.ctypes.data,
            self._row.ctypes.data,
            first,
            count,
            out.ctypes.data,
            out.nbytes,
            ctypes.byref(result),
        )
        return result.rows, result.bytes


def _contiguous(column: AnyArray | None) -> AnyArray | None:
    return None if column is None else np.ascontiguousarray(column)


def _native_field(field: Field, padded: bytes) -> _Field:
    native = _Field(padded, len(field.literal), field.operation, base=field.base)
    if field.column is not None:
        if field.operation in (MICROSECONDS, DECIMAL, REAL, TIME, WHOLE) and field.column.itemsize != 8:
            raise ValueError("times and decimals must be 8 bytes wide")
        native.column, native.width = field.column.ctypes.data, field.column.itemsize
    elif field.operation != END:
        raise ValueError("a value needs a column")
    if field.texts is not None:
        native.text, native.text_ends = field.texts.data.ctypes.data, field.texts.ends.ctypes.data
        native.text_count = field.texts.count
    return native


def lanes(track: UInts32, start: Ints, end: Ints, limit: int) -> UInts8:
    """Assigns a lane to each event so that events of one lane do not overlap. Rows are sorted by (track, start)."""
    track = np.ascontiguousarray(track, np.uint32)
    start, end = np.ascontiguousarray(start, np.int64), np.ascontiguousarray(end, np.int64)
    lane = np.zeros(len(track), np.uint8)
    load().kc_lanes(track.ctypes.data, start.ctypes.data, end.ctypes.data, len(track), limit, lane.ctypes.data)
    return lane


NEVER = 2**63 - 1  # the end of an event that was still running when the recording ended
MAX_EVENTS = 2**31 - 1
OVERLAPS = -2  # of contain()


class Nest(NamedTuple):
    """The tree of sorted events, one value per event. Times in ns.

    parent: place of the enclosing event, or -1.
    stop: the place after the last descendant.
    end: as given, but not after the parent's.
    self_time: time in which no child ran.
    """

    parent: Ints32
    depth: Ints32
    children: Ints32
    stop: Ints32
    end: Ints
    self_time: Ints


class Events:
    """Intervals (ns) of some tracks, for the functions below. Keeps the arrays that the native side reads."""

    def __init__(
        self, track: AnyArray, start: AnyArray, end: AnyArray | None = None, rank: AnyArray | None = None
    ) -> None:
        if len(track) > MAX_EVENTS:
            raise ValueError(f"{len(track)} events, but at most {MAX_EVENTS} fit into one tree")
        self.track, self.start = np.ascontiguousarray(track, np.uint32), np.ascontiguousarray(start, np.int64)
        self.end = None if end is None else np.ascontiguousarray(end, np.int64)
        self.rank = None if rank is None else np.ascontiguousarray(rank, np.uint8)
        arrays = (self.track, self.start, self.end, self.rank)
        if any(array is not None and len(array) != len(track) for array in arrays):
            raise ValueError("columns of events differ in length")
        self._native = _Events(len(track), *(None if array is None else array.ctypes.data for array in arrays))
        self.pointer = ctypes.byref(self._native)

    def __len__(self) -> int:
        return len(self.track)

    def order(self) -> UInts32:
        """Returns the places sorted by track, start, end (descending), rank and place."""
        order, scratch = np.empty(len(self), np.uint32), np.empty(len(self), np.uint32)
        load().kc_order(self.pointer, order.ctypes.data, scratch.ctypes.data)
        return order

    def take(self, order: AnyArray) -> "Events":
        """Returns the events at these places, without ranks."""
        return Events(self.track[order], self.start[order], None if self.end is None else self.end[order])

    def nest(self, window_end_ns: int) -> Nest:
        """Returns the tree of sorted events. Outermost events that end NEVER end at `window_end_ns`."""
        if self.end is None:
            raise ValueError("events need ends to form a tree")
        count = len(self)
        parent, depth, children, stop = (np.empty(count, np.int32) for _ in range(4))
        result = Nest(parent, depth, children, stop, np.empty(count, np.int64), np.empty(count, np.int64))
        tree = _Tree(*(array.ctypes.data for array in result))
        load().kc_nest(self.pointer, window_end_ns, ctypes.byref(tree))
        return result

    def contain(self) -> Ints32:
        """For each of these sorted events the place of the innermost event around it; -1: none.

        OVERLAPS: it outlives an event that runs when it starts, and encloses nothing.
        """
        if self.end is None:
            raise ValueError("events need ends to contain others")
        parent = np.empty(len(self), np.int32)
        load().kc_contain(self.pointer, parent.ctypes.data)
        return parent

    def enclosing(self, parent: Ints32, moments: "Events") -> Ints32:
        """For moments in any order: the place of the innermost of these sorted events that runs then, -1: none.

        The ends and parents must be those of nest().
        """
        if self.end is None or len(parent) != len(self) or parent.dtype != np.int32:
            raise ValueError("events need the ends and parents of their tree to be searched")
        order = moments.order()
        ordered, found = moments.take(order), np.empty(len(moments), np.int32)
        load().kc_enclosing(self.pointer, parent.ctypes.data, ordered.pointer, found.ctypes.data)
        result = np.empty_like(found)
        result[order] = found
        return result
