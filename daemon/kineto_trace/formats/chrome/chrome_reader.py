"""Reads Chrome-trace JSON, as Kineto, PyTorch and others write it, into a trace.

Theory of operation
    The file passes through the native reader (daemon/native/chrome/chrome.h) piece by piece, unpacked if it is gzip, so
    that only one piece is in memory beside the columns. chrome_tables.py builds the tables; the file's statements on
    its process are read below.

    Everything that is read is written back (formats/chrome/verbatim_writer.py): numbers go into columns if those hold
    the exact value, everything else stays JSON text. Trace.notes lists unreadable parts, with places;
    Trace.losses.undecoded counts them.

    Times are Unix ns if the file has a base (baseTimeNanoseconds), otherwise ns since its writer's own origin.
"""

import io
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from isal import igzip_lib

from kineto_trace.base.quantities import require_memory, times
from kineto_trace.errors import DamagedError, FileError
from kineto_trace.formats.chrome import chrome_native_reader as native
from kineto_trace.formats.chrome.chrome_native_reader import Fed, Parser
from kineto_trace.formats.chrome.chrome_tables import MADE_UP, ChromeRows, build
from kineto_trace.formats.chrome.chrome_writer import LOSS_KEYS, OPTION_KEYS
from kineto_trace.model import source_coverage
from kineto_trace.model.target_info import MAX_RATIO, TargetInfo, base_ns, header_value, repair_json
from kineto_trace.model.trace import (
    COUNTER_TABLES,
    FILE_TABLES,
    TEXT_ID,
    TRUNCATED,
    UNTIMED_TABLES,
    Losses,
    Table,
    Trace,
)

PIECE_BYTES = 4 << 20
PACKED_BYTES = 1 << 18
UNPACKED_BYTES = 1 << 16  # decompressed at a time: damage loses up to this much of the data in front of it
MAX_EVENT_BYTES = 64 << 20  # anything longer is not an event
MAX_HEAD_BYTES = 256 << 20  # of the file without its events
MEMBER_BYTES = 1024  # a member of that counts as this much in addition to its texts: it takes some 15 us
ROW_BYTES = 64  # per event, counted again when the tables are made
SHOWN_PLACES = 5  # places listed per kind of damage
_GZIP = b"\x1f\x8b"
_UNPACK_ERROR: type[Exception] = igzip_lib.IsalError  # type: ignore[assignment]
MERGED = "kinetodMerge"  # member of files that merge/ wrote: the ranks in the file, and their clocks
Read = Callable[[memoryview], int]  # fills part of the view and returns the count; 0: end
_DAMAGE = {
    native.LOST_EVENT: "{events} at {where} could not be read: {reason}",
    native.LOST_ARGS: "the arguments of {events} at {where} could not be read: {reason}",
    native.LOST_HEAD: "the part before the events could not be read from {where} on: {reason}",
    native.LOST_END: f"{TRUNCATED} the middle of an event, {{read}}",
    native.LOST_ITEM: "skipped {entries} other than events in the event list, at {where}",
    native.LOST_TAIL: "the part after the events could not be read from {where} on: {reason}",
}
MAX_METADATA_ROWS = 1 << 16
_THREAD = re.compile(r"thread -?\d+ \((.*)\)$", re.DOTALL)
_NAME = msgspec.json.Decoder(dict[str, Any])


class _Input:
    """Provides the bytes of the document, unpacked if the file is gzip."""

    def __init__(self, file: BinaryIO, document: "_Document") -> None:
        self._file = file
        self._document = document
        self._first = _read_some(file, 2)
        while len(self._first) == 1 and (more := _read_some(file, 1)):
            self._first += more
        self._packed = self._first == _GZIP
        self._unpacker = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
        self._members = 0
        self._position = 0  # in the packed file

    def read(self, view: memoryview) -> int:
        """Fills part of the view; returns 0 at the end."""
        if self._packed:
            return self._unpack(view)
        if self._first:
            count = min(len(self._first), len(view))
            view[:count], self._first = self._first[:count], self._first[count:]
            return count
        if hasattr(self._file, "readinto"):
            return int(self._file.readinto(view) or 0)
        data = self._file.read(len(view))
        view[: len(data)] = data
        return len(data)

    def _unpack(self, view: memoryview) -> int:
        while True:
            data = b""
            if self._unpacker.eof:
                rest = self._unpacker.unused_data or self._pull()
                while rest and not rest.strip(b"\0"):
                    rest = self._pull()
                if len(rest) < len(_GZIP):
                    rest += self._pull()
                if not rest.startswith(_GZIP):
                    if rest:
                        self._document.notes.append("the data after the end of the compressed data was not read")
                    self._packed, self._first = False, b""
                    self._file = io.BytesIO()  # at its end
                    return 0
                self._unpacker, data = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP), rest
            elif self._unpacker.needs_input:
                data = self._pull()
                if not data:
                    self._document.notes.append("the compressed file is truncated")
                    return 0
            try:
                out = self._unpacker.decompress(data, min(len(view), UNPACKED_BYTES))
            except _UNPACK_ERROR as exc:
                self._document.notes.append(
                    f"the compressed data is damaged before byte {self._position} of the file ({exc}): "
                    "the rest was not read"
                )
                self._document.read_share = self._position / max(_size(self._file), self._position)
                return 0
            if out:
                view[: len(out)] = out
                return len(out)

    def _pull(self) -> bytes:
        data = self._first + _read_some(self._file, PACKED_BYTES)
        self._first = b""
        self._position += len(data)
        return data


class _Document:
    """Reads one document to its end."""

    def __init__(self, name: str) -> None:
        self.parser = Parser()
        self.head: dict[str, str] = {}
        self.notes: list[str] = []
        self.undecoded = 0
        self.truncated = False  # valid after reading: whether it ended before its last bracket
        self.read_share = 1.0  # of a file that is damaged in its middle: the part before that
        self._name = name
        self._buffer = np.zeros(PIECE_BYTES + native.PADDING, np.uint8)
        self._begin = self._end = 0  # of the bytes that are not consumed yet
        self._damage: dict[tuple[int, int], list[int]] = defaultdict(list)  # (lost, why) -> places
        self._damaged: Counter[tuple[int, int]] = Counter()
        self._head_bytes = 0

    def read(self, source: _Input) -> None:
        """Reads the whole document. Raises FileError if it is not a trace."""
        final = False
        while True:
            final = final or not self._fill(source)
            require_memory(len(self._buffer), self._name)
            fed = self._feed(final=final)
            if fed.status == native.DONE:
                rest = bytes(self._buffer[self._begin : self._end])
                tail_lost = any(lost == native.LOST_TAIL for lost, _why in self._damage)
                if not tail_lost and (rest.strip(b" \r\n\t\0") or (not final and self._more(source))):
                    self.notes.append("the data after the end of the trace was not read")
                break
            if fed.status == native.NOT_JSON:
                raise FileError(f"{self._name} is not a trace: {self._beginning()}")
            if final:
                break
        self._finish()

    def _more(self, source: _Input) -> bool:
        """Returns whether anything other than white space follows."""
        view = self._buffer.data[:PACKED_BYTES]
        while count := source.read(view):
            if bytes(view[:count]).strip(b" \r\n\t\0"):
                return True
        return False

    def _fill(self, source: _Input) -> bool:
        """Reads more data after the bytes that are not consumed yet. Returns False at the end."""
        left = self._end - self._begin
        if self._begin:
            self._buffer[:left] = self._buffer[self._begin : self._end].copy()
            self._begin, self._end = 0, left
        room = len(self._buffer) - native.PADDING
        if left * 2 > room:
            bigger = np.zeros(2 * room + native.PADDING, np.uint8)
            bigger[:left] = self._buffer[:left]
            self._buffer, room = bigger, 2 * room
        view = self._buffer.data
        alive = True
        while alive and self._end < room:
            count = source.read(view[self._end : room])
            alive = count > 0
            self._end += count
        self._buffer[self._end : self._end + native.PADDING] = 0
        return alive

    def _feed(self, *, final: bool) -> Fed:
        """Feeds all available data until the parser needs more."""
        while True:
            size = self._end - self._begin
            give_up = size >= MAX_EVENT_BYTES
            fed = self.parser.feed(self._buffer.ctypes.data + self._begin, size, final=final, give_up=give_up)
            if fed.status == native.MEMBER:
                self._add_member(fed)
            elif fed.status == native.DAMAGE:
                self._damaged[fed.lost, fed.why] += 1
                if self._damaged[fed.lost, fed.why] <= SHOWN_PLACES:
                    self._damage[fed.lost, fed.why].append(fed.at)
            self._begin += fed.consumed
            if fed.status not in (native.MEMBER, native.DAMAGE):
                return fed

    def _text(self, begin: int, end: int) -> str:
        return bytes(self._buffer[self._begin + begin : self._begin + end]).decode("utf-8", "replace")

    def _add_member(self, fed: Fed) -> None:
        key, value = self._text(fed.key_begin, fed.key_end), self._text(fed.value_begin, fed.value_end)
        name = repair_json(key)
        self.head[str(name.value)] = repair_json(value).text
        self._head_bytes += len(key) + len(value) + MEMBER_BYTES
        if self._head_bytes > MAX_HEAD_BYTES:
            raise FileError(f"{self._name} is not a trace: too much data outside events ({len(self.head)} members)")

    def _beginning(self) -> str:
        shown = bytes(self._buffer[self._begin : self._begin + 16])
        return f"it begins with {shown.rstrip(bytes(1))!r}, not with a JSON object or list"

    def _finish(self) -> None:
        counts = self.parser.counts()
        if not counts.had_events:
            if not self.head and not self._damage:
                what = "it is an empty object" if counts.closed else "it is empty"
            else:
                what = "it has no traceEvents list"
                if self.head:
                    what += f"; its members are {', '.join(list(self.head)[:8])}"
            raise FileError(f"{self._name} is not a trace: {'; '.join([what, *self.notes])}")
        if not counts.events and self._damage:
            raise FileError(f"{self._name} is not a trace: {'; '.join([*self._damages(0), *self.notes])}")
        if counts.list and counts.events and not counts.phases:
            raise FileError(f"{self._name} is not a trace: it is a list of objects that are not events")
        self.notes += self._damages(counts.events)
        self.truncated = not counts.closed
        lost = [key[0] for key in self._damage]
        if counts.in_events and native.LOST_END not in lost:
            self.notes.append(f"{TRUNCATED} its list of events, {self._read(counts.events)}")
        elif not counts.closed and not counts.in_events:
            self.notes.append("the file is truncated after its events")
        if counts.mended:
            verb = "was" if counts.mended == 1 else "were"
            self.notes.append(f"{_events(counts.mended)} {verb} repaired: invalid JSON (quotes, escapes, words)")

    def _damages(self, events: int) -> Iterator[str]:
        for (lost, why), places in self._damage.items():
            count, reason = self._damaged[lost, why], native.REASONS[why]
            where = ("bytes " if count > 1 else "byte ") + ", ".join(map(str, places))
            where += " and more" if count > SHOWN_PLACES else ""
            yield _DAMAGE[lost].format(
                read=self._read(events),
                events=_events(count),
                entries=times(count, "entry", "entries"),
                where=where,
                reason=reason,
            )
            if lost in (native.LOST_EVENT, native.LOST_END, native.LOST_ITEM):
                self.undecoded += count

    def _read(self, count: int) -> str:
        """Returns how far a file was read that ends too early. A cut file no longer has the size that it had."""
        stated = _number(_object(self.head, "kinetod").get("events"))
        whole = max(stated, count) if stated else round(count / self.read_share)
        return (
            f"after {count} of about {_events(whole)}"
            if whole > count
            else f"after {_events(count)} of an unknown number"
        )


def load_chrome(source: Path | str | BinaryIO, *, name: str = "", whole: bool = False) -> Trace:
    """Reads a file, or the content of a binary file object, plain or gzip. name: used in errors.

    whole: whether a truncated file is an error. Raises FileError if the content is not a trace, DamagedError if it has
    to be whole and is not, OSError if it cannot be read.
    """
    if isinstance(source, (Path, str)):
        with Path(source).open("rb", buffering=0) as file:
            return _load(file, name or str(source), whole=whole)
    return _load(source, name or str(getattr(source, "name", "the trace")), whole=whole)


def _load(file: BinaryIO, name: str, *, whole: bool) -> Trace:
    document = _Document(name)
    document.read(_Input(file, document))
    if whole and document.truncated:
        raise DamagedError(f"{name} is incomplete: {'; '.join(document.notes)}")
    head, notes = document.head, document.notes
    require_memory(document.parser.counts().events * ROW_BYTES, name)
    base = base_ns(head, notes)
    if MERGED in head:
        notes.append("the file contains the traces of several ranks; to analyse one rank, use that rank's own trace")
    loaded = build(document.parser, base)
    ours = _object(head, "kinetod")
    stated = None if MERGED in head else _stated_window(ours)  # a merged file has the window of one rank there
    notes += loaded.notes
    start, end = stated or _window(loaded.tables)
    devices, losses = header_value(head, "deviceProperties"), recorded_losses(head)
    return Trace(
        target=_target(head, ours, loaded),
        strings=loaded.strings,
        tables=loaded.tables,
        window_start_ns=start,
        window_end_ns=end,
        devices=tuple(item for item in devices if isinstance(item, dict)) if isinstance(devices, list) else (),
        versions={
            name: number
            for name in head
            if name.endswith("_version") and (number := _count(header_value(head, name))) is not None
        },
        losses=replace(losses, undecoded=losses.undecoded + document.undecoded),
        head=head,
        notes=tuple(notes),
        coverage=source_coverage.from_json(ours.get("coverage")),
    )


def _stated_window(ours: Mapping[str, Any]) -> tuple[int, int] | None:
    """Returns the recorded window (Unix ns), which a capture states; None for other files."""
    start, end = (_number(ours.get(name)) for name in ("window_start_ns", "window_end_ns"))
    return (start, end) if 0 < start <= end else None


def _window(tables: Mapping[str, Table]) -> tuple[int, int]:
    """Returns the first start and the last end (Unix ns) of the activities; of all rows if there are no activities."""
    no_activities = (*FILE_TABLES, *UNTIMED_TABLES, *COUNTER_TABLES)
    timed = [table for kind, table in tables.items() if kind not in no_activities and len(table)]
    timed = timed or [table for table in tables.values() if len(table)]
    if not timed:
        return 0, 0
    return min(int(table["start"].min()) for table in timed), max(int(table.end().max()) for table in timed)


def _read_some(file: BinaryIO, size: int) -> bytes:
    return file.read(size) or b""


def _size(file: BinaryIO) -> int:
    """Returns the size of a file from which nothing more is read; 0 if it is unknown, as that of a pipe."""
    try:
        return file.seek(0, io.SEEK_END)
    except (AttributeError, OSError, ValueError):
        return 0


def _events(count: int) -> str:
    return "1 event" if count == 1 else f"{count} events"


def _object(head: Mapping[str, str], name: str) -> dict[str, Any]:
    """Returns the value of a member that is an object; empty for any other."""
    found = header_value(head, name)
    return found if isinstance(found, dict) else {}


def _target(head: Mapping[str, str], ours: Mapping[str, Any], loaded: ChromeRows) -> TargetInfo:
    """Returns what the head and the metadata rows (ph "M") state about the process."""
    pid = _main_pid(loaded)
    distributed = _object(head, "distributedInfo")
    process, threads = _names(loaded, pid)
    return TargetInfo(
        capture_id=_text(ours.get("capture_id")),
        host=_text(header_value(head, "host_name")),
        pid=pid if 0 <= pid < 2**31 else 0,
        process_name=process,
        command=_texts(ours.get("command")) or [],
        job_id=_text(ours.get("job_id")),
        rank=_count(distributed.get("rank")),
        world_size=_count(distributed.get("world_size")),
        framework=_text(ours.get("framework")),
        python_version=_text(ours.get("python_version")),
        threads=threads,
        thread_use=ours["threads"] if isinstance(ours.get("threads"), list) else [],
        kernel_counters=ours["kernel_counters"] if isinstance(ours.get("kernel_counters"), dict) else {},
        settings=_settings(ours.get("settings")),
        labels={str(k): str(v) for k, v in ours["labels"].items()} if isinstance(ours.get("labels"), dict) else {},
        resource=_texts_by_name(ours.get("resource")),
        trace_parent=_text(ours.get("trace_parent")),
        options={names[0]: True for key, names in OPTION_KEYS.items() if header_value(head, key)},
        activity_types=_texts(ours.get("activity_types")),
        not_recorded=_texts_by_name(ours.get("not_recorded")),
        clock_offset_ns=_whole(ours.get("clock_offset_ns")),
        clock_uncertainty_ns=_whole(ours.get("clock_uncertainty_ns")),
        step_ratio=_ratio(ours.get("step_ratio")),
        least_step_ratio=_ratio(ours.get("least_step_ratio")),
        complete=ours.get("complete") is True,
    )


def recorded_losses(head: Mapping[str, str]) -> Losses:
    """Returns the losses before the file was written, from its head."""
    ours = _object(head, "kinetod")
    return Losses(**{name: _number(ours.get(key)) for name, key in LOSS_KEYS.items()})


def _settings(found: Any) -> dict[str, bool | int | float | str]:
    values = found.items() if isinstance(found, dict) else ()
    return {str(name): value for name, value in values if isinstance(value, (bool, int, float, str))}


def _texts(found: Any) -> list[str] | None:
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        return None
    return found


def _texts_by_name(found: Any) -> dict[str, str]:
    values = found.items() if isinstance(found, dict) else ()
    return {str(name): why for name, why in values if isinstance(why, str)}


def _text(found: Any) -> str:
    return found if isinstance(found, str) else ""


def _whole(found: Any) -> int | None:
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def _ratio(found: Any) -> float:
    """Returns a ratio of times; 0 if the file has no plausible one."""
    return float(found) if isinstance(found, (int, float)) and 0 < found < MAX_RATIO else 0.0


def _number(found: Any) -> int:
    """Returns a number of records; 0 if the file has no plausible one."""
    return found if type(found) is int and 0 <= found < 2**62 else 0


def _count(found: Any) -> int | None:
    if isinstance(found, str) and found.isdecimal() and len(found) < 10:
        return int(found)
    return found if isinstance(found, int) and not isinstance(found, bool) and 0 <= found < 2**31 else None


def _main_pid(loaded: ChromeRows) -> int:
    """Returns the pid of the process with the most host rows."""
    tracks = loaded.tracks
    if not tracks.rows.any():
        return 0
    pids, places = np.unique(tracks.pid[tracks.host], return_inverse=True)
    return int(pids[np.argmax(np.bincount(places, tracks.rows[tracks.host]))])


def _names(loaded: ChromeRows, pid: int) -> tuple[str, dict[int, str]]:
    """Returns the name of the process, and the names of its threads by number."""
    process, threads = "", {}
    numbers = {int(t): int(n) for t, n in zip(loaded.tracks.tid, loaded.tracks.thread, strict=True) if t > TEXT_ID}
    for name, tid, text in _metadata(loaded, pid):
        if name == "process_name":
            process = text
        elif tid in numbers or tid <= TEXT_ID or 0 <= tid < MADE_UP:
            found = _THREAD.match(text)
            number = numbers.get(tid, tid)
            if number > 0:
                threads[number] = found[1] if found else text
    return process, threads


def _metadata(loaded: ChromeRows, pid: int) -> list[tuple[str, int, str]]:
    """Returns (kind of row, tid, text) for the metadata rows that name the process and its threads."""
    table = loaded.tables.get("other")
    if table is None or not table.origin:
        return []
    strings = loaded.strings
    wanted = [number for number, text in enumerate(strings) if text in ("process_name", "thread_name")]
    chosen = (table["phase"] == ord("M")) & np.isin(table["name"], wanted) & (table.origin["pid"] == pid)
    rows = np.flatnonzero(chosen)[:MAX_METADATA_ROWS]
    return [(strings[table["name"][row]], int(table.origin["tid"][row]), _named(table, strings, row)) for row in rows]


def _named(table: Table, strings: list[str], row: int) -> str:
    number = int(table.origin["args"][row])
    if number < 0:
        return ""
    try:
        return _text(_NAME.decode(("{" + strings[number] + "}").encode()).get("name"))
    except (msgspec.DecodeError, UnicodeEncodeError):
        return ""
