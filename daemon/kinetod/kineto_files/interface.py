"""Interface to the folder into which a process's libkineto writes one trace.

Theory of operation
    `DirectTraceFolders` reads it directly, as root's daemon and a user's own daemon may. `HelperTraceFolders` lets the
    attach helper do so, for a front end without rights. Only the helper creates its own folder inside the process's
    one: it may remove files in its own folder, and nothing else. Root needs none, and could not create one where its
    uid has no meaning, as in a user namespace.
"""

from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Protocol

from kinetod.attach.attach_types import Approval
from kinetod.attach.inspect.process_inspection import environment, read_status
from kinetod.kineto_ipc.network_namespaces import TRACE_DIR
from kinetod.processes.identity import PROC, ProcessKey

DEFAULT_FOLDER = "/tmp"  # libkineto's default: from torch 2.14 on it writes nowhere else
MAX_FOLDER_CHARS = 512


class FolderUnreachable(Exception):
    """The folder cannot be used; the message says why."""


class FileRefused(Exception):
    """The file was not written by a libkineto of this process; the message says why."""


class FileTooLarge(Exception):
    """The file is larger than allowed."""


class Sight(NamedTuple):
    """State of the folder. writing_bytes: size of the file while libkineto writes it; None: it does not exist."""

    writing_bytes: int | None = None
    whole: bool = False


class OpenTraceFolder(Protocol):
    """The folder of one process and one trace. All methods but `close` raise TimeoutError if it does not answer."""

    @property
    def path(self) -> str:
        """The folder as the process sees it."""

    async def look(self) -> Sight:
        """Checks for the file. Raises OSError."""

    async def copy(
        self, destination: Path, *, max_bytes: int, on_bytes: Callable[[int], None], deadline_s: float
    ) -> int:
        """Copies the complete file; returns its size. on_bytes: called with the size so far; its exceptions end the
        copy.

        Raises FolderUnreachable, FileRefused, FileTooLarge, OSError if the copy cannot be written.
        """

    async def remove(self) -> None:
        """Removes the file, even while it is being written, and the folder if it is our own. Raises OSError."""

    def close(self) -> None:
        """Ends the use of the folder, leaving its contents. Idempotent."""


class TraceFolders(Protocol):
    """Opens the folders of processes. look_period_s: recommended interval between checks of one."""

    look_period_s: float

    async def problem(self, key: ProcessKey, approval: Approval) -> str:
        """Why no libkineto of this process can write where we read; empty if it can."""

    async def open(self, key: ProcessKey, approval: Approval, name: str, *, until_ns: int) -> OpenTraceFolder:
        """Opens the folder for a new trace. name: of the file; until_ns: Unix time after which it is no longer needed.

        Raises FolderUnreachable, TimeoutError.
        """

    async def reopen(self, key: ProcessKey, path: str, name: str, *, uid: int) -> OpenTraceFolder:
        """Opens the folder that a previous daemon had libkineto write to. uid: required owner of the file.

        Raises FolderUnreachable, TimeoutError.
        """

    async def stop(self) -> None:
        """Abandons blocked operations."""


def trace_folder(pid: int, proc: Path = PROC) -> str:
    """The folder that libkineto of this process may write to, as the process sees it; requires the right to read its
    environment.
    """
    wanted = (environment(pid, proc) or {}).get(TRACE_DIR, "").rstrip("/")
    path = PurePosixPath(wanted)
    usable = path.is_absolute() and ".." not in path.parts and not set("=#") & set(wanted)
    if usable and str(path) == wanted and wanted.isprintable() and wanted.isascii() and len(wanted) < MAX_FOLDER_CHARS:
        return wanted
    return DEFAULT_FOLDER


def own_pid(pid: int, proc: Path = PROC) -> int:
    """The pid of a process in its own PID namespace; the same number if unknown."""
    numbers = read_status(proc / str(pid)).get("NSpid", "").split()
    return int(numbers[-1]) if numbers and numbers[-1].isdecimal() else pid
