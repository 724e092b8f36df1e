"""Files beside the trace ("file/1"): joined from the raw records of a source as they are, never looked into.

Theory of operation
    Such a source delivers one file: its chunks in the order of their sequence, from 0 on. The kind of the file
    (`metadata["file"]`) chooses a name from a fixed table, nothing that a target says becomes part of a path.
    The file ends at the first gap, since what follows a hole is of no use. It is whole if its size is the one
    that the source told at its end (`metadata["size_bytes"]`); otherwise `Attachments.cut` says what is missing.
    What is in the file came from a target: a pickle is opaque bytes here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kineto_agent.protocol.records import FILE_FORMAT

from kineto_trace.base.atomic_files import DigestFile, atomic_file
from kineto_trace.spool.raw_records import RawSource, read_source, source_directories
from kineto_trace.store.output_formats import ATTACHMENTS, STORED_NAMES, OutputFile

FORMAT = FILE_FORMAT


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachments:
    """What was written. `alone`: the capture consists of such files only, so there is no trace."""

    files: tuple[OutputFile, ...]
    cut: tuple[str, ...]  # for people: files that are not whole, or missing
    warnings: tuple[str, ...]
    alone: bool


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
            problem = f"a file of the unknown kind {kind!r:.40}" if format_ is None else f"a second {format_} file"
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
            rest = part
            while rest.nbytes:
                rest = rest[digest.write(rest) :]
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
