"""A process's folder in /proc, opened once: what is read through it is of that process, whoever gets its number later.

One descriptor and plain calls instead of paths: every list of processes reads ten files of each.
"""

import os
from pathlib import Path
from types import TracebackType
from typing import Self

PROC = Path("/proc")
_CHUNK_BYTES = 64 << 10


def lines(content: bytes) -> list[str]:
    r"""The lines of a file of /proc that has names of others in it: of processes, files, control groups.

    The kernel keeps only \n out of them. For str.splitlines, and for files that are opened as text, \r, \f and others
    end lines too: whoever chooses such a name would write lines of its own, and be of any user, job or pod.
    """
    return content.decode("utf-8", "replace").split("\n")


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
        """A descriptor to read from, which the caller owns."""
        return os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._fd)

    def read(self, name: str) -> bytes:
        """A whole file."""
        fd = self.open(name)
        try:
            parts = []
            while part := os.read(fd, _CHUNK_BYTES):
                parts.append(part)
            return b"".join(parts)
        finally:
            os.close(fd)

    def read_once(self, name: str) -> bytes:
        """A whole file, as it was when it was first asked for in this way."""
        if name not in self._kept:
            self._kept[name] = self.read(name)
        return self._kept[name]

    def link(self, name: str) -> str:
        """Where a link leads."""
        return os.readlink(name, dir_fd=self._fd)

    def owner(self, name: str) -> int:
        """The user whom a file belongs to."""
        return os.stat(name, dir_fd=self._fd).st_uid

    def entries(self, name: str) -> list[str]:
        """The names in a folder."""
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._fd)
        try:
            return os.listdir(fd)  # noqa: PTH208 - of a descriptor
        finally:
            os.close(fd)

    def links(self, name: str) -> list[str]:
        """Where the links of a folder lead; those that are gone meanwhile are left out."""
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
