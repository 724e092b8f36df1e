import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from kinetod.access.peers import Unidentified, of_loopback, of_unix, with_groups
from kinetod.access.policy import Via


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


@pytest.mark.parametrize(
    ("family", "listen", "connect"),
    [
        (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
        (socket.AF_INET6, "::1", "::1"),
        (socket.AF_INET6, "127.0.0.1", "::ffff:127.0.0.1"),
    ],
)
def test_a_loopback_peer_is_known_by_the_owner_of_its_socket(family: int, listen: str, connect: str) -> None:
    own_family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    with socket.create_server((listen, 0), family=own_family) as server, socket.socket(family) as client:
        client.connect((connect, server.getsockname()[1]))
        accepted, _ = server.accept()
        with accepted:
            near, far = accepted.getsockname()[:2], accepted.getpeername()[:2]
            assert of_loopback(near, far).uid == os.getuid()
            client.close()
            with pytest.raises(Unidentified, match="has hung up"):
                of_loopback(near, far)


def row(state: str, uid: int, inode: int) -> str:
    return f"   0: 0100007F:1F90 0100007F:0050 {state} 00000000:00000000 00:00000000 00000000 {uid} 0 {inode} 1\n"


@pytest.mark.parametrize(("state", "inode"), [("01", 0), ("04", 5), ("06", 0)])
def test_a_socket_that_nobody_holds_is_not_roots(tmp_path: Path, state: str, inode: int) -> None:
    net = tmp_path / "self/net"
    net.mkdir(parents=True)
    (net / "tcp").write_text("  sl  local_address rem_address   st\n" + row(state, 0, inode))
    with pytest.raises(Unidentified):
        of_loopback(("127.0.0.1", 80), ("127.0.0.1", 8080), tmp_path)
    (net / "tcp").write_text("  sl  local_address rem_address   st\n" + row("01", 1000, 5))
    assert of_loopback(("127.0.0.1", 80), ("127.0.0.1", 8080), tmp_path).uid == 1000
