"""The socket of an attach helper, a service manager's or its own."""

import os
import socket
import stat
from pathlib import Path

import pytest
from kinetod.base.errors import StartError
from kinetod.supervise import helper_service
from kinetod.supervise.helper_service import own_socket, passed_socket


@pytest.mark.parametrize(("for_group", "mode"), [(False, 0o600), (True, 0o660)])
def test_it_is_open_to_its_user_and_to_its_group_only_if_so_said(tmp_path: Path, for_group: bool, mode: int) -> None:
    with own_socket(tmp_path / "attach.sock", for_group=for_group):
        found = (tmp_path / "attach.sock").stat()
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (mode, os.geteuid(), os.getegid())


def test_one_that_was_left_behind_is_made_anew(tmp_path: Path) -> None:
    own_socket(tmp_path / "attach.sock").close()
    with own_socket(tmp_path / "attach.sock", for_group=True):
        assert stat.S_IMODE((tmp_path / "attach.sock").stat().st_mode) == 0o660


def test_another_file_in_its_place_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "attach.sock").write_text("mine")
    with pytest.raises(StartError, match=r"attach\.sock exists but is not a socket"):
        own_socket(tmp_path / "attach.sock")
    assert (tmp_path / "attach.sock").read_text() == "mine"


@pytest.mark.parametrize(
    ("kind", "listens", "count", "found"),
    [
        (socket.SOCK_SEQPACKET, True, "1", True),
        (socket.SOCK_SEQPACKET, True, "", False),
        (socket.SOCK_SEQPACKET, True, "2", "expected one socket from the service manager, but it passed 2"),
        (socket.SOCK_SEQPACKET, False, "1", "expected a listening socket"),
        (socket.SOCK_STREAM, True, "1", "expected a SOCK_SEQPACKET Unix socket"),
        (None, True, "1", "the passed descriptor cannot be used"),
    ],
)
@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # the program ends
def test_a_passed_socket_is_taken_by_whom_it_was_passed_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: int | None, listens: bool, count: str,
    found: bool | str, ours: bool,
) -> None:  # fmt: skip
    with socket.socket(socket.AF_UNIX, kind or socket.SOCK_STREAM) as sock:
        sock.bind(str(tmp_path / "s"))
        if listens:
            sock.listen()
        passed = os.dup(sock.fileno()) if kind is not None else os.memfd_create("no socket")
    os.set_inheritable(passed, True)
    monkeypatch.setattr(helper_service, "FIRST_PASSED", passed)
    for name, value in (("FDS", count), ("PID", str(os.getpid() + (not ours))), ("FDNAMES", "x")):
        monkeypatch.setenv(f"LISTEN_{name}", value)
    if isinstance(found, str) and ours:
        with pytest.raises(StartError, match=found):
            passed_socket()
    elif (listener := passed_socket()) is not None:
        assert (found and ours, listener.get_inheritable()) == (True, False)
        listener.close()
    else:
        assert not (found and ours)
        os.close(passed)
    assert not [name for name in os.environ if name.startswith("LISTEN_")]
