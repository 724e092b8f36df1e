"""Finds the process that has a Unix socket of a given name: the one to stop so that this daemon can answer polls.

/proc/net/unix leads from the name to the socket's inode, and processes' descriptors lead from the inode to the process.
A daemon without rights over other users' processes cannot read those; it then guesses a process called dynolog.
"""

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

from kinetod.base.safe_text import clean
from kinetod.processes.identity import PROC
from kinetod.processes.proc_folder import lines

DYNOLOG = "dynolog"
_SOCKET = re.compile(r"socket:\[(\d+)\]")
_INODE, _PATH = 6, 7  # columns of /proc/net/unix


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that has the socket. guessed: only its name suggests that."""

    pid: int
    name: str
    guessed: bool = False

    def __str__(self) -> str:
        return f"process {self.pid} ({self.name}{', by its name' if self.guessed else ''})"


def holder(name: str, proc: Path = PROC, *, seen_by: str = "self") -> Holder | None:
    """The process that has the socket; None if it cannot be found. Blocking.

    name: a path, or an abstract name with @ for each zero, as in /proc/net/unix. seen_by: a pid in its network
    namespace.
    """
    with contextlib.suppress(OSError):
        inodes = _inodes(name, proc / seen_by)
        folders = [folder for folder in proc.iterdir() if folder.name.isdecimal()]
        for folder in folders:
            if _has(folder, inodes):
                return Holder(int(folder.name), _name(folder))
        for folder in folders:
            if _name(folder) == DYNOLOG:
                return Holder(int(folder.name), DYNOLOG, guessed=True)
    return None


def _inodes(name: str, folder: Path) -> set[str]:
    found = set()
    for line in lines((folder / "net/unix").read_bytes())[1:]:
        columns = line.split(None, _PATH)
        if len(columns) > _PATH and columns[_PATH] == name:
            found.add(columns[_INODE])
    return found


def _has(folder: Path, inodes: set[str]) -> bool:
    with contextlib.suppress(OSError):
        for descriptor in (folder / "fd").iterdir():
            with contextlib.suppress(OSError):
                match = _SOCKET.fullmatch(str(descriptor.readlink()))
                if match and match[1] in inodes:
                    return True
    return False


def _name(folder: Path) -> str:
    with contextlib.suppress(OSError):
        return clean((folder / "comm").read_text(errors="replace").rstrip("\n"), 32)
    return ""
