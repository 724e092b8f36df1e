"""The traces that the pages can show: those of captures, through the daemon, or files that the command line names.

A capture's files are found as for `kinetoctl report ID`: the daemon is asked first, with the caller's rights; what is
downloaded stays until the server ends.
"""

import glob
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from kinetoctl.base.common_options import CommonOptions
from kinetoctl.errors import CliError, NotFound
from kinetoctl.options.trace_arguments import CAPTURE_ID, trace_paths
from kinetoctl.web.analyses.analysis_queue import Computing

_ID_DIGITS = 12
FIND_S = 0.7  # for the daemon's answer and the download, before a page is shown without them and loads itself again
MAX_FINDING = 4  # downloads at a time
MAX_CAPTURES_KEPT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSet:
    """What one page is about. argument: as `kinetoctl report` takes it. identity: changes with the files."""

    id: str
    argument: str
    paths: tuple[str, ...]
    identity: str


class _Found(NamedTuple):
    """The paths of a capture, once they are known, and what removes its files."""

    paths: "Future[tuple[str, ...]]"
    stack: ExitStack


class TraceLibrary:
    """Finds traces by the id in a page's address. Thread-safe; `close` removes what was downloaded."""

    def __init__(self, settings: CommonOptions, arguments: Sequence[str] = ()) -> None:
        self._settings = replace(settings, quiet=True)
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(MAX_FINDING, thread_name_prefix="captures")
        self._captures: OrderedDict[str, _Found] = OrderedDict()
        self.files = {_file_id(argument): argument for argument in arguments}

    def find(self, trace_id: str, wait_s: float = FIND_S) -> TraceSet:
        """The traces of a file's or a capture's id. A capture that takes longer to download is waited for again.

        Raises NotFound, Computing and the client's errors.
        """
        if self.files:
            return self._file(trace_id)
        if not CAPTURE_ID.fullmatch(trace_id):
            raise NotFound(f"there is no capture {trace_id}")
        found = self._capture(trace_id)
        try:
            paths = found.paths.result(wait_s)
        except FutureTimeout:
            raise Computing from None
        except CliError:
            with self._lock:
                self._captures.pop(trace_id, None)
            raise
        return TraceSet(id=trace_id, argument=trace_id, paths=paths, identity=_identity(paths))

    def close(self) -> None:
        """Removes what was downloaded."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for found in self._captures.values():
                found.stack.close()

    def _capture(self, capture_id: str) -> "_Found":
        """What is being found, or was, of a capture. Of too many, the first ones are removed."""
        with self._lock:
            found = self._captures.get(capture_id)
            if found is None:
                while len(self._captures) >= MAX_CAPTURES_KEPT:
                    self._captures.popitem(last=False)[1].stack.close()
                stack = ExitStack()
                found = _Found(self._pool.submit(self._paths, capture_id, stack), stack)
                self._captures[capture_id] = found
            return found

    def _paths(self, capture_id: str, stack: ExitStack) -> tuple[str, ...]:
        return tuple(map(str, trace_paths([capture_id], self._settings, stack)))

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
