"""The native reader of Chrome traces through ctypes. See daemon/native/chrome/chrome.h."""

import ctypes
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kineto_trace.arrays import codec
from kineto_trace.base.array_types import AnyArray, Ints
from kineto_trace.model.activity_tables import CATEGORIES, COUNTER, DTYPES, FLOW, I32X3, KINDS, MAX_ARGS, MEMORY, OTHER

PADDING = 64  # zero bytes after every piece
MORE, MEMBER, DONE, NOT_JSON, DAMAGE, NO_MEMORY = range(6)  # Fed.status
LOST_EVENT, LOST_ARGS, LOST_HEAD, LOST_END, LOST_ITEM, LOST_TAIL = range(1, 7)  # Fed.lost
# Indexed by Fed.why.
REASONS = (
    "",
    "the text ends",
    "there is not enough memory",
    "a member's name is missing",
    "a colon is missing",
    "a JSON value is missing",
    "a comma or a closing bracket is missing",
    "it is nested too deeply",
    "it is not a JSON object",
    "it has no end",
)
# Columns of all kinds, as in chrome.h; the columns that every row has come first.
FIXED = (
    ("start", "int64"),
    ("duration", "int64"),
    ("present", "uint64"),
    ("name", "int32"),
    ("category", "int32"),
    ("args", "int32"),
    ("members", "int32"),
    ("track", "uint32"),
    ("place", "uint32"),
    ("phase", "uint8"),
    ("id", "int64"),
    ("ts_real", "float64"),
    ("dur_real", "float64"),
)


class _Arg(ctypes.Structure):
    _fields_ = (
        ("key", ctypes.c_char_p),
        *codec.members(ctypes.c_uint32, "key_bytes", "type", "column", "pad"),
        ("default", ctypes.c_int64),
    )


class _Kind(ctypes.Structure):
    _fields_ = codec.members(ctypes.c_uint32, "first_arg", "arg_count")


class _Category(ctypes.Structure):
    _fields_ = (("text", ctypes.c_char_p), *codec.members(ctypes.c_uint32, "bytes", "suffix", "kind", "pad"))


class _Plan(ctypes.Structure):
    _fields_ = (
        *codec.members(ctypes.c_void_p, "kinds", "args", "categories"),
        *codec.members(ctypes.c_uint32, "kind_count", "category_count"),
        *codec.members(ctypes.c_uint32, "memory_kind", "flow_kind", "other_kind", "counter_kind"),
    )


class Fed(ctypes.Structure):
    """The result of feeding one piece. Places are byte offsets in the piece; `at` is a byte offset in the document."""

    consumed: int
    key_begin: int
    key_end: int
    value_begin: int
    value_end: int
    at: int
    status: int
    why: int
    lost: int
    _fields_ = (
        *codec.members(ctypes.c_uint64, "consumed", "key_begin", "key_end", "value_begin", "value_end", "at"),
        *codec.members(ctypes.c_uint32, "status", "why", "lost", "pad"),
    )


class Counts(ctypes.Structure):
    """The state of the reader. in_events, closed, list and had_events are 0 or 1."""

    events: int
    mended: int
    phases: int
    in_events: int
    closed: int
    list: int
    had_events: int
    strings: int
    tracks: int
    _fields_ = (
        *codec.members(ctypes.c_uint64, "events", "mended", "phases"),
        *codec.members(ctypes.c_uint32, "in_events", "closed", "list", "had_events"),
        *codec.members(ctypes.c_uint64, "strings", "tracks"),
    )


class _Layout(NamedTuple):
    """The plan, the memory it points to, and the columns of the arguments of each kind."""

    plan: _Plan
    keep: tuple[Any, ...]
    columns: dict[str, list[tuple[str, str]]]


@cache
def _layout() -> _Layout:
    names = list(KINDS)
    kinds = (_Kind * len(names))()
    args: list[_Arg] = []
    columns: dict[str, list[tuple[str, str]]] = {}
    for native, (kind, entries) in zip(kinds, KINDS.items(), strict=True):
        if len(entries) > MAX_ARGS:
            raise ValueError(f"{kind}: {len(entries)} arguments, but at most {MAX_ARGS} fit")
        native.first_arg, native.arg_count = len(args), len(entries)
        places: dict[str, int] = {}
        columns[kind] = []
        for entry in entries:
            for name in entry.columns:
                if name not in places:
                    places[name] = len(FIXED) + len(columns[kind])
                    columns[kind].append((name, DTYPES[entry.type]))
            key = entry.key.encode()
            first = places[entry.columns[0]]
            if entry.type == I32X3 and [places[name] - first for name in entry.columns] != [0, 1, 2]:
                raise ValueError(f"{kind}: the columns of {entry.key} are not adjacent")
            args.append(_Arg(key, len(key), entry.type, first, 0, entry.default))
    native_args = (_Arg * len(args))(*args)
    categories = (_Category * len(CATEGORIES))(
        *(_Category(text.encode(), len(text), suffix, names.index(kind), 0) for text, suffix, kind in CATEGORIES)
    )
    plan = _Plan(
        ctypes.addressof(kinds),
        ctypes.addressof(native_args),
        ctypes.addressof(categories),
        len(names),
        len(CATEGORIES),
        names.index(MEMORY),
        names.index(FLOW),
        names.index(OTHER),
        names.index(COUNTER),
    )
    return _Layout(plan, (kinds, native_args, categories), columns)


@cache
def _library() -> ctypes.CDLL:
    library = codec.load()
    pointer, number, word = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32
    codec.declare(library, pointer, "kc_chrome_new", pointer)
    codec.declare(library, None, "kc_chrome_free", pointer)
    codec.declare(library, None, "kc_chrome_feed", pointer, pointer, number, word, word, pointer)
    codec.declare(library, None, "kc_chrome_count", pointer, pointer)
    codec.declare(library, number, "kc_chrome_rows", pointer, word)
    codec.declare(library, pointer, "kc_chrome_take", pointer, word, word)
    codec.declare(library, None, "kc_chrome_release", pointer)
    codec.declare(library, pointer, "kc_chrome_strings", pointer, pointer)
    codec.declare(library, pointer, "kc_chrome_tracks", pointer)
    return library


class _Column:
    """The memory of one column, freed when no array uses it any more."""

    def __init__(self, address: int, rows: int, dtype: str) -> None:
        self._address = address
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (rows,),
            "typestr": np.dtype(dtype).str,
            "version": 3,
        }

    def __del__(self) -> None:
        _library().kc_chrome_release(self._address)


class Parser:
    """Reads one document piece by piece."""

    def __init__(self) -> None:
        self._library = _library()
        self._layout = _layout()
        self._handle = self._library.kc_chrome_new(ctypes.byref(self._layout.plan))
        if not self._handle:
            raise MemoryError("not enough memory to read a trace")

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.kc_chrome_free(self._handle)
            self._handle = None

    def feed(self, address: int, size: int, *, final: bool, give_up: bool) -> Fed:
        """Feeds one piece of `size` bytes followed by PADDING zero bytes. Unconsumed bytes must be fed again."""
        fed = Fed()
        self._library.kc_chrome_feed(self._handle, address, size, final, give_up, ctypes.byref(fed))
        if fed.status == NO_MEMORY:
            raise MemoryError("not enough memory to read a trace")
        return fed

    def counts(self) -> Counts:
        """Returns the state of the reader."""
        counts = Counts()
        self._library.kc_chrome_count(self._handle, ctypes.byref(counts))
        return counts

    def take(self, kind: str) -> dict[str, AnyArray]:
        """Moves the columns of a kind that at least one row fills out of the parser; {} if the kind has no rows."""
        number = list(KINDS).index(kind)
        rows = self._library.kc_chrome_rows(self._handle, number)
        found: dict[str, AnyArray] = {}
        for place, (name, dtype) in enumerate((*FIXED, *self._layout.columns[kind])):
            address = self._library.kc_chrome_take(self._handle, number, place) if rows else None
            if address:
                found[name] = np.asarray(_Column(address, rows, dtype))
        return found

    def strings(self) -> list[str]:
        """Returns all texts by number. Bytes that are not UTF-8 become U+FFFD."""
        count = self.counts().strings
        if not count:
            return []
        pointer = ctypes.c_void_p()
        data = self._library.kc_chrome_strings(self._handle, ctypes.byref(pointer))
        ends = np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_uint64)), (count + 1,)).tolist()
        text = memoryview((ctypes.c_char * ends[-1]).from_address(data)) if ends[-1] else memoryview(b"")
        return [str(text[first:last], "utf-8", "replace") for first, last in zip(ends, ends[1:], strict=False)]

    def tracks(self) -> Ints:
        """Returns pid and tid of every track, one row each."""
        count = self.counts().tracks
        if not count:
            return np.empty((0, 2), np.int64)
        address = self._library.kc_chrome_tracks(self._handle)
        values = (ctypes.c_int64 * (2 * count)).from_address(address)
        return np.array(values, np.int64).reshape(count, 2)
