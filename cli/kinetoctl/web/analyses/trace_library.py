"""The traces that the pages can show: those of captures, through the daemon, or files that the command line names.

A capture's files are found as for `kinetoctl report ID`: the daemon is asked first, with the caller's rights; what is
downloaded stays until the server ends.
"""

import glob
import hashlib
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from kinetoctl.base.common_options import CommonOptions
from kinetoctl.errors import NotFound
from kinetoctl.options.trace_arguments import CAPTURE_ID, trace_paths

_ID_DIGITS = 12
MAX_DOWNLOADED = 64  # captures of one run


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSet:
    """What one page is about. argument: as `kinetoctl report` takes it. identity: changes with the files."""

    id: str
    argument: str
    paths: tuple[str, ...]
    identity: str


class TraceLibrary:
    """Finds traces by the id in a page's address. Thread-safe; `close` removes what was downloaded."""

    def __init__(self, settings: CommonOptions, arguments: Sequence[str] = ()) -> None:
        self._settings = replace(settings, quiet=True)
        self._stack = ExitStack()
        self._lock = threading.Lock()
        self._captures: dict[str, tuple[str, ...]] = {}
        self.files = {_file_id(argument): argument for argument in arguments}

    def find(self, trace_id: str) -> TraceSet:
        """The traces of a file's or a capture's id. Raises NotFound and the client's errors."""
        if self.files:
            return self._file(trace_id)
        if not CAPTURE_ID.fullmatch(trace_id):
            raise NotFound(f"there is no capture {trace_id}")
        with self._lock:
            if trace_id not in self._captures:
                if len(self._captures) >= MAX_DOWNLOADED:
                    self._stack.close()
                    self._captures.clear()
                self._captures[trace_id] = tuple(map(str, trace_paths([trace_id], self._settings, self._stack)))
            paths = self._captures[trace_id]
        return TraceSet(id=trace_id, argument=trace_id, paths=paths, identity=_identity(paths))

    def close(self) -> None:
        """Removes what was downloaded."""
        self._stack.close()

    def _file(self, trace_id: str) -> TraceSet:
        argument = self.files.get(trace_id)
        if argument is None:
            raise NotFound(f"there is no trace {trace_id} on the command line of this server")
        return TraceSet(id=trace_id, argument=argument, paths=(argument,), identity=_identity((argument,)))


def _file_id(argument: str) -> str:
    """The same for the same file each time, so that addresses stay."""
    return hashlib.sha256(str(Path(argument).resolve()).encode()).hexdigest()[:_ID_DIGITS]


def _identity(paths: Sequence[str]) -> str:
    """A hash of what tells files apart without reading them: path, inode, size and time of the last change."""
    digest = hashlib.sha256()
    for path in map(Path, _matches(paths)):
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.exists():
                status = file.stat()
                digest.update(f"{file}\0{status.st_ino}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _matches(paths: Sequence[str]) -> list[str]:
    """The paths, and what patterns among them match now."""
    return [match for path in paths for match in sorted(glob.glob(path, recursive=True)) or [path]]  # noqa: PTH207
