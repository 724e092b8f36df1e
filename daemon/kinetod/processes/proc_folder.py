"""A process's folder in /proc, opened once: it always reads that process, even if its number is reused.

One descriptor and plain calls instead of paths: every list of processes reads ten files of each.
"""

import os
from pathlib import Path
from types import TracebackType
from typing import Self

PROC = Path("/proc")
_CHUNK_BYTES = 64 << 10


def lines(content: bytes) -> list[str]:
    r"""Splits a file of /proc that contains foreign names (of processes, files, control groups) into lines.

    The kernel escapes only \n in them. str.splitlines, and files opened as text, also end lines at \r, \f and others: a
    process could choose a name that adds lines of its own, and pretend to be of any user, job or pod.
    """
    return content.decode("utf-8", "replace").split("\n")


def text_of(path: Path) -> str:
    """The text of a file in /proc or /sys; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


class ProcessFolder:
    """Every method raises OSError if the process is gone or the kernel refuses. Blocking."""

    def __init__(self, pid: int, proc: Path = PROC) -> None:
        self.pid = pid
        self._kept: dict[str, bytes] = {}
        self._fd = os.open(f"{proc}/{pid}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Frees the descriptor."""
        os.close(self._fd)

    def open(self, name: str) -> int:
        """Opens a file for reading; the caller owns the descriptor."""
        return os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._fd)

    def read(self, name: str) -> bytes:
        """Reads a whole file."""
        fd = self.open(name)
        try:
            parts = []
            while part := os.read(fd, _CHUNK_BYTES):
                parts.append(part)
            return b"".join(parts)
        finally:
            os.close(fd)

    def read_once(self, name: str) -> bytes:
        """Reads a whole file once; later calls return the same content."""
        if name not in self._kept:
            self._kept[name] = self.read(name)
        return self._kept[name]

    def link(self, name: str) -> str:
        """The target of a link."""
        return os.readlink(name, dir_fd=self._fd)

    def owner(self, name: str) -> int:
        """The user who owns a file."""
        return os.stat(name, dir_fd=self._fd).st_uid

    def entries(self, name: str) -> list[str]:
        """The names in a folder."""
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._fd)
        try:
            return os.listdir(fd)  # noqa: PTH208 - of a descriptor
        finally:
            os.close(fd)

    def links(self, name: str) -> list[str]:
        """The targets of the links in a folder, without links that have disappeared."""
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._fd)
        try:
            found = []
            for entry in os.listdir(fd):  # noqa: PTH208 - of a descriptor
                try:
                    found.append(os.readlink(entry, dir_fd=fd))
                except OSError:
                    continue
            return found
        finally:
            os.close(fd)
