"""Identifies the other end of a client's connection, according to the kernel alone.

Unix sockets have SO_PEERCRED and SO_PEERGROUPS. The other end of a TCP connection over loopback is on this host too,
and the kernel's table of connections shows whose socket it is; only an open socket of a living process counts, because
the kernel shows uid 0 for sockets that nobody holds any more. The kernel is asked for the one row (sock_diag(7)). Where
it cannot be asked, as without AF_NETLINK sockets, the whole table is read (/proc/net/tcp), which lists every connection
of the host. A flood of short connections leaves tens of thousands of rows in it, and each look-up would then take
longer than the next connection of the flood: 32 ms with 19,000 rows, where one question takes 0.03 ms.

In a user namespace, the kernel shows all users that the namespace does not map as one uid. A peer with that uid could
be anybody and is not identified.
"""

import array
import contextlib
import ctypes
import errno
import functools
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from kineto_protos import unix_peer

from kinetod.base.libc import LIBC
from kinetod.permissions.role_policy import Via

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_NLMSG_ERROR = 2
_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr: length, type, flags, sequence, pid
_QUESTION = struct.Struct("=BBBxI")  # struct inet_diag_req_v2 up to its id: family, protocol, extensions, states
_ANSWER = struct.Struct("=BBBB")  # struct inet_diag_msg up to its id: family, state, timer, retransmissions
_PORTS = struct.Struct(">HH")  # struct inet_diag_sockid: source and destination port, then the two addresses
_REST = struct.Struct("=III")  # of the id: interface, cookie
_USER = struct.Struct("=IIIII")  # after the id: expires, receive queue, send queue, uid, inode
_ID_BYTES, _ENDS_BYTES = 48, 36  # the whole id, and the part with its ports and addresses
_MAPPED = bytes(10) + b"\xff\xff"  # ::ffff:0:0/96
_ANY_STATE = 0xFFFFFFFF
_NO_COOKIE = 0xFFFFFFFF
# TCP states in which a process holds the socket and it is connected, even if either end has shut down sending.
CONNECTED = frozenset({1, 4, 5, 8})  # ESTABLISHED, FIN_WAIT1, FIN_WAIT2, CLOSE_WAIT
_ANSWER_BYTES = 4096
_SO_PEERGROUPS = 59  # Linux 4.13
_USUAL_GROUPS, _MAX_GROUPS = 64, 65536
_LOCAL, _REMOTE, _STATE, _UID, _INODE = 1, 2, 3, 7, 9  # columns of /proc/net/tcp
PROC = Path("/proc")
_ALL_MAPPED = ["0", "0", "4294967295"]  # uid_map outside of all user namespaces
LIBC.getsockopt.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint))


@dataclass(frozen=True, slots=True)
class SocketOwner:
    """The user of a connected socket that a living process has open."""

    uid: int
    inode: int


def owner_of(far: tuple[str, int], near: tuple[str, int]) -> SocketOwner | None:
    """The owner of the socket at `far` of a connection to `near`; None if nobody on this host holds it.

    Does not block. Raises OSError if this kernel, or a filter on this process, forbids the query.
    """
    addresses = [ipaddress.ip_address(address) for address, _port in (far, near)]
    family = socket.AF_INET6 if addresses[0].version == 6 else socket.AF_INET
    ports = _PORTS.pack(far[1], near[1])
    ends = [ports + b"".join(each.packed.ljust(16, b"\0") for each in addresses)]
    if family == socket.AF_INET:  # an IPv6 socket may have connected too
        ends.append(ports + b"".join(_MAPPED + each.packed for each in addresses))
    body = _QUESTION.pack(family, socket.IPPROTO_TCP, 0, _ANY_STATE) + ends[0] + _REST.pack(0, _NO_COOKIE, _NO_COOKIE)
    kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    with socket.socket(socket.AF_NETLINK, kind, _NETLINK_SOCK_DIAG) as sock:
        sock.send(_HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0) + body)
        return _owner(sock.recv(_ANSWER_BYTES), ends)


def _owner(answer: bytes, ends: Collection[bytes]) -> SocketOwner | None:
    """Reads the kernel's answer. Raises OSError."""
    with contextlib.suppress(struct.error):
        _length, kind, *_ = _HEADER.unpack_from(answer)
        if kind == _NLMSG_ERROR:
            number = -struct.unpack_from("=i", answer, _HEADER.size)[0]
            if number == errno.ENOENT:
                return None
            raise OSError(number, os.strerror(number))
        _family, state, _timer, _retransmissions = _ANSWER.unpack_from(answer, _HEADER.size)
        start = _HEADER.size + _ANSWER.size
        # A look-up that finds no connection may return the listener at that address.
        if state not in CONNECTED or answer[start : start + _ENDS_BYTES] not in ends:
            return None
        *_, uid, inode = _USER.unpack_from(answer, start + _ID_BYTES)
        return SocketOwner(uid, inode) if inode else None
    raise OSError(errno.EPROTO, os.strerror(errno.EPROTO))


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The other end of a connection. uid is None and gids empty if a certificate or token identifies it."""

    via: Via
    uid: int | None = None
    gids: frozenset[int] = frozenset()
    pid: int | None = None
    address: str = ""

    @property
    def key(self) -> str:
        """Identifies the peer for counting connections."""
        return f"uid {self.uid}" if self.uid is not None else self.address


class UnknownPeer(Exception):
    """The other end cannot be identified; the message says why."""


@functools.cache
def unmapped(kind: str = "uid", proc: Path = PROC) -> int | None:
    """The overflow uid (or gid) for users outside our user namespace; None if all are mapped. Raises OSError."""
    if (proc / f"self/{kind}_map").read_text().split() == _ALL_MAPPED:
        return None
    return int((proc / f"sys/kernel/overflow{kind}").read_text())


def _known(uid: int) -> int:
    """Returns a uid that is mapped here. Raises UnknownPeer, OSError."""
    if uid == unmapped():
        raise UnknownPeer(
            f"the client's user does not exist in the daemon's user namespace (it appears there as uid {uid})"
        )
    return uid


def of_unix(sock: socket.socket) -> Peer:
    """The process that connected, with its main group. Raises OSError, UnknownPeer."""
    pid, uid, gid = unix_peer.credentials(sock)
    return Peer(via=Via.UNIX, uid=_known(uid), gids=frozenset({gid} - {unmapped("gid")}), pid=pid or None)


def with_groups(peer: Peer, sock: socket.socket) -> Peer:
    """The same peer with its supplementary groups."""
    return replace(peer, gids=peer.gids | frozenset(_groups(sock)) - {unmapped("gid")})


def _groups(sock: socket.socket) -> list[int]:
    """Reads the groups without Python's getsockopt, which returns at most 1024 bytes, 256 groups."""
    for most in (_USUAL_GROUPS, _MAX_GROUPS):
        groups = array.array("I", bytes(most * array.array("I").itemsize))
        length = ctypes.c_uint(len(groups) * groups.itemsize)
        address, _ = groups.buffer_info()
        if not LIBC.getsockopt(sock.fileno(), socket.SOL_SOCKET, _SO_PEERGROUPS, address, ctypes.byref(length)):
            return list(groups[: length.value // groups.itemsize])
    return []  # without kernel support the groups are unknown and give no rights


def of_local(near: tuple[str, int], far: tuple[str, int], proc: Path = PROC) -> Peer:
    """The user whose socket is at the `far` end of a TCP connection to `near`. Raises UnknownPeer.

    Blocks where the kernel's whole table has to be read; an event loop tries `of_local_at_once` first.
    """
    return of_local_at_once(near, far) or _local(far, _uid_in_tables(near, far, proc))


def of_local_at_once(near: tuple[str, int], far: tuple[str, int]) -> Peer | None:
    """As `of_local`, without blocking; None if the kernel's whole table has to be read. Raises UnknownPeer."""
    try:
        owner = owner_of(far, near)
    except (OSError, ValueError):
        return None
    return _local(far, None if owner is None else owner.uid)


def _local(far: tuple[str, int], uid: int | None) -> Peer:
    """The peer at `far`. uid: None if nobody has that socket. Raises UnknownPeer."""
    if uid is None:
        raise UnknownPeer("the client has disconnected, or is in another network namespace")
    try:
        return Peer(via=Via.LOOPBACK, uid=_known(uid), address=f"{far[0]}:{far[1]}")
    except OSError as exc:
        raise UnknownPeer(f"the daemon's user namespace cannot be read: {exc}") from exc


def _uid_in_tables(near: tuple[str, int], far: tuple[str, int], proc: Path) -> int | None:
    """The owner of the remote socket, from /proc/net/tcp; None if there is none. Raises UnknownPeer."""
    tables = [("tcp6", (far, near))]
    if ":" not in far[0]:  # an IPv6 socket, as gRPC's are, may have connected too
        mapped = (f"::ffff:{far[0]}", far[1]), (f"::ffff:{near[0]}", near[1])
        tables = [("tcp", (far, near)), ("tcp6", mapped)]
    try:
        for name, (theirs, ours) in tables:
            uid = _uid_in(proc / "self/net" / name, _hexed(theirs), _hexed(ours))
            if uid is not None:
                return uid
    except (OSError, ValueError, IndexError) as exc:
        raise UnknownPeer(f"the kernel's table of connections cannot be read: {exc}") from exc
    return None


def _uid_in(path: Path, theirs: str, ours: str) -> int | None:
    with contextlib.suppress(FileNotFoundError), path.open() as table:  # no IPv6: no table
        for line in table:
            fields = line.split()
            if fields[_LOCAL] == theirs and fields[_REMOTE] == ours and int(fields[_STATE], 16) in CONNECTED:
                return int(fields[_UID]) if fields[_INODE] != "0" else None
    return None


def _hexed(address: tuple[str, int]) -> str:
    """An address as in /proc/net/tcp: 32-bit words in the byte order of the host."""
    packed = ipaddress.ip_address(address[0]).packed
    words = struct.unpack(f">{len(packed) // 4}I", packed)
    text = "".join(struct.pack("<I" if sys.byteorder == "little" else ">I", word).hex().upper() for word in words)
    return f"{text}:{address[1]:04X}"
