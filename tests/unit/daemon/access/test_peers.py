import errno
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from kinetod.access import peers
from kinetod.access.peers import (
    Peer,
    SocketOwner,
    UnknownPeer,
    of_local,
    of_local_at_once,
    of_unix,
    owner_of,
    unmapped,
    with_groups,
)
from kinetod.permissions.role_policy import Via
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
            peers._owner(answer, [wanted])
    assert peers._owner(struct.pack("=IHHIIi", 20, 2, 0, 1, 0, -2), [wanted]) is None


@pytest.mark.parametrize(
    ("state", "ends", "known"),
    [(1, b"e" * 36, True), (1, b"x" * 36, False), (10, b"e" * 36, False), (10, b"x" * 36, False)],
    ids=["connected", "elsewhere", "listens", "listens elsewhere"],
)
def test_an_answer_counts_if_it_is_of_that_very_connection(state: int, ends: bytes, known: bool) -> None:
    header = struct.pack("=IHHII", 88, peers._SOCK_DIAG_BY_FAMILY, 0, 1, 0)
    rest = ends.ljust(peers._ID_BYTES, b"\0") + peers._USER.pack(*_user(uid=ADA, inode=7))
    found = peers._owner(header + peers._ANSWER.pack(2, state, 0, 0) + rest, [b"e" * 36])
    assert found == (SocketOwner(ADA, 7) if known else None)


def _user(*, uid: int, inode: int) -> list[int]:
    count = len(peers._USER.unpack(bytes(peers._USER.size)))
    return [0] * (count - 2) + [uid, inode]


def test_a_unix_peer_is_known_by_its_process_user_and_groups() -> None:
    ours, _theirs = socket.socketpair()
    peer = with_groups(of_unix(ours), ours)
    assert (peer.via, peer.uid, peer.pid) == (Via.UNIX, os.getuid(), os.getpid())
    assert peer.gids == {os.getgid(), *os.getgroups()}
    for each in (ours, _theirs):
        each.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root may choose groups")
def test_all_groups_of_a_peer_are_known(tmp_path: Path) -> None:
    groups = list(range(70_000, 71_000))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()
        program = f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({str(tmp_path / 's')!r}); s.recv(1)"
        with subprocess.Popen([sys.executable, "-S", "-c", program], extra_groups=groups):
            accepted, _ = server.accept()
            with accepted:
                assert with_groups(of_unix(accepted), accepted).gids == {os.getgid(), *groups}


@pytest.fixture
def no_netlink(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that may not ask the kernel about single connections, as under another service manager's filter."""

    def refuse(*_ends: object) -> None:
        raise PermissionError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))

    monkeypatch.setattr(peers, "owner_of", refuse)


@EACH_FAMILY
def test_a_peer_on_this_host_is_known_by_the_owner_of_its_socket(family: int, listen: str, connect: str) -> None:
    with connected(family, listen, connect) as (client, near, far):
        found = of_local_at_once(near, far)
        assert found is not None and found == of_local(near, far)
        assert found == of_local(near, far, Path("/nowhere"))  # no table is read where the kernel can be asked
        assert (found.via, found.uid) == (Via.LOOPBACK, os.getuid())
        client.close()
        for look in (of_local, of_local_at_once):
            with pytest.raises(UnknownPeer, match="has disconnected"):
                look(near, far)


@EACH_FAMILY
@pytest.mark.usefixtures("no_netlink")
def test_where_the_kernel_cannot_be_asked_its_table_is_read(family: int, listen: str, connect: str) -> None:
    with connected(family, listen, connect) as (client, near, far):
        assert of_local_at_once(near, far) is None
        assert of_local(near, far).uid == os.getuid()
        client.shutdown(socket.SHUT_WR)  # it has said all that it wanted to say
        assert of_local(near, far).uid == os.getuid()
        client.close()
        with pytest.raises(UnknownPeer, match="has disconnected"):
            of_local(near, far)


def row(state: str, uid: int, inode: int) -> str:
    return f"   0: 0100007F:1F90 0100007F:0050 {state} 00000000:00000000 00:00000000 00000000 {uid} 0 {inode} 1\n"


@pytest.mark.parametrize(("state", "inode"), [("01", 0), ("04", 0), ("06", 0), ("02", 5)])
@pytest.mark.usefixtures("no_netlink")
def test_a_socket_that_nobody_holds_is_not_roots(tmp_path: Path, state: str, inode: int) -> None:
    net = tmp_path / "self/net"
    net.mkdir(parents=True)
    (net / "tcp").write_text("  sl  local_address rem_address   st\n" + row(state, 0, inode))
    with pytest.raises(UnknownPeer):
        of_local(("127.0.0.1", 80), ("127.0.0.1", 8080), tmp_path)
    (net / "tcp").write_text("  sl  local_address rem_address   st\n" + row("01", 1000, 5))
    assert of_local(("127.0.0.1", 80), ("127.0.0.1", 8080), tmp_path).uid == 1000


@pytest.mark.usefixtures("no_netlink")
def test_a_row_counts_that_has_both_ends_of_the_connection(tmp_path: Path) -> None:
    net, ours = tmp_path / "self/net", row("01", 1000, 5)
    net.mkdir(parents=True)
    others = (row("01", 0, 6).replace(":1F90", ":1F91"), row("01", 0, 7).replace(":0050", ":0051"))
    (net / "tcp").write_text("  sl  local_address rem_address   st\n" + "".join((*others, ours)))
    assert of_local(("127.0.0.1", 80), ("127.0.0.1", 8080), tmp_path).uid == 1000


def test_a_process_outside_of_our_pid_namespace_has_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kineto_protos.unix_peer.credentials", lambda _sock: (0, 1000, 1000))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert (of_unix(ours).pid, of_unix(ours).uid) == (None, 1000)


IN_A_NAMESPACE = """
import socket, sys
from kinetod.access.peers import UnknownPeer, of_unix
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("ready", flush=True)
for _ in range(2):
    connection, _address = listener.accept()
    try:
        print(of_unix(connection).uid, flush=True)
    except UnknownPeer as exc:
        print(exc, flush=True)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_a_user_whom_the_namespace_does_not_map_is_nobody(tmp_path: Path) -> None:
    path = tmp_path / "s"
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-c", IN_A_NAMESPACE, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        with socket.socket(socket.AF_UNIX) as ours:
            ours.connect(str(path))
            assert server.stdout.readline() == "0\n"
        become = "os.setegid(64123); os.seteuid(64123)"
        program = f"import os, socket; s = socket.socket(socket.AF_UNIX); {become}; s.connect({str(path)!r})"
        path.chmod(0o777)
        for parent in (tmp_path, *tmp_path.parents[:-2]):
            parent.chmod(0o755)
        subprocess.run([sys.executable, "-S", "-c", program], check=True)
        assert (
            server.stdout.readline()
            == "the client's user does not exist in the daemon's user namespace (it appears there as uid 65534)\n"
        )


def test_outside_of_user_namespaces_every_user_has_a_number(tmp_path: Path) -> None:
    for folder in ("self", "sys/kernel"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "self/uid_map").write_text("         0          0 4294967295\n")
    (tmp_path / "self/gid_map").write_text("         0     100000      65536\n")
    (tmp_path / "sys/kernel/overflowgid").write_text("65534\n")
    assert (unmapped("uid", tmp_path), unmapped("gid", tmp_path)) == (None, 65534)


NEAR, FAR = ("127.0.0.1", 80), ("127.0.0.1", 8080)


def test_what_connections_are_counted_by_is_the_user_or_the_address() -> None:
    assert Peer(via=Via.LOOPBACK, uid=0, address="127.0.0.1:5").key == "uid 0"
    assert Peer(via=Via.TLS, address="10.0.0.7").key == "10.0.0.7"


def test_a_peer_over_loopback_whom_the_namespace_does_not_map_is_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "owner_of", lambda *_ends: SocketOwner(65534, 5))
    monkeypatch.setattr(peers, "unmapped", lambda: 65534)
    with pytest.raises(UnknownPeer, match="appears there as uid 65534"):
        of_local_at_once(NEAR, FAR)


def test_a_peer_is_nobody_where_the_namespace_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise PermissionError

    monkeypatch.setattr(peers, "owner_of", lambda *_ends: SocketOwner(1000, 5))
    monkeypatch.setattr(peers, "unmapped", refuse)
    with pytest.raises(UnknownPeer, match="user namespace cannot be read"):
        of_local_at_once(NEAR, FAR)


@pytest.mark.usefixtures("no_netlink")
def test_a_peer_is_nobody_where_the_table_cannot_be_read(tmp_path: Path) -> None:
    net = tmp_path / "self/net"
    net.mkdir(parents=True)
    (net / "tcp").write_text("\n")
    with pytest.raises(UnknownPeer, match="table of connections cannot be read"):
        of_local(NEAR, FAR, tmp_path)
