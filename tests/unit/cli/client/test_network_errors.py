"""Addresses where no daemon answers: one sentence that says why and what to do, and nothing from gRPC's own log."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from kinetoctl.client.network_errors import explanation
from support.peers.certificates import Authority
from support.service.cli import environment, run_process
from support.service.daemon import free_address
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
        == "nothing listens there (connection refused); start kinetod there, or check host and port"
    )


def test_a_web_server_is_not_taken_for_a_daemon() -> None:
    with served(lambda connection: connection.sendall(GREETING)) as address:
        assert problem(address) == "another server than kinetod answers there; check the port"


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
    assert told == "the server's certificate is for another name; use the name that is in the certificate"
    told = problem(f"localhost:{port}", **variables(tmp_path, authority, stranger))
    assert told == "it closed the connection; it may not accept the certificate in KINETO_TLS_CERT"


def test_a_name_that_nobody_knows_is_said_to_be_so(authority: Authority, tmp_path: Path) -> None:
    told = problem("no-such-host.invalid:1", **variables(tmp_path, authority, authority))
    assert told == "no host is known by this name; check the name"


def test_a_text_that_is_not_known_stays_as_it_is() -> None:
    assert explanation("a new failure", tls=True) == "a new failure"


def test_without_certificates_nothing_is_claimed_about_a_host_that_was_not_asked() -> None:
    result = run_process(["ps", "--address", "no-such-host.invalid:1"], environment())
    assert (result.code, result.stdout) == (2, "")
    assert result.stderr.startswith(
        "error: a connection to no-such-host.invalid:1 requires certificates: "
        "set KINETO_TLS_CA, KINETO_TLS_CERT, KINETO_TLS_KEY to PEM files, or forward"
    )
