import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from kinetod.access import peers
from kinetod.access.peers import UnknownPeer, of_local, of_local_at_once, of_unix, unmapped, with_groups
from kinetod.permissions.role_policy import Via
from support.machine.loopback import EACH_FAMILY, connected


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
            == "its user does not exist in the daemon's user namespace (it appears there as uid 65534)\n"
        )


def test_outside_of_user_namespaces_every_user_has_a_number(tmp_path: Path) -> None:
    for folder in ("self", "sys/kernel"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "self/uid_map").write_text("         0          0 4294967295\n")
    (tmp_path / "self/gid_map").write_text("         0     100000      65536\n")
    (tmp_path / "sys/kernel/overflowgid").write_text("65534\n")
    assert (unmapped("uid", tmp_path), unmapped("gid", tmp_path)) == (None, 65534)
