"""Traces in the files and folders of this machine: which files may be one, by name and beginning."""

import re
import zlib
from pathlib import Path

from kineto_trace.errors import FileError
from kineto_trace.model.target_info import TARGET_FILE

HEAD_BYTES = 1 << 18  # of a file, unpacked, that are looked at to know what it is
PACKED_HEAD_BYTES = 1 << 16
MAX_DEPTH = 4  # folders in folders that are searched
TRACE_SUFFIXES = (".json", ".json.gz", ".pftrace", ".pftrace.gz", ".perfetto-trace", ".perfetto-trace.gz")

_GZIP = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


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
    """Tells whether a file in a folder is a trace, by its name and, for JSON, by its beginning."""
    if path.name.startswith(".") or not path.name.endswith(TRACE_SUFFIXES) or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return may_be_trace(path.name, unpacked_head(path, file.read(PACKED_HEAD_BYTES)))
    except (OSError, FileError):
        return may_be_trace(path.name, b"")


def may_be_trace(name: str, head: bytes) -> bool:
    """Tells whether a file with this name and beginning may be a trace; many files are JSON."""
    if ".json" not in name or ".pt.trace.json" in name:
        return True
    return b'"traceEvents"' in head or (head.lstrip()[:1] == b"[" and b'"ph"' in head)


def natural_order(path: Path) -> list[tuple[int, str]]:
    """Sort key that puts rank2 before rank10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path)) if part]
