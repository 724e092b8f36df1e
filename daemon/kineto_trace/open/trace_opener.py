"""Opens every form of a trace; the content, not the name, determines the form.

open_trace("trace.json.gz")         a Chrome trace of Kineto, PyTorch or others, compressed or not
open_trace("trace.pftrace")         a Perfetto trace
open_trace("host.xplane.pb")        a profile that XLA wrote: jax.profiler, TensorFlow
open_trace("captures/…/targets/…")  a target of the daemon, finished or raw
open_trace("training.kineto")       a folder of columns

Profiles that XLA wrote itself (NAME.xplane.pb, of JAX, TensorFlow or torch_xla):

Theory of operation
    The trace is the output of the decoder of recorded profiles; its window is the extent of all rows, and its
    iterations have the program's own numbers. Host and process id are in the profile; system thread ids are not
    (decode/xplane_profile.py), so threads have numbers of their own. Data after a damaged place are dropped, and a note
    says so.
"""

import gzip
import zlib
from dataclasses import replace
from enum import Enum
from os import PathLike
from pathlib import Path

from kineto_trace.base.quantities import memory_errors
from kineto_trace.decode.iterations import whole_extent, with_program_steps
from kineto_trace.decode.xplane_profile import Profiles
from kineto_trace.decode.xspace import BYTES, Damaged, fields, is_xspace
from kineto_trace.errors import FileError
from kineto_trace.formats.chrome.chrome_reader import load_chrome
from kineto_trace.model.target_info import TARGET_FILE, TargetInfo
from kineto_trace.model.trace import StringTable, Trace
from kineto_trace.open.raw_target import load_kineto_target, load_target, relate
from kineto_trace.open.trace_source import PACKED_HEAD_BYTES, traces_below, unpacked_head
from kineto_trace.spool.kineto_file import has_request
from kineto_trace.store.output_formats import COLUMNS_DIRECTORY

_PRINTABLE = frozenset((*b"\t\r\n", *range(32, 127)))
# Common mistakes: position in the file, the bytes there, what the file is, what to do.
_OTHERS = (
    (0, b"SQLite format 3\0", "an SQLite database", "exports of Nsight Systems are not supported"),
    (257, b"ustar", "a tar archive", "unpack it and name the files inside"),
    (0, b"PK\x03\x04", "a zip archive", "unpack it and name the files inside"),
    (0, b"\x28\xb5\x2f\xfd", "compressed with zstd", "unpack it, or compress it with gzip"),
    (0, b"\xfd7zXZ\0", "compressed with xz", "unpack it, or compress it with gzip"),
    (0, b"BZh", "compressed with bzip2", "unpack it, or compress it with gzip"),
    (0, b"PAR1", "a single Parquet file", "name the folder that contains trace.json"),
    (0, b"ARROW1", "an Arrow file", "stored traces are folders of columns"),
    (0, b"\x7fELF", "a program", "name the trace that it wrote"),
    (0, b"\xff\xfe", "text in UTF-16", "convert it to UTF-8"),
    (0, b"\xfe\xff", "text in UTF-16", "convert it to UTF-8"),
    (0, b"\x80\x02", "a pickle", "if it is a memory snapshot, pass only snapshots to report or web"),
    (0, b"\x80\x04", "a pickle", "if it is a memory snapshot, pass only snapshots to report or web"),
    (0, b"\x80\x05", "a pickle", "if it is a memory snapshot, pass only snapshots to report or web"),
    (0, b"<", "HTML or XML", "name the trace itself"),
)
_GZIP = b"\x1f\x8b"
_HOSTNAMES = 4
_MOST_HOST = 255


class Form(Enum):
    """The form of the trace at a path."""

    STORED = "folder of columns"
    TARGET = "target of the daemon"
    CHROME = "Chrome trace"
    PERFETTO = "Perfetto trace"
    XPLANE = "XLA profile"


def open_trace(path: str | PathLike[str]) -> Trace:
    """Opens the trace at this path. Its notes report losses and oddities.

    The columns of a stored trace are read when they are accessed; all other forms are read at once. Raises TraceError,
    in particular FileError for a path that is not a trace or cannot be read; MemoryError.
    """
    with memory_errors(str(path)):
        return _open(Path(path))


def _open(place: Path) -> Trace:
    form = detect(place)
    if form is Form.STORED:
        from kineto_trace.store.parquet_folder import load_columns

        return load_columns(place)
    if form is Form.TARGET:
        return _open_target(place)
    try:
        if form is Form.PERFETTO:
            from kineto_trace.formats.perfetto.perfetto_reader import load_perfetto

            return load_perfetto(place)
        if form is Form.XPLANE:
            return load_xplane(place)
        return load_chrome(place)
    except OSError as exc:
        raise _unreadable(place, exc) from exc


def detect(path: Path) -> Form:
    """Returns the form of this path by its content. Raises FileError if it is not a trace."""
    try:
        if path.is_dir():
            return _folder_form(path)
        if path.exists() and not path.is_file():
            raise FileError(f"{path} is neither a file nor a folder")
        with path.open("rb") as file:
            packed = file.read(PACKED_HEAD_BYTES)
    except OSError as exc:
        raise _unreadable(path, exc) from exc
    if not packed:
        raise FileError(f"{path} is empty: the profiler that wrote it has not finished, or the disk was full")
    head = unpacked_head(path, packed)
    form = _form_of(head)
    if form is not None:
        return form
    for place, magic, what, advice in _OTHERS:
        if head[place : place + len(magic)] == magic:
            raise FileError(f"{path} is {what}, not a trace: {advice}")
    raise FileError(
        f"{path} is not a trace: it begins with {head[:16]!r}; "
        "supported formats: Chrome traces (.json, .json.gz), Perfetto traces, XLA profiles (.xplane.pb) and folders of "
        "columns"
    )


def _form_of(head: bytes) -> Form | None:
    text = head.lstrip(b" \t\r\n")
    if text[:1] in (b"{", b"["):
        return Form.CHROME
    if is_xspace(head):
        return Form.XPLANE
    if head[:1] == b"\x0a" and _is_packet(head):
        return Form.PERFETTO
    return None


def _is_packet(head: bytes) -> bool:
    """Returns whether this is perfetto.protos.Trace: messages of field 1, the first beginning with a field."""
    length, at = 0, 1
    for shift in range(0, 35, 7):
        if at >= len(head):
            return False
        byte = head[at]
        length |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            break
    else:
        return False
    if all(byte in _PRINTABLE for byte in head[:64]):
        return False  # text after an empty line
    end = at + length
    if length and (at >= len(head) or head[at] & 7 not in (0, 1, 2, 5) or head[at] < 8):
        return False
    return end >= len(head) or head[end] == 0x0A


def _folder_form(path: Path) -> Form:
    from kineto_trace.store.parquet_folder import is_stored

    if is_stored(path):
        return Form.STORED
    if (path / TARGET_FILE).is_file():
        return Form.TARGET
    inside = [str(found) for found in traces_below(path)]
    if inside:
        listed = ", ".join(inside[:3]) + (", …" if len(inside) > 3 else "")
        raise FileError(f"{path} is a folder of {len(inside)} traces: name one of them ({listed})")
    raise FileError(f"{path} is a folder without traces")


def _open_target(path: Path) -> Trace:
    """Opens the columns of a target if it has any, otherwise its raw records."""
    from kineto_trace.store.parquet_folder import is_stored, load_columns

    if is_stored(path / COLUMNS_DIRECTORY):
        return load_columns(path / COLUMNS_DIRECTORY)
    if not (path / "raw").is_dir():
        raise FileError(f"{path} is the folder of a target without recorded data")
    if has_request(path):
        return load_kineto_target(path).trace
    loaded = load_target(path)
    return replace(loaded.trace, notes=(*loaded.trace.notes, *loaded.warnings))


def _unreadable(path: Path, exc: OSError) -> FileError:
    return FileError(f"cannot read {path}: {exc.strerror or exc}")


def load_xplane(path: Path) -> Trace:
    """Reads the file, compressed by gzip or not. Raises OSError, and FileError if it is damaged."""
    data = path.read_bytes()
    if data.startswith(_GZIP):
        try:
            data = gzip.decompress(data)
        except (EOFError, zlib.error) as exc:
            raise FileError(f"{path} is damaged: {exc}") from exc
    strings = StringTable()
    profiles = Profiles(strings, {})
    damaged = 0
    try:
        profiles.read(data)
    except Damaged:
        damaged = 1
    decoded = profiles.decoded(damaged)
    if not decoded.records and damaged:
        raise FileError(f"{path} is a damaged XLA profile: nothing of it could be read. Copy the file again")
    if not decoded.records:
        raise FileError(f"{path} is an XLA profile without known events: record again, for longer")
    tables = relate(with_program_steps(decoded.tables, strings) or decoded.tables, strings)
    start, end = whole_extent(tables)
    return Trace(
        target=TargetInfo(
            capture_id="",
            host=_host(data),
            pid=profiles.process_id,
            process_name="",
            framework="jax",
            threads=dict(decoded.threads),
            window_start_ns=start,
            window_end_ns=end,
            complete=not damaged,
        ),
        strings=tuple(strings.strings),
        tables=tables,
        window_start_ns=start,
        window_end_ns=end,
        notes=decoded.warnings,
    )


def _host(data: bytes) -> str:
    try:
        for number, kind, begin, end in fields(data, 0, len(data)):
            if number == _HOSTNAMES and kind == BYTES:
                return data[begin:end].decode("utf-8", "replace")[:_MOST_HOST]
    except Damaged:
        return ""
    return ""
