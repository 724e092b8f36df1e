"""Asks the kernel through sock_diag(7) for the owner of one end of a TCP connection, in one look-up.

/proc/net/tcp has the same data, but lists every connection of the host. A flood of short connections leaves tens of
thousands of rows in it, and each look-up would then take longer than the next connection of the flood: 32 ms with
19,000 rows, where one question takes 0.03 ms.
"""

import contextlib
import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Collection
from dataclasses import dataclass

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
