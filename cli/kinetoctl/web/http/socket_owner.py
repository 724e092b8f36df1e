"""Whose socket is at the other end of a loopback connection: the kernel's table of connections says so."""

import contextlib
import os
import sys
from pathlib import Path

_LOCAL, _REMOTE, _STATE, _UID, _INODE = 1, 2, 3, 7, 9  # columns of /proc/net/tcp
_ESTABLISHED = "01"
ROOT_UID = 0


def is_own(near: tuple[str, int], far: tuple[str, int], proc: Path = Path("/proc"), uid: int | None = None) -> bool:
    """Whether the program that connected from `far` to `near` (IPv4) is root's or this user's; False if unknown."""
    owner = owner_of(near, far, proc)
    return owner is not None and owner in (ROOT_UID, os.getuid() if uid is None else uid)


def owner_of(near: tuple[str, int], far: tuple[str, int], proc: Path = Path("/proc")) -> int | None:
    """The uid of the socket at `far`; None if it is closed, or the table cannot be read. Sockets may be IPv6 too."""
    theirs, ours = _hexed(far), _hexed(near)
    mapped = "0000000000000000FFFF0000"
    for name, prefix in (("tcp", ""), ("tcp6", mapped)):
        with contextlib.suppress(OSError, ValueError, IndexError), (proc / "self/net" / name).open() as table:
            for line in table:
                fields = line.split()
                if fields[_LOCAL : _STATE + 1] == [prefix + theirs, prefix + ours, _ESTABLISHED]:
                    return int(fields[_UID]) if fields[_INODE] != "0" else None
    return None


def _hexed(address: tuple[str, int]) -> str:
    """An address as in the table: a 32-bit word in the byte order of the host."""
    host, port = address
    word = int.from_bytes(bytes(map(int, host.split("."))), sys.byteorder)
    return f"{word:08X}:{port:04X}"
