"""Reads Perfetto traces of track events (.pftrace, plain or gzip): our own exports and those of other programs.

Theory of operation
    The native reader (daemon/native/perfetto/read_packets.h) turns the packets into the events of a Chrome trace, piece
    by piece, and formats/chrome/chrome_reader.py reads these: in both formats the category states the kind of an event.
    The trace is thus read in pieces, and arguments of Chrome traces get their columns.

    Our own files state what they contain: the head of the Chrome trace, pid and tid of every track, the capture, and
    of a trace that was read from a file the rows that have no other form (perfetto_writer.py). In
    other files, threads and processes are those of the track descriptors, and slices of unknown categories are rows of
    the table `other`; samples, scheduling and other data sources of Perfetto are not read.
"""

import ctypes
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from isal import igzip_lib

from kineto_trace.arrays import codec
from kineto_trace.base.array_types import UInts32
from kineto_trace.base.quantities import times
from kineto_trace.decode import xspace
from kineto_trace.errors import FileError, SpoolError
from kineto_trace.formats.chrome.chrome_reader import MERGED, load_chrome, recorded_losses
from kineto_trace.formats.perfetto.perfetto_writer import unpacked
from kineto_trace.formats.perfetto_proto import KEPT_ROWS
from kineto_trace.model.activity_tables import ViewerRow, tables_on
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.model.trace import OP_TABLES, TRUNCATED, Losses, Table, Trace

PIECE_BYTES = 4 << 20
MAX_PACKET_BYTES = 256 << 20  # a longer one is treated as damage
METADATA = "kinetod"  # name of the metadata entry with our text about the whole trace
_UNPACK_ERROR: type[Exception] = igzip_lib.IsalError  # type: ignore[assignment]
_GZIP = b"\x1f\x8b"
_MORE, _PACKET, _DAMAGED, _NO_MEMORY = range(4)

Message = dict[int, list[Any]]  # field -> its values: int, or bytes
_NESTING = tables_on(ViewerRow.OPERATOR, ViewerRow.CALL, ViewerRow.PYTHON)


class _Fed(ctypes.Structure):
    consumed: int
    begin: int
    end: int
    status: int
    _fields_ = (
        *codec.members(ctypes.c_uint64, "consumed", "begin", "end"),
        *codec.members(ctypes.c_uint32, "status", "pad"),
    )


class _Counts(ctypes.Structure):
    packets: int
    events: int
    undecoded: int
    unbegun: int
    open: int
    legacy: int
    lost_state: int
    last: int
    _fields_ = (
        *codec.members(ctypes.c_uint64, "packets", "events", "undecoded", "unbegun", "open", "legacy", "lost_state"),
        ("last", ctypes.c_int64),
    )


@cache
def _library() -> ctypes.CDLL:
    library = codec.load()
    pointer, number, word, status = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int
    text = (ctypes.c_char_p, number)
    codec.declare(library, pointer, "kc_packet_reader_new")
    codec.declare(library, None, "kc_packet_reader_free", pointer)
    codec.declare(library, None, "kc_packet_reader_feed", pointer, pointer, number, pointer)
    codec.declare(library, None, "kc_packet_reader_set", pointer, ctypes.c_int64, word, word)
    codec.declare(library, status, "kc_packet_reader_track", pointer, number, *text, *text, word)
    codec.declare(library, status, "kc_packet_reader_finish", pointer)
    codec.declare(library, pointer, "kc_packet_reader_text", pointer, pointer)
    codec.declare(library, None, "kc_packet_reader_drop", pointer)
    codec.declare(library, None, "kc_packet_reader_count", pointer, pointer)
    return library


def load_perfetto(source: Path | str | BinaryIO, *, name: str = "") -> Trace:
    """Reads a file, or the content of a binary file object. name: used in errors.

    Trace.notes states what was lost. Raises FileError if the file has no track events, OSError if it cannot be read.
    """
    if isinstance(source, (Path, str)):
        with Path(source).open("rb") as file:
            return _load(file, name or str(source))
    return _load(source, name or str(getattr(source, "name", "the trace")))


def _load(file: BinaryIO, name: str) -> Trace:
    packets = _Packets(name)
    stream = _Stream(packets.as_chrome(_Bytes(file, packets.notes)))
    trace = outer_first(load_chrome(stream, name=name))  # type: ignore[arg-type]
    losses = replace(trace.losses, undecoded=packets.counts.undecoded + trace.losses.undecoded)
    trace = replace(trace, losses=losses, notes=(*packets.notes, *trace.notes))
    return trace if packets.about is None else _with_ours(trace, packets.about)


def _with_ours(trace: Trace, about: Mapping[str, Any]) -> Trace:
    """Returns the trace with our exporter's information about it; malformed parts are ignored."""
    changes: dict[str, Any] = {}
    for key in ("window_start_ns", "window_end_ns", "sample_period_ns"):
        if isinstance(about.get(key), int) and 0 <= about[key] < 2**63:
            changes[key] = about[key]
    try:
        if MERGED not in (trace.head or {}):  # a merged file has the target of one rank there
            changes["target"] = TargetInfo.from_json(json.dumps(about["target"]))
        own = Losses(**about["losses"])
        now = trace.losses.undecoded - recorded_losses(trace.head or {}).undecoded  # lost while the file was read
        changes["losses"] = replace(own, undecoded=own.undecoded + now)
    except (KeyError, TypeError, ValueError, SpoolError):
        pass
    notes = about.get("notes")
    if isinstance(notes, list):
        changes["notes"] = (*map(str, notes), *trace.notes)
    return replace(trace, **changes)


# ------------------------------------------------------------ bytes


Pieces = Iterator[bytes]


class _Bytes:
    """Reads the bytes of the file, unpacked if the file is gzip."""

    def __init__(self, file: BinaryIO, notes: list[str]) -> None:
        self._file, self._notes = file, notes
        self._first = file.read(len(_GZIP))
        self._unpacker = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP) if self._first == _GZIP else None

    def read(self) -> bytes:
        """Returns more bytes; b"" at the end."""
        while self._unpacker is not None:
            data = b""
            if self._unpacker.eof:
                data = self._unpacker.unused_data or self._pull()
                if not data.startswith(_GZIP):
                    return b""
                self._unpacker = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
            elif self._unpacker.needs_input:
                data = self._pull()
                if not data:
                    self._notes.append("the compressed file is truncated")
                    return b""
            try:
                found: bytes = self._unpacker.decompress(data, PIECE_BYTES)
            except _UNPACK_ERROR as exc:
                self._notes.append(f"the compressed data is damaged ({exc}): the rest was not read")
                return b""
            if found:
                return found
        return self._pull()

    def _pull(self) -> bytes:
        found = self._first + (self._file.read(PIECE_BYTES) or b"")
        self._first = b""
        return found


class _Stream:
    """Presents an iterator of pieces as a readable file."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._left = memoryview(b"")

    def read(self, size: int) -> bytes:
        """Returns at most `size` bytes; b"" at the end."""
        while not self._left:
            piece = next(self._pieces, None)
            if piece is None:
                return b""
            self._left = memoryview(piece)
        found, self._left = bytes(self._left[:size]), self._left[size:]
        return found

    def readinto(self, view: memoryview) -> int:
        """Fills part of the view and returns the number of bytes."""
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)


# ------------------------------------------------------------ messages


def fields_of(message: bytes) -> Message:
    """Returns all fields of a protobuf message, up to the first malformed one."""
    found: Message = {}
    with suppress(xspace.Damaged):
        for number, kind, begin, end in xspace.fields(message, 0, len(message)):
            found.setdefault(number, []).append(message[begin:end] if kind == xspace.BYTES else begin)
    return found


def _last(fields: Message, field: int, default: Any) -> Any:
    """Returns the last value of a field; the default if the field has no value of the default's type."""
    values = [value for value in fields.get(field, ()) if isinstance(value, type(default))]
    return values[-1] if values else default


def _text(fields: Message, field: int) -> str:
    return bytes(_last(fields, field, b"")).decode("utf-8", "replace")


def _int32(value: int) -> int:
    return (value & 0xFFFFFFFF) - (1 << 32) if value & 0x80000000 else value & 0xFFFFFFFF


class _Track(NamedTuple):
    """The content of a track descriptor. pid and tid: as JSON texts, "" if the track has none of its own."""

    name: str
    parent: int
    pid: str
    tid: str


def _described(message: bytes) -> tuple[int, _Track, list[dict[str, Any]]]:
    """Returns uuid and content of a track descriptor, and the rows that name its process and thread."""
    fields = fields_of(message)
    name, pid, tid, rows = _text(fields, 2) or _text(fields, 10), "", "", []
    process, thread = (fields_of(_last(fields, field, b"")) for field in (3, 4))
    if 4 in fields:
        pid, tid = str(_int32(_last(thread, 1, 0))), str(_int32(_last(thread, 2, 0)))
        name = _text(thread, 5) or name
        rows.append({"name": "thread_name", "pid": int(pid), "tid": int(tid), "args": {"name": name}})
    elif 3 in fields:
        pid, tid = str(_int32(_last(process, 1, 0))), "0"
        name = _text(process, 6) or name
        rows.append({"name": "process_name", "pid": int(pid), "tid": 0, "args": {"name": name}})
    return _last(fields, 1, 0), _Track(name, _last(fields, 5, 0), pid, tid), rows if name else []


# ------------------------------------------------------------ packets


class _Packets:
    """Reads all packets and produces the text of a Chrome trace."""

    def __init__(self, name: str) -> None:
        self.notes: list[str] = []
        self.about: Mapping[str, Any] | None = None  # only in our own files
        self.counts = _Counts()
        self._name = name
        self._tracks: dict[int, _Track] = {}
        self._own: dict[int, list[str]] = {}
        self._named: set[tuple[str, ...]] = set()  # pids and tids of our tracks that have a name
        self._rows: list[dict[str, Any]] = []
        self._kept: list[bytes] = []  # blocks of perfetto_writer.py
        self._used = False  # whether our last text about a trace was used
        self._library = _library()
        self._handle = self._library.kc_packet_reader_new()
        if not self._handle:
            raise MemoryError("not enough memory to read a trace")

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.kc_packet_reader_free(self._handle)
            self._handle = None

    def as_chrome(self, source: "_Bytes") -> Pieces:
        """Yields the events, then the head. Raises FileError if a file that is not ours has no events."""
        yield b'{"traceEvents": [\n'
        some = b""
        for piece in self._events(source):
            some = piece
            yield piece
        if self._library.kc_packet_reader_finish(self._handle):
            raise MemoryError("not enough memory to read a trace")
        last = self._take()
        self._library.kc_packet_reader_count(self._handle, ctypes.byref(self.counts))
        self._account()
        yield last
        some = some or last
        for rows in self._rows_of_file():
            yield (b",\n" if some else b"") + next(rows, b"")
            yield from rows
            some = b"some"
        yield b"\n]"
        for key, text in self._head().items():
            yield f",\n{json.dumps(str(key))}: {text}".encode("utf-8", "replace")
        yield b"}\n"

    def _rows_of_file(self) -> Iterator[Pieces]:
        """Yields the rows that are not events of tracks, each group without a comma around it."""
        if self._rows:
            yield iter([b",\n".join(json.dumps({"ph": "M", **row}).encode() for row in self._rows)])
        for block in self._kept:
            yield self._unpacked(block)

    def _unpacked(self, block: bytes) -> Pieces:
        try:
            yield from unpacked(block)
        except ValueError as exc:
            self.notes.append(f"rows that were kept verbatim in the file are damaged and were not read ({exc})")

    def _head(self) -> Mapping[str, Any]:
        head = self.about.get("head") if self.about else {}
        return head if isinstance(head, dict) else {}

    def _events(self, source: "_Bytes") -> Pieces:
        data = np.empty(0, np.uint8)
        position = 0  # of the data in the file
        fed = _Fed()
        while True:
            more = source.read()
            if more:
                data = np.concatenate([data, np.frombuffer(more, np.uint8)])
            at = 0
            while at < len(data):
                self._library.kc_packet_reader_feed(
                    self._handle, data.ctypes.data + at, len(data) - at, ctypes.byref(fed)
                )
                if fed.status == _NO_MEMORY:
                    raise MemoryError("not enough memory to read a trace")
                if fed.status == _PACKET:
                    self._look(data[at + fed.begin : at + fed.end].tobytes())
                at += fed.consumed
                if some := self._take():
                    yield some
                if fed.status == _DAMAGED or (fed.status == _MORE and not fed.consumed):
                    break
            position, data = position + at, data[at:]
            if fed.status == _DAMAGED or len(data) > MAX_PACKET_BYTES:
                self.notes.append(f"the file is damaged at byte {position}: the rest was not read")
                return
            if not more:
                if len(data):
                    self.notes.append(f"{TRUNCATED} the middle of a packet, at byte {position}")
                return

    def _take(self) -> bytes:
        """Returns the text produced so far."""
        size = ctypes.c_uint64()
        address = self._library.kc_packet_reader_text(self._handle, ctypes.byref(size))
        text = ctypes.string_at(address, size.value) if size.value else b""
        self._library.kc_packet_reader_drop(self._handle)
        return text

    def _account(self) -> None:
        counts = self.counts
        if not counts.events and self.about is None:
            raise FileError(
                f"cannot read {self._name}: it has {times(counts.packets, 'packet')}, but no track events; "
                "scheduling, samples and other data sources of Perfetto are not supported"
            )
        for count, what in (
            (counts.undecoded, "packets that could not be read"),
            (counts.unbegun, "slice ends without a beginning in the file, left out"),
            (counts.open, "slices without an end in the file, shown up to the last event"),
            (counts.legacy, "events of legacy phases, left out because they are not supported"),
            (counts.lost_state, "names or times that refer to data missing from the file, shown as ?"),
        ):
            if count:
                self.notes.append(f"{what}: {count}")
        if self.about is None:
            self.notes.append(
                "the Perfetto trace was written by another program: its times are on the clock of its track events"
            )

    # ---- callbacks for the caller of the native reader

    def _look(self, packet: bytes) -> None:
        fields = fields_of(packet)
        for bundle in fields.get(5, ()):
            self._metadata(fields_of(bundle) if isinstance(bundle, bytes) else {})
        for message in fields.get(60, ()):
            if isinstance(message, bytes):
                uuid, track, rows = _described(message)
                self._tracks[uuid] = track
                if uuid not in self._own:
                    self._rows += rows
                    self._set_foreign(uuid)
                elif not (self.about or {}).get("kept_rows"):
                    self._rows += rows or self._names_of_own(self._own[uuid], track)
                    self._named.add(tuple(self._own[uuid]))

    def _names_of_own(self, ids: list[str], track: _Track) -> list[dict[str, Any]]:
        """Returns the rows that name one of our tracks that is not a thread of the system: a stream, and its GPU."""
        above = self._tracks.get(track.parent)
        try:
            pid, tid = map(json.loads, ids)
        except ValueError:
            return []  # a counter, or a track above others
        if tuple(ids) in self._named:
            return []  # further rows of the same stream
        rows = [{"name": "thread_name", "pid": pid, "tid": tid, "args": {"name": track.name}}]
        if above is not None and not above.pid and (ids[0],) not in self._named:
            self._named.add((ids[0],))
            rows.append({"name": "process_labels", "pid": pid, "tid": 0, "args": {"labels": above.name}})
        return rows

    def _metadata(self, bundle: Message) -> None:
        if self._used:
            self._kept += [block for block in bundle.get(KEPT_ROWS, ()) if isinstance(block, bytes)]
        for entry in bundle.get(2, ()):
            fields = fields_of(entry) if isinstance(entry, bytes) else {}
            if _text(fields, 1) != METADATA:
                continue
            try:
                about = json.loads(_text(fields, 2))
            except (ValueError, RecursionError):
                continue
            if not isinstance(about, dict):
                continue
            self._used = self.about is None or (
                MERGED in self._head() and about.get("base_ns") == self.about.get("base_ns")
            )
            if not self._used:
                continue
            self.about = self.about or about
            self._use(about)  # in a merged file each rank has its own text, which names its tracks

    def _use(self, about: Mapping[str, Any]) -> None:
        """Passes the base time and the tracks of our own file to the native reader."""
        base = about.get("base_ns")
        base = base if isinstance(base, int) and 0 <= base < 2**62 else 0
        self._library.kc_packet_reader_set(self._handle, base, 1, not about.get("kept_rows"))
        tracks = about.get("tracks")
        for key, values in (tracks if isinstance(tracks, dict) else {}).items():
            try:
                uuid = int(key, 16)
            except ValueError:
                continue
            if not 0 <= uuid < 2**64 or not isinstance(values, list):
                continue
            ids = [str(value) for value in values]
            self._own[uuid] = ids
            members = dict(zip(("pid", "tid", "name"), ids, strict=False))
            self._set(uuid, members, ids[3] if len(ids) > 3 else "", hidden=not ids)

    def _set_foreign(self, uuid: int) -> None:
        """Gives another program's track its own ids, else a pid from the tracks above it and its name as tid."""
        track = self._tracks[uuid]
        pid, above = track.pid, self._tracks.get(track.parent)
        for _ in range(64):
            if pid or above is None:
                break
            pid, above = above.pid, self._tracks.get(above.parent)
        name = json.dumps(track.name or f"track {uuid}")
        self._set(uuid, {"pid": pid or "0", "tid": track.tid or name, "name": ""}, "", counter=name)

    def _set(self, uuid: int, members: Mapping[str, str], key: str, *, hidden: bool = False, counter: str = "") -> None:
        text = ",".join(f'"{name}":{value}' for name, value in members.items() if value).encode("utf-8", "replace")
        name = key.encode("utf-8", "replace") or counter.encode("utf-8", "replace")
        if self._library.kc_packet_reader_track(self._handle, uuid, text, len(text), name, len(name), hidden):
            raise MemoryError("not enough memory to read a trace")


# The order of events that nest with equal times, which the native reader of packets writes when they end.
# If two events of a thread begin and end together, the first row encloses the second one. The inner one ends first, so
# it is read first, and the order of such neighbours is reversed. Events without duration do not nest.
def outer_first(trace: Trace) -> Trace:
    """Returns the trace with events of equal times in the order of their beginnings."""
    tables = [table for kind, table in trace.tables.items() if kind in _NESTING and len(table)]
    if not tables:
        return trace
    place = np.concatenate([table.origin["place"] for table in tables])
    order = np.argsort(place, kind="stable")
    keys = (
        np.concatenate(columns)[order]
        for columns in (
            [table["start"] for table in tables],
            [table["duration"] for table in tables],
            [table.origin["pid"] for table in tables],
            [table.origin["tid"] for table in tables],
        )
    )
    same = np.ones(max(0, len(order) - 1), np.bool_)
    for number, key in enumerate(keys):
        same &= key[1:] == key[:-1]
        if number == 1:
            same &= key[1:] > 0
    if not same.any():
        return trace
    run = np.cumsum(np.append(True, ~same)) - 1
    first = np.flatnonzero(np.append(True, ~same))
    last = np.append(first[1:], len(order)) - 1
    turned = place.copy()
    turned[order] = place[order][first[run] + last[run] - np.arange(len(order))]
    parts = np.split(turned, np.cumsum([len(table) for table in tables])[:-1])
    changed = {table.kind: _placed(table, part) for table, part in zip(tables, parts, strict=True)}
    return replace(trace, tables={**trace.tables, **changed})


def _placed(table: Table, place: UInts32) -> Table:
    """The table with other places; rows of operators also in their order (calls of Python refer to rows)."""
    found = replace(table, origin={**table.origin, "place": place})
    if table.kind not in OP_TABLES or (place == table.origin["place"]).all():
        return found
    return found.take(np.argsort(place, kind="stable"))
