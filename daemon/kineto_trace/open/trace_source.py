"""The source of a trace: its path, rank and capture. Also finds the traces in local folders."""

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeGuard

from kineto_trace.base.quantities import shortened
from kineto_trace.base.visible_text import one_line
from kineto_trace.errors import FileError, TraceError
from kineto_trace.model.target_info import TARGET_FILE
from kineto_trace.store.output_formats import COLUMNS_DIRECTORY
from kineto_trace.store.upload_manifest import FLEET_LABEL

MAX_PLACE = 120
RankFrom = Literal["given", "trace", "name", "number", "order"]
WEAK = ("number", "order")  # origins of a rank that are no evidence of one
UNSURE = ("name", *WEAK)  # that give way to what the opened trace states
HEAD_BYTES = 1 << 18  # of an unpacked file, used to recognise its form
PACKED_HEAD_BYTES = 1 << 16
MAX_DEPTH = 4  # levels of folders that are searched
TRACE_SUFFIXES = (".json", ".json.gz", ".pftrace", ".pftrace.gz", ".perfetto-trace", ".perfetto-trace.gz")
_GZIP = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_DISTRIBUTED = re.compile(rb'"distributedInfo"\s*:\s*(?=\{)')
_KINETOD = re.compile(rb'"kinetod"\s*:\s*(?=\{)')
_HOST = re.compile(rb'"host_name"\s*:\s*"([^"\\]*)"')
_PID = re.compile(rb'"traceEvents"\s*:\s*\[\s*\{[^{}]*?"pid"\s*:\s*(\d{1,18})(?!\d)')
_PERFETTO = re.compile(rb"\x07kinetod\x12[\x80-\xff]{0,4}[\x00-\x7f](?=\{)")  # our text in a Perfetto trace
_PLACES = 16  # limit of tries: a file may have thousands, each of which takes a millisecond
_DOWNLOADED = re.compile(r"kineto-(?P<host>.+)-(?P<pid>\d+)-(?P<capture>\d{8}-\d{6}-[\w-]+?)(?:\.\w+)*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file in an object store.

    name: relative to the URL of the trace; "" is the URL itself.
    sha256: "" if unknown.
    """

    name: str
    size_bytes: int
    sha256: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteTrace:
    """A trace in an object store: a file, a folder of columns, or a target of an uploaded capture.

    rank: None if unknown.
    process, capture: see TraceOrigin.
    problem: why it cannot be read; "" if it can.
    """

    url: str
    files: tuple[RemoteFile, ...] = ()
    rank: int | None = None
    process: str = ""
    capture: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A trace that has not been opened yet.

    path: on this machine; for a trace in an object store, its location without the scheme, used only for names.
    rank_from: the origin of the rank; a "number" is the last one of a name that does not say "rank".
    worker, span: for a TensorBoard log folder, the process and the position of the trace among its traces in order of
        time, counted from 1; otherwise "" and 0.
    process, capture: see TraceOrigin; for a TensorBoard log folder, the span.
    left_out: other captures of the same process, which are not used.
    """

    path: Path
    rank: int
    rank_from: RankFrom = "given"
    worker: str = ""
    span: int = 0
    process: str = ""
    capture: str = ""
    left_out: tuple[str, ...] = ()
    remote: RemoteTrace | None = None

    def __repr__(self) -> str:
        left = f", {len(self.left_out)} other captures of it left out" if self.left_out else ""
        return f"<Source of rank {self.rank}: {one_line(shortened(self.place, MAX_PLACE))}{left}>"

    @property
    def place(self) -> str:
        """Returns its path or URL, for messages."""
        return str(self.path) if self.remote is None else self.remote.url


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOrigin:
    """What a trace states about itself.

    rank: None if not stated.
    process: host and process id; "" if unknown.
    capture: the id of its capture, which begins with the time, or of the capture of several hosts that it belongs to;
        "" if unknown.
    """

    rank: int | None = None
    process: str = ""
    capture: str = ""


def unpacked_head(path: Path, packed: bytes) -> bytes:
    """Returns the beginning of a file, unpacked. packed: its first bytes as stored. Raises FileError."""
    if not packed.startswith(_GZIP):
        return packed.removeprefix(_BYTE_ORDER_MARK)
    try:
        head = zlib.decompressobj(wbits=31).decompress(packed, HEAD_BYTES)
    except zlib.error as exc:
        raise FileError(f"{path} is damaged: {exc}") from exc
    if not head:
        raise FileError(f"{path} contains nothing but a gzip header: it was truncated, or is empty")
    return head.removeprefix(_BYTE_ORDER_MARK)


def traces_below(folder: Path, depth: int = MAX_DEPTH) -> list[Path]:
    """Returns the traces in a folder, or if there are none, those in its subfolders. Raises OSError."""
    from kineto_trace.store.parquet_folder import is_stored

    if is_stored(folder) or (folder / TARGET_FILE).is_file():
        return [folder]
    entries = sorted(folder.iterdir(), key=natural_order)
    folders = [entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    here = [entry for entry in entries if is_trace_file(entry)]
    here += [entry for entry in folders if is_stored(entry) or (entry / TARGET_FILE).is_file()]
    if here or not depth:
        return sorted(here, key=natural_order)
    return [path for entry in folders for path in traces_below(entry, depth - 1)]


def is_trace_file(path: Path) -> bool:
    """Returns whether a file in a folder is a trace, by its name and, for JSON, by its beginning."""
    if path.name.startswith(".") or not path.name.endswith(TRACE_SUFFIXES) or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return may_be_trace(path.name, unpacked_head(path, file.read(PACKED_HEAD_BYTES)))
    except (OSError, FileError):
        return may_be_trace(path.name, b"")


def may_be_trace(name: str, head: bytes) -> bool:
    """Returns whether a file with this name and beginning may be a trace; many files are JSON."""
    if ".json" not in name or ".pt.trace.json" in name:
        return True
    return b'"traceEvents"' in head or (head.lstrip()[:1] == b"[" and b'"ph"' in head)


def natural_order(path: Path) -> list[tuple[int, str]]:
    """Sort key that puts rank2 before rank10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path)) if part]


def origin_of(path: Path) -> TraceOrigin:
    """Returns the origin stated in the head of the trace, or at the end of a plain file; empty if it is damaged."""
    try:
        return _of_folder(path) if path.is_dir() else _of_file(path)
    except (OSError, TraceError, ValueError, AttributeError, RecursionError, zlib.error):
        return TraceOrigin()  # opening it reports the error


def origin_in(head: bytes, name: str = "") -> TraceOrigin:
    """Returns the origin in the head of a Chrome or Perfetto trace, and in the client's name of a downloaded one."""
    target = next(_objects(_PERFETTO, head), {}).get("target")
    if isinstance(target, dict):
        return _of_target(target)
    ours = next(_objects(_KINETOD, head), {})
    capture, labels = ours.get("capture_id"), ours.get("labels")
    host, pid = _HOST.search(head), _PID.search(head)
    process = f"{host[1].decode('utf-8', 'replace')} {int(pid[1])}" if ours and host and pid else ""
    downloaded = _DOWNLOADED.match(name)
    if ours and not process and downloaded:
        process = f"{downloaded['host']} {downloaded['pid']}"
    return TraceOrigin(rank=_rank_in(head), process=process, capture=_capture(capture, labels))


def process_name(host: str, pid: int) -> str:
    """Returns the name of a process; "" if unknown."""
    return f"{host} {pid}" if host and pid else ""


def _capture(capture: Any, labels: Any) -> str:
    fleet = labels.get(FLEET_LABEL) if isinstance(labels, Mapping) else None
    return next((text for text in (fleet, capture) if isinstance(text, str) and text), "")


def _of_file(path: Path) -> TraceOrigin:
    with path.open("rb") as file:
        packed = file.read(HEAD_BYTES)
        head = unpacked_head(path, packed)
        found = origin_in(head, path.name)
        if found.rank is None and len(packed) == HEAD_BYTES and not packed.startswith(b"\x1f\x8b"):
            file.seek(max(HEAD_BYTES, file.seek(0, 2) - PACKED_HEAD_BYTES))
            return TraceOrigin(rank=_rank_in(file.read()), process=found.process, capture=found.capture)
        return found


def _of_folder(path: Path) -> TraceOrigin:
    from kineto_trace.model.target_info import TargetInfo
    from kineto_trace.store.parquet_folder import TRACE_FILE, is_stored

    for folder in (path, path / COLUMNS_DIRECTORY):
        if is_stored(folder):
            return _of_target(json.loads((folder / TRACE_FILE).read_bytes()).get("target", {}))
    return _of_target(asdict(TargetInfo.read(path)))


def _of_target(values: Mapping[str, Any]) -> TraceOrigin:
    """Returns the origin in the members of target.json."""
    rank, host, pid = values.get("rank"), values.get("host"), values.get("pid")
    return TraceOrigin(
        rank=rank if _is_rank(rank) else None,
        process=process_name(host, pid) if isinstance(host, str) and isinstance(pid, int) else "",
        capture=_capture(values.get("capture_id"), values.get("labels")),
    )


def _rank_in(text: bytes) -> int | None:
    for values in _objects(_DISTRIBUTED, text):
        if _is_rank(rank := values.get("rank")):
            return rank
    return None


def _is_rank(value: Any) -> TypeGuard[int]:
    """Tells whether this can be a rank: views keep ranks in columns of 64 bits, and no job has so many processes."""
    return type(value) is int and 0 <= value < 1 << 31


def _objects(pattern: re.Pattern[bytes], text: bytes) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects after this key, at its first places."""
    for match in islice(pattern.finditer(text), _PLACES):
        try:
            values, _ = json.JSONDecoder().raw_decode(text[match.end() :].decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            continue
        if isinstance(values, dict):
            yield values
