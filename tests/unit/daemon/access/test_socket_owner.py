"""The kernel says whose socket is at the other end of a connection."""

import os
import socket
import struct
import subprocess
import sys

import pytest
from kinetod.access import socket_owner
from kinetod.access.peers import UnknownPeer, of_local
from kinetod.access.socket_owner import SocketOwner, owner_of
from support.machine.loopback import EACH_FAMILY, connected
from support.service.daemon import as_user

ADA = 61001


@EACH_FAMILY
def test_the_owner_of_a_connected_socket_is_known_until_nobody_has_it(family: int, listen: str, connect: str) -> None:
    with connected(family, listen, connect) as (client, near, far):
        inode = os.fstat(client.fileno()).st_ino
        assert owner_of(far, near) == SocketOwner(os.getuid(), inode)
        client.shutdown(socket.SHUT_WR)  # it has said all that it wanted to say
        assert owner_of(far, near) == SocketOwner(os.getuid(), inode)
        assert of_local(near, far).uid == os.getuid()
        client.close()
        assert owner_of(far, near) is None
        with pytest.raises(UnknownPeer, match="has disconnected"):
            of_local(near, far)


def test_who_only_listens_at_an_address_has_not_connected() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        assert owner_of(address, ("127.0.0.1", 1)) is None


@pytest.mark.skipif(os.getuid() != 0, reason="users are played by root")
def test_another_users_socket_is_that_users() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = f"import socket; s = socket.create_connection({server.getsockname()!r}); s.recv(1)"
        with subprocess.Popen([*as_user(ADA), sys.executable, "-S", "-c", program], cwd="/"):
            accepted, _ = server.accept()
            with accepted:
                found = owner_of(accepted.getpeername(), accepted.getsockname())
    assert found is not None and found.uid == ADA


def test_an_answer_that_is_none_is_an_error() -> None:
    wanted = bytes(36)
    refused = struct.pack("=IHHIIi", 20, 2, 0, 1, 0, -1)
    for answer in (b"", refused[:10], struct.pack("=IHHII", 20, 20, 0, 1, 0), refused):
        with pytest.raises(OSError):
            socket_owner._owner(answer, [wanted])
    assert socket_owner._owner(struct.pack("=IHHIIi", 20, 2, 0, 1, 0, -2), [wanted]) is None


@pytest.mark.parametrize(
    ("state", "ends", "known"),
    [(1, b"e" * 36, True), (1, b"x" * 36, False), (10, b"e" * 36, False), (10, b"x" * 36, False)],
    ids=["connected", "elsewhere", "listens", "listens elsewhere"],
)
def test_an_answer_counts_if_it_is_of_that_very_connection(state: int, ends: bytes, known: bool) -> None:
    header = struct.pack("=IHHII", 88, socket_owner._SOCK_DIAG_BY_FAMILY, 0, 1, 0)
    rest = ends.ljust(socket_owner._ID_BYTES, b"\0") + socket_owner._USER.pack(*_user(uid=ADA, inode=7))
    found = socket_owner._owner(header + socket_owner._ANSWER.pack(2, state, 0, 0) + rest, [b"e" * 36])
    assert found == (SocketOwner(ADA, 7) if known else None)


def _user(*, uid: int, inode: int) -> list[int]:
    count = len(socket_owner._USER.unpack(bytes(socket_owner._USER.size)))
    return [0] * (count - 2) + [uid, inode]
