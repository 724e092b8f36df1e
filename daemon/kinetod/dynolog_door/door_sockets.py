"""The sockets at which clients of Dynolog connect. "localhost" is both 127.0.0.1 and ::1, as far as the host has them.

A port that another process listens on is not shared. What is refused then is the whole door: a client that names
localhost must not reach Dynolog by one family and this daemon by the other.
"""

import errno
import socket
from collections.abc import Iterator

from kinetod.access.connections.connection_proxy import bound_unix
from kinetod.config.addresses import ListenAddress

BACKLOG = 1024
_LOCALHOST = ("127.0.0.1", "::1")
_ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # a host without IPv6


class PortTaken(Exception):
    """Somebody else listens at this address."""


def listening(address: ListenAddress, socket_mode: int) -> list[socket.socket]:
    """Non-blocking sockets that listen at an address. Raises PortTaken, OSError, StartError."""
    if address.path is not None:
        return [bound_unix(address.path, socket_mode)]
    sockets: list[socket.socket] = []
    try:
        for host in _hosts(address):
            try:
                sockets.append(_bound(host, address.port))
            except OSError as exc:
                if exc.errno not in _ABSENT or address.host != "localhost":
                    raise
        if not sockets:
            raise OSError(errno.EADDRNOTAVAIL, "this host has no loopback address")
    except OSError as exc:
        for sock in sockets:
            sock.close()
        if exc.errno == errno.EADDRINUSE:
            raise PortTaken(str(address)) from exc
        raise
    return sockets


def _hosts(address: ListenAddress) -> Iterator[str]:
    yield from _LOCALHOST if address.host == "localhost" else (address.host,)


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock
