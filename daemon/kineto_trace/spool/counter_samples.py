"""Files of hardware counter samples, as the daemon writes them beside a capture: KCSAMP01.

    8 bytes     KCSAMP01
    u32         bytes of the header, little-endian like everything
    header      JSON, a CounterHeader; then zeros up to a multiple of 8 from the beginning of the file
    rows        i64 start_ns, i64 end_ns, f32 for each metric, zeros up to a multiple of 8

Times are Unix time. Rows are in the order of time and do not overlap. A row that a crash has cut off is ignored.
Content is untrusted: bounds are checked before use.
"""

import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated

import msgspec
import numpy as np

from kineto_trace.base.array_types import Floats32, Ints, Structs
from kineto_trace.base.atomic_files import write_atomically
from kineto_trace.errors import FileError, SpoolError

MAGIC = b"KCSAMP01"
SUFFIX = ".counters"
MAX_HEADER_BYTES = 64 << 10
MAX_METRICS = 64
MAX_FILE_BYTES = 2 << 30
_LENGTH = struct.Struct("<I")
_ALIGNMENT = 8
Text = Annotated[str, msgspec.Meta(max_length=256)]
_NAME = Path("raw", "gpus.json")  # in a target's folder
_MAX_BYTES = 1 << 20
Uuid = Annotated[str, msgspec.Meta(max_length=64)]


class SampledMetric(msgspec.Struct, frozen=True, kw_only=True):
    """A column. name: the vendor's. unit: "%", "B/s", "Hz" or the vendor's word; empty: none."""

    name: Text
    label: Text
    unit: Text


class CounterHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a file's rows. set: the requested set; empty if metrics were requested."""

    gpu_uuid: Text
    gpu_index: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    chip: Text
    interval_ns: Annotated[int, msgspec.Meta(gt=0, lt=1 << 62)]
    metrics: Annotated[tuple[SampledMetric, ...], msgspec.Meta(min_length=1, max_length=MAX_METRICS)]
    set: Text
    backend: Text
    library_version: Text


_HEADER = msgspec.json.Decoder(
    CounterHeader
)  # made at import: msgspec crashes if several threads decode a type for the first time at once


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterSamples:
    """A file's content.

    start_ns, end_ns: int64 of n rows.
    values: float32 of n rows and a column for each metric.
    disordered: rows that were dropped because they have no length or begin before the previous one has ended.
    """

    header: CounterHeader
    start_ns: Ints
    end_ns: Ints
    values: Floats32
    disordered: int


class TargetGpus(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs of a target.

    contexts: UUIDs of the GPUs on which the process had a context, sampled or not.
    addresses: of these on the PCI bus, as the kernel writes them, if known.
    permitted_ns: of GPUs that others may begin to use, Unix time until which the counters are the caller's.
    notes: missing counters, for people.
    """

    contexts: tuple[Uuid, ...] = ()
    addresses: dict[Uuid, Uuid] = {}  # msgspec copies it
    permitted_ns: dict[Uuid, int] = {}
    notes: tuple[str, ...] = ()

    def write(self, target_dir: Path) -> None:
        """Writes it into the target's raw folder, which exists. Raises OSError."""
        write_atomically(target_dir / _NAME, msgspec.json.encode(self))

    @staticmethod
    def read(target_dir: Path) -> "TargetGpus":
        """Reads the file; empty if it was not written. Raises SpoolError."""
        try:
            with (target_dir / _NAME).open("rb") as file:
                return _GPUS.decode(file.read(_MAX_BYTES))
        except FileNotFoundError:
            return TargetGpus()
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise SpoolError(f"{target_dir / _NAME}: {exc}") from exc


# Made at import: msgspec crashes if two threads are the first to decode a type.
_GPUS = msgspec.json.Decoder(TargetGpus)


def row_type(metrics: int) -> np.dtype[np.void]:
    """Returns the layout of a row with so many metrics: start_ns, end_ns, values."""
    size = 16 + 4 * metrics
    return np.dtype(
        {
            "names": ["start_ns", "end_ns", "values"],
            "formats": ["<i8", "<i8", ("<f4", (metrics,))],
            "offsets": [0, 8, 16],
            "itemsize": size + -size % _ALIGNMENT,
        }
    )


def write_header(file: IO[bytes], header: CounterHeader) -> None:
    """Begins a file. Raises ValueError for a header that readers would reject."""
    text = msgspec.json.encode(header)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {len(text)} bytes is too long")
    _HEADER.decode(text)
    begin = MAGIC + _LENGTH.pack(len(text)) + text
    file.write(begin + bytes(-len(begin) % _ALIGNMENT))


def write_rows(file: IO[bytes], rows: Structs) -> None:
    """Appends rows of `row_type`; padding is written as zeros."""
    clean = np.zeros(len(rows), dtype=rows.dtype)
    for name in ("start_ns", "end_ns", "values"):
        clean[name] = rows[name]
    file.write(clean.tobytes())


def read_counter_samples(path: Path, *, max_bytes: int = MAX_FILE_BYTES) -> CounterSamples:
    """Reads a file. Raises FileError."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            size = status.st_size
            if not stat.S_ISREG(status.st_mode):
                raise FileError(f"{path} is not a regular file")
            if size > max_bytes:
                raise FileError(f"{path}: {size} bytes of counter samples exceed the limit of {max_bytes}")
            header = _read_header(path, file)
            layout = row_type(len(header.metrics))
            data = file.read(max(0, size - file.tell()))
    except (OSError, ValueError) as exc:
        raise FileError(f"{path} cannot be read: {exc}") from exc
    rows = np.frombuffer(data, dtype=layout, count=len(data) // layout.itemsize)
    return _ordered(header, rows)


def sample_files(folder: Path) -> list[Path]:
    """Returns the files of samples in a folder, without those that have no samples yet."""
    return [path for path in sorted(folder.glob(f"*{SUFFIX}")) if path.stat().st_size]


def last_end_ns(path: Path) -> int:
    """Returns when the last complete row of a file ends, which may still be growing; 0 without rows. Raises
    FileError.
    """
    try:
        with path.open("rb") as file:
            layout = row_type(len(_read_header(path, file).metrics))
            begin, size = file.tell(), os.fstat(file.fileno()).st_size
            count = (size - begin) // layout.itemsize
            if count <= 0:
                return 0
            file.seek(begin + (count - 1) * layout.itemsize)
            row = np.frombuffer(file.read(layout.itemsize), dtype=layout)
            return int(row["end_ns"][0])
    except (OSError, ValueError) as exc:
        raise FileError(f"{path} cannot be read: {exc}") from exc


def cut_off(path: Path, until_ns: int) -> None:
    """Removes later rows from a file. Later writes to it are lost. Raises FileError."""
    try:
        with path.open("rb") as file:
            layout = row_type(len(_read_header(path, file).metrics))
            begin, data = file.tell(), file.read()
            rows = np.frombuffer(data, dtype=layout, count=len(data) // layout.itemsize)
            file.seek(0)
            kept = file.read(begin) + rows[rows["end_ns"] <= until_ns].tobytes()
        write_atomically(path, kept)
    except (OSError, ValueError) as exc:
        raise FileError(f"{path} cannot be truncated: {exc}") from exc


def _read_header(path: Path, file: IO[bytes]) -> CounterHeader:
    begin = file.read(len(MAGIC) + _LENGTH.size)
    if len(begin) < len(MAGIC) + _LENGTH.size or begin[: len(MAGIC)] != MAGIC:
        raise FileError(f"{path} is not a file of counter samples: it does not begin with {MAGIC.decode()}")
    (length,) = _LENGTH.unpack_from(begin, len(MAGIC))
    if length > MAX_HEADER_BYTES:
        raise FileError(f"{path}: its header of {length} bytes exceeds the limit of {MAX_HEADER_BYTES}")
    try:
        header = _HEADER.decode(file.read(length))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise FileError(f"{path}: its header cannot be decoded: {exc}") from exc
    file.read(-(len(begin) + length) % _ALIGNMENT)
    return header


def _ordered(header: CounterHeader, rows: Structs) -> CounterSamples:
    start, end = rows["start_ns"].astype(np.int64), rows["end_ns"].astype(np.int64)
    valid = (start >= 0) & (end > start)
    latest = np.maximum.accumulate(np.where(valid, end, 0)) if len(end) else end
    valid[1:] &= start[1:] >= latest[:-1]
    values = rows["values"].astype(np.float32).reshape(len(rows), len(header.metrics))
    return CounterSamples(
        header=header,
        start_ns=start[valid],
        end_ns=end[valid],
        values=values[valid],
        disordered=int(len(valid) - valid.sum()),
    )
