"""Whose a Unix socket is: nothing is said to a daemon of somebody else, nor where somebody else could put one."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from kineto_agent.control import link
from kineto_protos import endpoints
from kinetoctl import errors
from kinetoctl.app import cli
from kinetoctl.client.daemon_client import Client
from kinetoctl.client.socket_folder import SocketFolder
from kinetoctl.exit_codes import ExitCode
from support.service.fake_profiler import FakeProfiler, serve

OTHER = 64_123
LARGEST_UID = 2**32 - 2
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
LISTEN = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("ready", flush=True)
sys.stdin.read()
connection, _ = listener.accept()
connection.setblocking(False)
try:
    print(len(connection.recv(1000)))
except BlockingIOError:
    print("silent")
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """It and the one that it is in may be entered by every user; pytest's folders may not: each pytest closes them."""
    with tempfile.TemporaryDirectory(prefix="kinetoctl-") as above:
        made = Path(above) / "kineto"
        made.mkdir()
        for each in (made, made.parent):
            each.chmod(0o755)
        yield made


@contextlib.contextmanager
def program_of(uid: int, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A program of another user that listens at folder/kinetod.sock; the folder is its user's meanwhile."""
    os.chown(folder, uid, uid)
    command = [sys.executable, "-c", LISTEN, str(folder / "kinetod.sock"), str(uid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
        process.kill()


@pytest.fixture
def foreign(folder: Path) -> Iterator[subprocess.Popen[str]]:
    with program_of(OTHER, folder) as process:
        yield process


def listening(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


@needs_root
def test_nothing_is_sent_to_a_socket_in_somebody_elses_folder(folder: Path, foreign: subprocess.Popen[str]) -> None:
    address = f"unix:{folder}/kinetod.sock"
    with Client(address) as client, pytest.raises(errors.UntrustedSocket) as caught:
        client.host()
    assert str(caught.value) == (f"nothing was sent to {address}: {folder} belongs to uid {OTHER}, not to root or you")
    assert caught.value.exit_code == ExitCode.DENIED
    assert foreign.poll() is None


@needs_root
def test_nothing_is_sent_to_somebody_elses_program_in_ones_own_folder(
    folder: Path, foreign: subprocess.Popen[str]
) -> None:
    os.chown(folder, 0, 0)  # it was somebody else's when the socket was made
    with (
        Client(f"unix:{folder}/kinetod.sock") as client,
        pytest.raises(errors.UntrustedSocket, match=r"uid \d+ listens there"),
    ):
        client.host()
    assert foreign.communicate("")[0] == "0\n"  # it was connected to, and let go: not one byte


@needs_root
def test_a_user_with_the_largest_uid_is_known_and_named(folder: Path) -> None:
    folder.parent.chmod(0o755)
    with program_of(LARGEST_UID, folder):
        path = str(folder / "kinetod.sock")
        SocketFolder(path, run=folder.parent).close()
        SocketFolder(path, uid=LARGEST_UID).close()
        os.chown(folder, 0, 0)
        with pytest.raises(errors.UntrustedSocket, match=f"uid {LARGEST_UID} listens there"):
            SocketFolder(path)


@needs_root
def test_a_user_to_whom_root_gave_a_folder_in_run_is_known(folder: Path, foreign: subprocess.Popen[str]) -> None:
    folder.parent.chmod(0o755)
    assert foreign.poll() is None
    SocketFolder(str(folder / "kinetod.sock"), run=folder.parent).close()


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_folder_where_others_can_put_sockets_is_refused(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    with listening(folder / "kinetod.sock"), pytest.raises(errors.UntrustedSocket, match="other than its owner can"):
        SocketFolder(str(folder / "kinetod.sock"))


def test_a_link_is_followed_before_the_folder_is_looked_at(folder: Path, tmp_path: Path) -> None:
    folder.chmod(0o777)
    (tmp_path / "mine.sock").symlink_to(folder / "kinetod.sock")
    with listening(folder / "kinetod.sock"), pytest.raises(errors.UntrustedSocket):
        SocketFolder(str(tmp_path / "mine.sock"))


def test_a_folder_that_takes_the_place_of_the_one_looked_at_gets_nothing(folder: Path) -> None:
    with serve(FakeProfiler()) as server:
        real = Path(server.address.removeprefix("unix:"))
        (folder / "kinetod.sock").symlink_to(real)
        looked_at = SocketFolder(str(folder / "kinetod.sock"))
        real.parent.rename(real.parent.with_name(f"{real.parent.name}-away"))
        real.parent.mkdir()
        try:
            assert not looked_at.is_there()
            with listening(real) as squatter:
                squatter.setblocking(False)
                with socket.socket(socket.AF_UNIX) as connection:
                    connection.connect(looked_at.address.removeprefix("unix:"))  # the old folder's
                with pytest.raises(BlockingIOError):
                    squatter.accept()
        finally:
            looked_at.close()
            real.unlink()
            real.parent.rmdir()
            real.parent.with_name(f"{real.parent.name}-away").rename(real.parent)


def test_a_daemon_that_made_its_folder_anew_is_found_by_the_same_client(folder: Path) -> None:
    with serve(FakeProfiler()) as first, serve(FakeProfiler()) as second:
        path = folder / "kinetod.sock"
        path.symlink_to(first.address.removeprefix("unix:"))
        with Client(f"unix:{path}") as client:
            client.host()
            path.unlink()
            path.symlink_to(second.address.removeprefix("unix:"))
            client.host()
    assert len(first.profiler.requests) == 1 and len(second.profiler.requests) == 1


@needs_root
def test_a_squatted_folder_does_not_hide_the_hosts_daemon(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = tmp_path / "run/kineto"
    run.mkdir(parents=True)
    for place in (run, folder):
        (place / "kinetod.sock").touch()
    monkeypatch.setattr(endpoints, "SYSTEM_RUNTIME_DIR", run)
    environ = {"XDG_RUNTIME_DIR": str(folder.parent)}
    assert endpoints.rpc_address(environ, 1000) == f"unix:{run}/kinetod.sock"
    os.chown(folder, 1000, 1000)
    assert endpoints.rpc_address(environ, 1000) == f"unix:{folder}/kinetod.sock"


@needs_root
def test_kinetoctl_and_the_agent_know_the_same_users(folder: Path) -> None:
    os.chown(folder, OTHER, OTHER)
    for mode in (0o755, 0o777):
        folder.parent.chmod(mode)
        for uid in (0, OTHER):
            path = folder / "kinetod.sock"
            agent = link.vouched_for(str(path), uid, str(folder.parent))
            assert endpoints.vouched_for(path, uid, folder.parent) == agent == (mode == 0o755 and uid == OTHER)


@needs_root
def test_the_command_says_what_to_do(folder: Path, foreign: subprocess.Popen[str]) -> None:
    assert foreign.poll() is None
    result = CliRunner().invoke(cli, ["--address", f"unix:{folder}/kinetod.sock", "ps"])
    assert isinstance(result.exception, errors.UntrustedSocket)
    assert "--address names another" in result.exception.help_text
