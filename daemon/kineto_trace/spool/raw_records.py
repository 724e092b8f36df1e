"""The raw spool: the files into which the daemon copies a target's records, and their reader in the trace library.

Theory of operation
    One folder per activity source:

    buffers.bin   chunks: header (magic "KBUF", reserved, sequence, records, valid bytes), then the
                  payload as the source wrote it, padded with zeros to a multiple of 8. Chunks are
                  only ever appended. When the daemon was killed, the last chunk may be torn: the
                  reader leaves it out and counts it.
    strings.bin   the arena's string table, verbatim; a torn last entry is left out.
    source.json   {source, format, metadata, record_bytes, records, dropped, bytes}, replaced
                  atomically: once at the announcement of the source, once at its end.

    The content of the files came from a target, so the reader trusts no length in it.

Files beside the trace ("file/1"): joined from the raw records of a source unchanged and unread.
    Such a source delivers one file: its chunks in the order of their sequence, from 0 on. The kind of the file
    (`metadata["file"]`) selects a name from a fixed table; no text of a target becomes part of a path. The file ends at
    the first gap, since later data would be useless. It is complete if its size is the one that the source reported at
    its end (`metadata["size_bytes"]`); otherwise `Attachments.cut` describes what is missing. The content came from a
    target: a pickle is opaque bytes here.
"""

import json
import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kineto_agent.protocol.arena import STRING_ENTRY
from kineto_agent.protocol.records import FILE_FORMAT

from kineto_trace.base.atomic_files import DigestFile, atomic_file, fsync_directory, write_atomically
from kineto_trace.errors import SpoolError
from kineto_trace.store.output_formats import ATTACHMENTS, STORED_NAMES, OutputFile

CHUNK_HEADER = struct.Struct("<4sIQQQ")  # magic, reserved, sequence, records, valid bytes
CHUNK_MAGIC = b"KBUF"
BUFFERS_FILE = "buffers.bin"
STRINGS_FILE = "strings.bin"
SOURCE_FILE = "source.json"
_ALIGNMENT = 8
_SOURCE_TYPES = {
    "source": str,
    "format": str,
    "metadata": dict,
    "record_bytes": dict,
    "records": int,
    "dropped": int,
    "bytes": int,
}
FORMAT = FILE_FORMAT


class RawWriter:
    """Appends the data of one source of one target to its folder. Not thread-safe.

    `bytes_written` is the total size of buffers.bin and strings.bin.
    """

    def __init__(self, directory: Path, *, source: str, format: str, metadata: Mapping[str, object]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.bytes_written = 0
        self._directory = directory
        self._source = source
        self._format = format
        self._metadata = dict(metadata)
        self._payload_bytes = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._buffers = self._strings = -1
        try:
            self._buffers = os.open(directory / BUFFERS_FILE, flags, 0o600)
            self._strings = os.open(directory / STRINGS_FILE, flags, 0o600)
            self._write_source(record_bytes={}, records=0, dropped=0)
            fsync_directory(directory)
        except BaseException:
            self.close()
            raise

    def append_buffer(self, data: memoryview | bytes, *, sequence: int, records: int) -> None:
        """Appends one buffer of records. Raises OSError when the disk is full; the chunk is then torn."""
        view = memoryview(data).cast("B")
        header = CHUNK_HEADER.pack(CHUNK_MAGIC, 0, sequence, records, view.nbytes)
        self._append(self._buffers, [header, view, bytes(_padding(view.nbytes))])
        self._payload_bytes += view.nbytes

    def append_strings(self, data: memoryview | bytes) -> None:
        """Appends the next part of the arena's string table."""
        self._append(self._strings, [memoryview(data).cast("B")])

    def finish(
        self, *, metadata: Mapping[str, object], record_bytes: Mapping[int, int], records: int, dropped: int
    ) -> None:
        """Makes everything durable and writes the final source.json. Nothing may be appended afterwards."""
        os.fsync(self._buffers)
        os.fsync(self._strings)
        self._metadata.update(metadata)
        self._write_source(record_bytes=record_bytes, records=records, dropped=dropped)

    def close(self) -> None:
        """Closes the files. Safe to call twice."""
        for name in ("_buffers", "_strings"):
            descriptor = getattr(self, name)
            if descriptor >= 0:
                os.close(descriptor)
                setattr(self, name, -1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, descriptor: int, parts: list[memoryview | bytes]) -> None:
        for part in parts:
            rest = memoryview(part)
            while rest.nbytes:
                written = os.write(descriptor, rest)
                self.bytes_written += written
                rest = rest[written:]

    def _write_source(self, *, record_bytes: Mapping[int, int], records: int, dropped: int) -> None:
        values = {
            "source": self._source,
            "format": self._format,
            "metadata": self._metadata,
            "record_bytes": {str(kind): size for kind, size in record_bytes.items()},
            "records": records,
            "dropped": dropped,
            "bytes": self._payload_bytes,
        }
        write_atomically(self._directory / SOURCE_FILE, json.dumps(values).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One buffer of records in the mapped file: `data[offset : offset + size]`. records is the source's own count."""

    sequence: int
    records: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RawSource:
    """The data of one source. `data` maps buffers.bin; `torn` counts chunks and strings truncated by a crash."""

    source: str
    format: str
    metadata: dict[str, Any]
    record_bytes: dict[int, int]
    records: int
    dropped: int
    data: memoryview
    chunks: tuple[Chunk, ...]
    strings: dict[int, dict[int, bytes]] = field(repr=False)
    torn: int

    def buffers(self) -> Iterator[bytes]:
        """Yields copies of the buffers."""
        return (bytes(self.data[chunk.offset : chunk.offset + chunk.size]) for chunk in self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachments:
    """The written files. `alone`: the capture consists of such files only, so there is no trace."""

    files: tuple[OutputFile, ...] = ()
    cut: tuple[str, ...] = ()  # for people: files that are incomplete or missing
    warnings: tuple[str, ...] = ()
    alone: bool = False


def _padding(size: int) -> int:
    return -size % _ALIGNMENT


def read_source(directory: Path) -> RawSource:
    """Reads the folder of one source. Raises SpoolError."""
    values = _read_source_json(directory / SOURCE_FILE)
    data = _map(directory / BUFFERS_FILE)
    chunks, torn_chunks = _chunks(data)
    strings, torn_strings = parse_strings(_read(directory / STRINGS_FILE))
    return RawSource(
        source=values["source"],
        format=values["format"],
        metadata=values["metadata"],
        record_bytes={int(kind): int(size) for kind, size in values["record_bytes"].items()},
        records=values["records"],
        dropped=values["dropped"],
        data=data,
        chunks=tuple(sorted(chunks, key=lambda chunk: chunk.sequence)),
        strings=strings,
        torn=torn_chunks + torn_strings,
    )


def source_directories(target_dir: Path) -> list[Path]:
    """Returns the folders of all sources of a target, sorted by name."""
    raw = target_dir / "raw"
    return sorted(path for path in raw.iterdir() if path.is_dir()) if raw.is_dir() else []


def _read_source_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as exc:
        raise SpoolError(f"cannot read {path}: {exc}; the raw data of this source is lost") from exc
    for name, kind in _SOURCE_TYPES.items():
        if not isinstance(values, dict) or not isinstance(values.get(name), kind):
            raise SpoolError(f"{path}: {name} is missing or not of type {kind.__name__}")
    if not all(_is_size_of_kind(kind, size) for kind, size in values["record_bytes"].items()):
        raise SpoolError(f"{path}: record_bytes is not a JSON object that maps kinds to sizes")
    return dict(values)


def _is_size_of_kind(kind: str, size: object) -> bool:
    known = kind.isascii() and kind.isdecimal() and len(kind) < 10
    return known and type(size) is int and 0 <= size < 1 << 32


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _map(path: Path) -> memoryview:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except FileNotFoundError:
        return memoryview(b"")


def _chunks(data: memoryview) -> tuple[list[Chunk], int]:
    """Returns all complete chunks, and 1 if the file ends in a truncated chunk."""
    chunks: list[Chunk] = []
    at = 0
    while at + CHUNK_HEADER.size <= data.nbytes:
        magic, _, sequence, records, size = CHUNK_HEADER.unpack_from(data, at)
        start = at + CHUNK_HEADER.size
        if magic != CHUNK_MAGIC or size > data.nbytes - start:
            return chunks, 1
        chunks.append(Chunk(sequence=sequence, records=records, offset=start, size=size))
        at = start + size + _padding(size)
    return chunks, 1 if at < data.nbytes else 0


def parse_strings(data: bytes) -> tuple[dict[int, dict[int, bytes]], int]:
    """Returns the strings by space and key (the last entry wins), and 1 if the table ends in a truncated entry."""
    table: dict[int, dict[int, bytes]] = {}
    at = 0
    while at + STRING_ENTRY.size <= len(data):
        key, space, length = STRING_ENTRY.unpack_from(data, at)
        start = at + STRING_ENTRY.size
        if length > len(data) - start:
            return table, 1
        table.setdefault(space, {})[key] = data[start : start + length]
        at = start + length + _padding(length)
    return table, 1 if at < len(data) else 0


def write_attachments(target_dir: Path) -> Attachments:
    """Writes the files of all sources with this format. Raises SpoolError, OSError."""
    sources = [read_source(directory) for directory in source_directories(target_dir)]
    files: dict[str, OutputFile] = {}
    cut: list[str] = []
    warnings: list[str] = []
    for source in sources:
        if source.format != FORMAT:
            continue
        kind = source.metadata.get("file")
        format_ = ATTACHMENTS.get(kind) if isinstance(kind, str) else None
        if format_ is None or format_ in files:
            problem = f"a file of unknown kind {kind!r:.40}" if format_ is None else f"a second {format_} file"
            warnings.append(f"{source.source}: {problem} is left out")
            continue
        file = _write(source, format_, target_dir)
        problem = _problem(source, file)
        if file.size_bytes:
            files[format_] = file
        if problem:
            cut.append(f"the {format_} file is incomplete: {problem}")
    return Attachments(
        files=tuple(files.values()),
        cut=tuple(cut),
        warnings=tuple(warnings),
        alone=bool(sources) and all(source.format == FORMAT for source in sources),
    )


def _write(source: RawSource, format_: str, target_dir: Path) -> OutputFile:
    name = STORED_NAMES[format_]
    with atomic_file(target_dir / name) as file:
        digest = DigestFile(file)
        for part in _parts(source):
            digest.write(part)
    if not digest.size_bytes:
        (target_dir / name).unlink()
    return OutputFile(format_, name, digest.size_bytes, digest.sha256)


def _parts(source: RawSource) -> Sequence[memoryview]:
    """Returns the chunks up to the first gap."""
    parts = []
    for expected, chunk in enumerate(source.chunks):
        if chunk.sequence != expected:
            break
        parts.append(source.data[chunk.offset : chunk.offset + chunk.size])
    return parts


def _problem(source: RawSource, file: OutputFile) -> str:
    wanted = source.metadata.get("size_bytes")
    if not isinstance(wanted, int):
        return f"it ends after {file.size_bytes} bytes, because its source did not finish"
    if source.dropped and wanted == file.size_bytes:
        return f"it ends after {file.size_bytes} bytes, because its source could not write all of it"
    if wanted != file.size_bytes:
        return f"{file.size_bytes} of {wanted} bytes are present"
    return ""
