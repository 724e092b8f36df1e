"""Files that are either complete or absent: written under a temporary name, fsynced, renamed; and full disks."""

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from kineto_trace.base.quantities import format_size


def is_full(exc: OSError) -> bool:
    """Returns whether the disk, or the writer's quota on it, has no room left."""
    return exc.errno in (errno.ENOSPC, errno.EDQUOT)


def room(folder: Path) -> str:
    """Returns the space left on the disk of a folder, for a message. Raises OSError."""
    disk = os.statvfs(folder)
    if disk.f_files and not disk.f_favail:  # some file systems count no inodes
        return "no inodes are free"
    return f"{format_size(disk.f_bavail * disk.f_frsize)} are free"


def fsync_directory(directory: Path) -> None:
    """Makes renames in a folder survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A binary file for writing that appears under `path` only when the block ends without an error."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:  # buffered: a raw one silently writes only as much as fits on a full disk
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync_directory(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a small file completely or not at all."""
    with atomic_file(path) as file:
        file.write(data)


class DigestFile:
    """Passes on what is written, and tracks its length and SHA-256."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.size_bytes = 0

    def write(self, data: bytes | memoryview) -> int:
        """Writes as much as the file accepts. Returns the number of bytes."""
        written = self._file.write(data)
        self._hash.update(memoryview(data)[:written])
        self.size_bytes += written
        return written

    @property
    def sha256(self) -> str:
        """Returns the SHA-256 of everything written so far, in hexadecimal."""
        return self._hash.hexdigest()
