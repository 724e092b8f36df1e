"""Addresses where no daemon answers: one sentence that says why and what to do, and nothing from gRPC's own log."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner
from kineto_agent.control import link
from kineto_protos import endpoints
from kinetoctl import errors
from kinetoctl.app import cli
from kinetoctl.client.channel import SocketFolder, explanation
from kinetoctl.client.daemon_client import Client
from kinetoctl.exit_codes import ExitCode
from support.peers.certificates import Authority
from support.service.cli import environment, run_process
from support.service.daemon import free_address
from support.service.fake_profiler import FakeProfiler, serve
from support.waiting import scaled_option

GREETING = b"HTTP/1.1 400 Bad Request\r\n\r\n"


@contextmanager
def served(handler: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of a server that handles each connection so, and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            while True:
                try:
                    with server.accept()[0] as connection:
                        handler(connection)
                except OSError:
                    if server.fileno() < 0 or stopped.is_set():
                        return

        stopped = threading.Event()
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        stopped.set()
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def port(authority: Authority) -> Iterator[int]:
    """The port of a gRPC server that demands certificates of this authority; its own is for localhost."""
    pair = authority.issue("kinetod", dns="localhost")
    server = grpc.server(ThreadPoolExecutor(1))
    credentials = grpc.ssl_server_credentials([(pair.key, pair.certificate)], authority.certificate, True)
    bound = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    yield bound
    server.stop(None)


def variables(folder: Path, trusted: Authority, own: Authority) -> dict[str, str]:
    """Variables for a client that trusts one authority and has a certificate of another."""
    pair = own.issue("client")
    files = {"CA": trusted.certificate, "CERT": pair.certificate, "KEY": pair.key}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return {f"KINETO_TLS_{name}": str(folder / name) for name in files}


def problem(address: str, **given: str) -> str:
    result = run_process(["--address", address, "--timeout", scaled_option(20), "host"], environment(**given))
    assert (result.code, result.stdout) == (7, "")
    first, advice = result.stderr.split("\n", 1)
    assert advice.startswith("Start a daemon with `kinetod`")
    return first.removeprefix(f"error: no daemon at {address}: ")


def test_a_port_where_nothing_listens_is_said_to_be_so() -> None:
    assert (
        problem(free_address())
        == "nothing is listening there (connection refused); start kinetod there, or check the host and port"
    )


def test_a_web_server_is_not_taken_for_a_daemon() -> None:
    with served(lambda connection: connection.sendall(GREETING)) as address:
        assert problem(address) == "a server other than kinetod answers there; check the port"


def test_a_port_with_tls_asks_for_certificates(port: int) -> None:
    variables = "KINETO_TLS_CA, KINETO_TLS_CERT and KINETO_TLS_KEY"
    told = problem(f"localhost:{port}")
    assert told == f"it closed the connection; if it expects TLS, set {variables} to PEM files"


def test_a_port_without_tls_is_told_from_one_with(authority: Authority, tmp_path: Path) -> None:
    with served(lambda connection: connection.sendall(GREETING)) as address:
        told = problem(address, **variables(tmp_path, authority, authority))
    assert told.startswith("the server does not speak TLS, but certificates are configured here; unset KINETO_TLS_CA")


def test_certificates_that_do_not_fit_are_told_apart(port: int, authority: Authority, tmp_path: Path) -> None:
    stranger = Authority("stranger")
    told = problem(f"localhost:{port}", **variables(tmp_path, stranger, authority))
    assert told.startswith("the server's certificate is not signed by an authority in KINETO_TLS_CA; set ")
    told = problem(f"127.0.0.1:{port}", **variables(tmp_path, authority, authority))
    assert told == "the server's certificate is for another name; use the name in the certificate"
    told = problem(f"localhost:{port}", **variables(tmp_path, authority, stranger))
    assert told == "it closed the connection; it might not accept the certificate in KINETO_TLS_CERT"


def test_a_name_that_nobody_knows_is_said_to_be_so(authority: Authority, tmp_path: Path) -> None:
    told = problem("no-such-host.invalid:1", **variables(tmp_path, authority, authority))
    assert told == "unknown host name; check the name"


def test_a_text_that_is_not_known_stays_as_it_is() -> None:
    assert explanation("a new failure", tls=True) == "a new failure"


def test_without_certificates_nothing_is_claimed_about_a_host_that_was_not_asked() -> None:
    result = run_process(["ps", "--address", "no-such-host.invalid:1"], environment())
    assert (result.code, result.stdout) == (2, "")
    assert result.stderr.startswith(
        "error: a connection to no-such-host.invalid:1 requires certificates: "
        "set KINETO_TLS_CA, KINETO_TLS_CERT, KINETO_TLS_KEY to PEM files, or forward"
    )


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
        pytest.raises(errors.UntrustedSocket, match=r"uid \d+ is listening there"),
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
        with pytest.raises(errors.UntrustedSocket, match=f"uid {LARGEST_UID} is listening there"):
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
    assert "Use --address to name another" in result.exception.help_text
