"""The folder into which a process's libkineto writes one trace, for whoever has the right to look into it.

Theory of operation
    `DirectTraceFolders` looks by itself, as root's daemon and a user's own daemon may. `HelperTraceFolders` has the
    attach helper do so, for a front end without any right. Only the helper makes a folder of its own in the process's
    one: it may remove what lies in its own folder, and nothing else. Root needs none, and could make none where its
    number means nothing, as in a user namespace.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from kinetod.attach.attach_types import Approval
from kinetod.processes.identity import ProcessKey


class FolderUnreachable(Exception):
    """The folder cannot be used; the text says why."""


class FileRefused(Exception):
    """The file is not one that a libkineto of this process wrote; the text says why."""


class FileTooLarge(Exception):
    """The file is larger than allowed."""


class Sight(NamedTuple):
    """What is in the folder. writing_bytes: size of the file while libkineto writes it; None: it is not there."""

    writing_bytes: int | None = None
    whole: bool = False


class OpenTraceFolder(Protocol):
    """The folder of one process and one trace. All methods but `close` raise TimeoutError if it does not answer."""

    @property
    def path(self) -> str:
        """The folder as the process sees it."""

    async def look(self) -> Sight:
        """Looks for the file. Raises OSError."""

    async def copy(
        self, destination: Path, *, max_bytes: int, on_bytes: Callable[[int], None], deadline_s: float
    ) -> int:
        """Copies the whole file; returns its size. on_bytes: called with the size so far; what it raises ends the copy.

        Raises FolderUnreachable, FileRefused, FileTooLarge, OSError if the copy cannot be written.
        """

    async def remove(self) -> None:
        """Removes the file, also one that is still being written, and the folder if it is our own. Raises OSError."""

    def close(self) -> None:
        """Ends the use of the folder and leaves in it what is there. Valid twice."""


class TraceFolders(Protocol):
    """Opens the folders of processes. look_period_s: how often it is worth while to look into one."""

    look_period_s: float

    async def problem(self, key: ProcessKey, approval: Approval) -> str:
        """Why no libkineto of this process can write where it is read; empty if it can."""

    async def open(self, key: ProcessKey, approval: Approval, name: str, *, until_ns: int) -> OpenTraceFolder:
        """Opens the folder for a new trace. name: of the file; until_ns: Unix time at which nobody wants it any more.

        Raises FolderUnreachable, TimeoutError.
        """

    async def reopen(self, key: ProcessKey, path: str, name: str, *, uid: int) -> OpenTraceFolder:
        """Opens the folder in which a previous daemon has let libkineto write. uid: whose the file has to be.

        Raises FolderUnreachable, TimeoutError.
        """

    async def stop(self) -> None:
        """Gives up what still blocks."""
