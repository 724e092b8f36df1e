"""Whose socket is at the other end of a loopback connection: the kernel's table of connections says so."""

import contextlib
import os
import socket
import sys
from pathlib import Path

_LOCAL, _REMOTE, _STATE, _UID, _INODE = 1, 2, 3, 7, 9  # columns of /proc/net/tcp
_ESTABLISHED = "01"
ROOT_UID = 0

Address = tuple[str, int] | tuple[str, int, int, int]  # of IPv4 or IPv6, as sockets have it


def is_own(near: Address, far: Address, proc: Path = Path("/proc"), uid: int | None = None) -> bool:
    """Whether the program that connected from `far` to `near` is root's or this user's; False if unknown."""
    return owner_of(near, far, proc) in (ROOT_UID, os.getuid() if uid is None else uid)


def owner_of(near: Address, far: Address, proc: Path = Path("/proc")) -> int | None:
    """The uid of the socket at `far`; None if it is closed, or the table cannot be read.

    The sockets of an IPv4 connection may be IPv6 ones.
    """
    theirs, ours = _hexed(far), _hexed(near)
    mapped = "0000000000000000FFFF0000"
    for name, prefix in (("tcp6", ""),) if ":" in near[0] else (("tcp", ""), ("tcp6", mapped)):
        with contextlib.suppress(OSError, ValueError, IndexError), (proc / "self/net" / name).open() as table:
            for line in table:
                fields = line.split()
                if fields[_LOCAL : _STATE + 1] == [prefix + theirs, prefix + ours, _ESTABLISHED]:
                    return int(fields[_UID]) if fields[_INODE] != "0" else None
    return None


def _hexed(address: Address) -> str:
    """An address as in the table: 32-bit words in the byte order of the host."""
    host, port = address[:2]
    data = socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    words = (int.from_bytes(data[at : at + 4], sys.byteorder) for at in range(0, len(data), 4))
    return f"{''.join(f'{word:08X}' for word in words)}:{port:04X}"
