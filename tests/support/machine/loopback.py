"""Connected pairs of sockets of this host, over both families."""

import contextlib
import socket
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

EACH_FAMILY = pytest.mark.parametrize(
    ("family", "listen", "connect"),
    [
        (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
        (socket.AF_INET6, "::1", "::1"),
        (socket.AF_INET6, "127.0.0.1", "::ffff:127.0.0.1"),
    ],
)


class Pair(NamedTuple):
    """The client's socket, and the addresses of both ends as the server sees them."""

    client: socket.socket
    near: tuple[Any, ...]
    far: tuple[Any, ...]


@contextlib.contextmanager
def connected(family: int, listen: str, connect: str) -> Iterator[Pair]:
    """A client of this family that has connected there."""
    own_family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    with socket.create_server((listen, 0), family=own_family) as server, socket.socket(family) as client:
        client.connect((connect, server.getsockname()[1]))
        accepted, _ = server.accept()
        with accepted:
            yield Pair(client, accepted.getsockname()[:2], accepted.getpeername()[:2])
