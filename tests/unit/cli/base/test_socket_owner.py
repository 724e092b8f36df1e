"""Whose program is at the other end."""

import os
import socket
from pathlib import Path

import pytest
from kinetoctl.base.socket_owner import is_own, owner_of

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
NEAR, FAR = ("127.0.0.1", 4000), ("127.0.0.1", 50000)


def table(proc: Path, line: str, name: str = "tcp") -> Path:
    (proc / "self/net").mkdir(parents=True, exist_ok=True)
    (proc / "self/net" / name).write_text(HEAD + line)
    return proc


def row(uid: int, *, inode: int = 77, state: str = "01", prefix: str = "") -> str:
    addresses = f"{prefix}0100007F:C350 {prefix}0100007F:0FA0"
    return f"   0: {addresses} {state} 00000000:00000000 00:00000000 00000000  {uid}        0 {inode} 1 0\n"


def test_the_kernel_says_whose_a_real_connection_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        connection, far = server.accept()
        with connection:
            assert owner_of(connection.getsockname(), far) == os.getuid()
            assert is_own(connection.getsockname(), client.getsockname())


def test_the_kernel_says_whose_a_connection_over_ipv6_is() -> None:
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("needs the IPv6 loopback address")
    with server, socket.create_connection(server.getsockname()[:2]):
        connection, far = server.accept()
        with connection:
            assert owner_of(connection.getsockname(), far) == os.getuid()


@pytest.mark.parametrize(("uid", "expected"), [(1000, True), (0, True), (1001, False), (65534, False)])
def test_only_this_user_and_root_are_own(tmp_path: Path, uid: int, expected: bool) -> None:
    assert is_own(NEAR, FAR, table(tmp_path, row(uid)), uid=1000) is expected


@pytest.mark.parametrize("line", ["", row(1000, inode=0), row(1000, state="06"), "garbage\n"])
def test_a_connection_that_the_table_does_not_have_is_nobodys(tmp_path: Path, line: str) -> None:
    assert not is_own(NEAR, FAR, table(tmp_path, line), uid=1000)


def test_without_a_table_nobody_is_own(tmp_path: Path) -> None:
    assert not is_own(NEAR, FAR, tmp_path, uid=1000)


def test_without_a_named_user_own_is_who_runs_this_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    assert is_own(NEAR, FAR, table(tmp_path, row(1000)))
    assert not is_own(NEAR, FAR, table(tmp_path, row(1001)))
    assert not is_own(NEAR, FAR, table(tmp_path, ""))


def test_a_client_may_use_an_ipv6_socket(tmp_path: Path) -> None:
    mapped = row(1000, prefix="0000000000000000FFFF0000")
    assert is_own(NEAR, FAR, table(tmp_path, mapped, "tcp6"), uid=1000)
