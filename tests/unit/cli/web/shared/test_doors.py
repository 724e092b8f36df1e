"""The doors without a daemon: who is let in, and what a client cannot hold up."""

import contextlib
import datetime
import os
import socket
import ssl
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from kinetoctl.errors import Refused
from kinetoctl.web.http.request_handler import REQUEST_S
from kinetoctl.web.http.web_messages import WebAnswer, WebRequest
from kinetoctl.web.shared.doors import (
    MAX_HEAD_BYTES,
    MAX_OF_USER,
    PageUser,
    ProxyEntrance,
    SharedSite,
    TlsEntrance,
    UnknownUser,
    WebDoor,
    WebEntrance,
    WebTlsFiles,
    listening_tcp,
    listening_unix,
    of_certificate,
    of_header,
    of_tls,
)
from support.peers.certificates import Authority
from support.waiting import scaled, until


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def hello(request: WebRequest, user: PageUser) -> WebAnswer:
    if request.path == "/broken":
        raise ValueError("/home/somebody/secret")
    return WebAnswer(content=f"{user} {request.method} {request.path} {request.form}".encode())


SITE = SharedSite(origin="https://web.example", policy="default-src 'none'", application=hello)


@contextlib.contextmanager
def serving(listening: socket.socket, entrance: WebEntrance, clock: Clock | None = None) -> Iterator[WebDoor]:
    with WebDoor(listening, entrance, SITE, clock or Clock()) as door:
        thread = threading.Thread(target=door.serve)
        thread.start()
        try:
            yield door
        finally:
            door.shutdown()
            thread.join()


@contextlib.contextmanager
def proxied(clock: Clock | None = None, uid: int | None = None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kw-") as folder:
        path = Path(folder) / "s"
        uids = {os.geteuid() if uid is None else uid}
        with serving(listening_unix(path), ProxyEntrance(uids, "X-Remote-User"), clock):
            yield path


@contextlib.contextmanager
def connected(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(scaled(30))
        sock.connect(str(path))
        yield sock


def head(line: str, *more: str) -> bytes:
    return "\r\n".join((line, "Host: web.example", *more, "", "")).encode()


def everything(sock: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def answered(path: Path, sent: bytes) -> bytes:
    with connected(path) as sock:
        with contextlib.suppress(OSError):  # the other end may have closed before it read anything
            sock.sendall(sent)
            sock.shutdown(socket.SHUT_WR)
        return everything(sock)


NAMED = "X-Remote-User: ada"
FORM = ("Origin: https://web.example", "Content-Type: application/x-www-form-urlencoded")


def test_requests_follow_each_other_on_one_connection() -> None:
    with proxied() as path:
        found = answered(path, head("GET /a HTTP/1.1", NAMED) + head("GET /b HTTP/1.1", "x-remote-user: bea"))
    assert b"ada GET /a" in found and b"bea GET /b" in found
    assert found.count(b"Content-Security-Policy: default-src 'none'") == 2


def test_a_form_arrives_whole() -> None:
    with proxied() as path:
        found = answered(path, head("POST /f HTTP/1.1", NAMED, *FORM, "Content-Length: 7") + b"a=1&b=2")
    assert b"ada POST /f (('a', '1'), ('b', '2'))" in found


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (head("GET / HTTP/1.1"), 403),
        (head("GET / HTTP/1.1", NAMED, NAMED), 403),
        (head("GET / HTTP/1.1", NAMED, "Host: evil.example"), 400),
        (b"GET / HTTP/1.1\r\nHost: evil.example\r\nX-Remote-User: ada\r\n\r\n", 421),
        (b"GET / HTTP/1.1\r\nX-Remote-User: ada\r\n\r\n", 400),
        (head("GET / HTTP/1.1", NAMED, "Content-Length: 3") + b"abc", 400),
        (head("GET / HTTP/1.1", NAMED, "Transfer-Encoding: chunked", "Content-Length: 3") + b"abc", 400),
        (head("POST / HTTP/1.1", NAMED, *FORM, "Transfer-Encoding: chunked") + b"0\r\n\r\n", 411),
        (head("POST / HTTP/1.1", NAMED, *FORM, "Content-Length: 70000"), 413),
        (head("POST / HTTP/1.1", NAMED, "Origin: https://evil.example", FORM[1], "Content-Length: 1") + b"a", 403),
        (head("PUT / HTTP/1.1", NAMED), 405),
        (head("GET /broken HTTP/1.1", NAMED), 500),
        (head("GET / HTTP/1.1", f"X: {'x' * 4 * MAX_HEAD_BYTES}"), 431),
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost : web.example\r\nX-Remote-User: ada\r\n\r\n", 400),
    ],
)
def test_what_is_no_good_request_is_answered_once_and_shortly(sent: bytes, status: int) -> None:
    with proxied() as path:
        found = answered(path, sent + head("GET /next HTTP/1.1", NAMED) * (status not in (403, 405, 421, 500)))
    assert found.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"/next" not in found and b"secret" not in found


def test_only_the_configured_proxies_are_read() -> None:
    with proxied(uid=os.geteuid() + 61_000) as path:
        assert answered(path, head("GET / HTTP/1.1", NAMED)) == b""


def test_who_is_refused_all_the_time_is_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    entrance = ProxyEntrance({os.geteuid() + 61_000}, "X-Remote-User", clock)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for clock.now in (0.0, 1.0, 59.0, 61.0):
            assert entrance.key(ours, None) is None
    assert [record.message for record in caplog.records] == [
        f"closed a connection from uid {os.geteuid()}, which is not one of the proxies"
    ] * 2


def test_a_request_that_drips_is_cut() -> None:
    clock = Clock()
    with proxied(clock) as path, connected(path) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nX: ")
        sock.settimeout(0.05)

        def cut() -> bool:
            clock.now += 0.4 * REQUEST_S
            try:
                sock.sendall(b"x")
                return not sock.recv(1 << 16)
            except TimeoutError:
                return False
            except (BrokenPipeError, ConnectionResetError):
                return True

        until(cut, "the connection is cut, however often a byte comes")


def test_a_socket_of_an_earlier_server_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(Refused):
        listening_unix(file)
    with tempfile.TemporaryDirectory(prefix="kw-") as folder:
        for _ in range(2):
            listening_unix(Path(folder) / "s").close()


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def files(tmp_path: Path, authority: Authority) -> WebTlsFiles:
    server = authority.issue(dns="localhost")
    for name, pem in (("s", server.certificate), ("k", server.key), ("ca", authority.certificate)):
        (tmp_path / name).write_bytes(pem)
    return WebTlsFiles(certificate=tmp_path / "s", key=tmp_path / "k", client_ca=tmp_path / "ca")


@contextlib.contextmanager
def secure(files: WebTlsFiles, authority: Authority, port: int, name: str = "ada") -> Iterator[ssl.SSLSocket]:
    context = ssl.create_default_context(cadata=authority.certificate.decode())
    pair, path = authority.issue(name), files.key.with_name("client")
    path.write_bytes(pair.certificate + pair.key)
    context.load_cert_chain(path)
    plain = socket.create_connection(("127.0.0.1", port), scaled(30))
    with plain, context.wrap_socket(plain, server_hostname="localhost") as sock:
        yield sock


def test_clients_that_say_nothing_hold_up_nobody(files: WebTlsFiles, authority: Authority) -> None:
    clock = Clock()
    with serving(listening_tcp("127.0.0.1", 0), TlsEntrance(files, "X-Remote-User"), clock) as door:
        port = door.server_address[1]
        silent = [socket.create_connection(("127.0.0.1", port), scaled(30)) for _ in range(40)]
        with secure(files, authority, port) as sock:
            sock.sendall(head("GET /a HTTP/1.1", "Connection: close"))
            assert b"CN:ada GET /a" in everything(sock)
        clock.now = REQUEST_S + 1
        for each in silent:
            with each:
                assert everything(each) == b""


def test_plain_http_gets_nothing(files: WebTlsFiles) -> None:
    with (
        serving(listening_tcp("127.0.0.1", 0), TlsEntrance(files, "X-Remote-User")) as door,
        socket.create_connection(("127.0.0.1", door.server_address[1]), scaled(30)) as sock,
    ):
        sock.sendall(head("GET / HTTP/1.1", NAMED))
        assert b"HTTP" not in everything(sock)


def test_one_certificate_has_so_many_connections(files: WebTlsFiles, authority: Authority) -> None:
    with serving(listening_tcp("127.0.0.1", 0), TlsEntrance(files, "X-Remote-User")) as door:
        port = door.server_address[1]
        with contextlib.ExitStack() as stack:
            for _ in range(MAX_OF_USER):
                stack.enter_context(secure(files, authority, port))
            until(lambda: sum(door._of_user.values()) == MAX_OF_USER, "all are counted")
            with contextlib.suppress(OSError), secure(files, authority, port) as sock:
                sock.sendall(head("GET /a HTTP/1.1", "Connection: close"))
                assert everything(sock) == b""
            with secure(files, authority, port, "bea") as sock:
                sock.sendall(head("GET /a HTTP/1.1", "Connection: close"))
                assert b"CN:bea" in everything(sock)


def test_renewed_certificates_are_taken_and_damaged_ones_are_not(
    files: WebTlsFiles, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    entrance = TlsEntrance(files, "X-Remote-User")
    before = entrance._current()
    locked = serialization.load_pem_private_key(files.key.read_bytes(), None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    for number, content in enumerate((b"nonsense", locked), 1):
        files.key.write_bytes(content)
        for _ in range(3):  # a passphrase is never asked for
            entrance._looked_s = -60.0
            assert entrance._current() is before
        assert len(caplog.records) == number
    assert "protected by a passphrase" in caplog.text
    server = authority.issue(dns="localhost")
    files.certificate.write_bytes(server.certificate)
    files.key.write_bytes(server.key)
    entrance._looked_s = -60.0
    assert entrance._current() is not before
    with pytest.raises(Refused):
        TlsEntrance(WebTlsFiles(certificate=files.key, key=files.key, client_ca=files.client_ca), "x")


def user_of(**names: str) -> PageUser:
    """The user of a certificate with these names."""
    pem = Authority().issue(**names, lasts=datetime.timedelta(days=1)).certificate.decode()
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(pem)
        file.flush()
        decoded = ssl._ssl._test_decode_cert(file.name)  # type: ignore[attr-defined]
    return of_certificate(decoded, ssl.PEM_cert_to_DER_cert(pem))


def test_the_names_of_a_certificate_come_in_the_order_in_which_they_count() -> None:
    found = user_of(common_name="boss", dns="host.example", uri="spiffe://a/ada")
    assert found.certificates == ("URI:spiffe://a/ada", "DNS:host.example")
    assert found.metadata == tuple(("kineto-for-certificate", name) for name in found.certificates)


def test_a_common_name_counts_only_without_other_names() -> None:
    assert user_of(common_name="ada").certificates == ("CN:ada",)
    for other in ({"ip": "10.0.0.1"}, {"registered_id": "1.2.3.4"}):
        with pytest.raises(UnknownUser):
            user_of(common_name="ada", **other)


@pytest.mark.parametrize("name", ["Jürgen", "a\tb", ""])
def test_names_that_cannot_be_told_to_the_daemon_are_nobody(name: str) -> None:
    with pytest.raises(UnknownUser):
        of_certificate({"subject": ((("commonName", name),),)}, b"")


def test_too_many_names_are_nobody() -> None:
    sixteen, alternatives = (("DNS", "a.example"),) * 16, b"\x06\x03\x55\x1d\x11"
    assert of_certificate({"subjectAltName": sixteen}, alternatives).certificates == ("DNS:a.example",) * 16
    with pytest.raises(UnknownUser):
        of_certificate({"subjectAltName": (*sixteen, *sixteen[:1])}, alternatives)


@pytest.mark.parametrize(
    ("verified", "der"), [(None, None), ({}, b"der"), ({"subject": ((("commonName", "ada"),),)}, b"")]
)
def test_a_client_whose_certificate_was_not_verified_is_nobody(verified: object, der: bytes | None) -> None:
    connection: Any = SimpleNamespace(getpeercert=lambda binary_form=False: der if binary_form else verified)
    with pytest.raises(UnknownUser, match="presented no certificate"):
        of_tls(connection)


def test_a_client_is_whom_its_verified_certificate_names() -> None:
    verified = {"subject": ((("commonName", "ada"),),)}
    connection: Any = SimpleNamespace(getpeercert=lambda binary_form=False: b"der" if binary_form else verified)
    assert of_tls(connection).certificates == ("CN:ada",)


def test_a_proxy_names_one_user() -> None:
    assert of_header(["ada"]).metadata == (("kineto-for-user", "ada"),)
    for values in ([], ["ada", "ada"], ["ada, bea"], ["a\tb"], ["ada "], ["\xff"], [""]):
        with pytest.raises(UnknownUser):
            of_header(values)
