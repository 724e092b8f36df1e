"""Which memory snapshots there are: files, those in folders, those beside traces, patterns."""

import glob
from os import PathLike
from pathlib import Path

from kineto_trace.open.local_traces import MAX_DEPTH, TRACE_SUFFIXES, natural_order
from kineto_trace.snapshots.plain_pickle import MAGIC, PROTOCOLS
from kineto_trace.store.output_formats import ATTACHMENT_SUFFIXES, ATTACHMENTS

SNAPSHOT_FORMAT = ATTACHMENTS["memory_snapshot"]
SUFFIX = ATTACHMENT_SUFFIXES[SNAPSHOT_FORMAT]
COLUMNS_SUFFIX = ".kineto"  # of a folder of columns
STORED_NAME = SUFFIX.lstrip(".")  # in the folder of a target


def is_snapshot_file(path: Path) -> bool:
    """Tells whether this is a file that may be a snapshot, by its beginning."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            head = file.read(2)
    except OSError:
        return False
    return len(head) == 2 and head[0] == MAGIC and head[1] in PROTOCOLS


def snapshots_at(path: str | PathLike[str]) -> list[Path]:
    """Returns the snapshots at a path or pattern: the file itself, those in the folder, or the one beside the trace."""
    place = Path(path)
    if not place.exists() and glob.has_magic(str(path)):
        found = sorted((Path(match) for match in glob.glob(str(path), recursive=True)), key=natural_order)  # noqa: PTH207 - absolute patterns too
        return list(dict.fromkeys(each for match in found for each in _at(match)))
    return _at(place)


def process_name(path: Path) -> str:
    """Returns what the process of a snapshot is called: the file without its suffix, or its target's folder."""
    return path.parent.name if path.name == STORED_NAME else path.name.removesuffix(SUFFIX).removesuffix(".pickle")


def _at(place: Path) -> list[Path]:
    if is_snapshot_file(place):
        return [place]
    found = _below(place, MAX_DEPTH) if place.is_dir() else []
    suffix = next((suffix for suffix in (*TRACE_SUFFIXES, COLUMNS_SUFFIX) if place.name.endswith(suffix)), "")
    beside = place.with_name(place.name.removesuffix(suffix) + SUFFIX)
    return found or ([beside] if suffix and beside.is_file() else [])


def _below(folder: Path, depth: int) -> list[Path]:
    """The snapshots in a folder and, down to this depth, in its subfolders."""
    try:
        entries = sorted(folder.iterdir(), key=natural_order)
    except OSError:
        return []
    found = [entry for entry in entries if entry.name.endswith(STORED_NAME) and entry.is_file()]
    if depth:
        for entry in entries:
            if entry.is_dir() and not entry.is_symlink() and not entry.name.startswith("."):
                found += _below(entry, depth - 1)
    return found
