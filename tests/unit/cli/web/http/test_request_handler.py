"""Limits of connections: how many, whose, and how long."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http import HTTPStatus
from io import BytesIO

import pytest
from kinetoctl.web.http import request_handler
from kinetoctl.web.http.request_handler import (
    MAX_CONNECTIONS,
    MAX_FORM_BYTES,
    MAX_TARGET_BYTES,
    REQUEST_S,
    RequestHandler,
    WebServer,
    WebSite,
)
from kinetoctl.web.http.web_messages import WebAnswer, WebError, WebRequest, origin
from support.waiting import scaled, until
from support.web.browsing import exchange

FORM = "Content-Type: application/x-www-form-urlencoded"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Piecemeal(BytesIO):
    """A file that is too large to be read at once."""

    def read(self, size: int | None = -1, /) -> bytes:
        assert size is not None
        assert 0 < size <= 1 << 20
        return super().read(size)


def hello(request: WebRequest) -> WebAnswer:
    if request.path == "/file":
        return WebAnswer(content=Piecemeal(b"x" * 3_000_000))
    if request.path == "/broken":
        raise ValueError("/home/somebody/secret")
    if request.path == "/refused":
        raise WebError(HTTPStatus.FORBIDDEN, "not\r\nthis")
    return WebAnswer(content=f"{request.method} {request.path} {request.query} {request.form}".encode())


@contextmanager
def serving(*, own: bool = True, clock: Clock | None = None) -> Iterator[WebServer]:
    with WebServer(is_own=lambda _near, _far: own, clock=clock or Clock()) as server:
        site = WebSite(origin=origin(server.port), policy="default-src 'none'", application=hello)
        server.answer_with(partial(RequestHandler, (site,)))
        thread = threading.Thread(target=server.serve)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def get(server: WebServer, target: str, *more: str) -> bytes:
    lines = (f"GET {target} HTTP/1.1", f"Host: 127.0.0.1:{server.port}", "Connection: close", *more)
    return exchange(server.port, "\r\n".join((*lines, "", "")).encode("latin-1"))


def post(server: WebServer, *headers: str, body: bytes = b"") -> bytes:
    own = origin(server.port)
    lines = ("POST /form HTTP/1.1", f"Host: {own.removeprefix('http://')}", f"Origin: {own}", *headers, "", "")
    return exchange(server.port, "\r\n".join(lines).encode() + body)


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def test_every_answer_has_the_headers_that_protect_it() -> None:
    with serving() as server:
        for target in ("/", "/broken", "/refused", "/" + "x" * (MAX_TARGET_BYTES + 1)):
            head = get(server, target).partition(b"\r\n\r\n")[0].decode()
            for line in (
                "X-Content-Type-Options: nosniff",
                "Content-Security-Policy: default-src 'none'",
                "Referrer-Policy: same-origin",
                "Cross-Origin-Opener-Policy: same-origin",
                "Cache-Control: no-store",
            ):
                assert line in head


def test_an_open_file_is_sent_piece_by_piece() -> None:
    with serving() as server:
        head, _, content = get(server, "/file").partition(b"\r\n\r\n")
        assert b"Content-Length: 3000000" in head
        assert content == b"x" * 3_000_000


def test_an_error_of_a_page_says_nothing_of_this_machine() -> None:
    with serving() as server:
        answer = get(server, "/broken")
        assert status(answer) == 500
        assert b"secret" not in answer


def test_an_answer_cannot_be_split_by_a_message() -> None:
    with serving() as server:
        assert status(get(server, "/refused")) == 403
        assert status(get(server, "/%0d%0aX-Evil:%201")) == 200


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("/ok?a=1&a=2", 200),
        ("/" + "x" * (MAX_TARGET_BYTES + 1), 414),
        ("/" + "x" * 70_000, 414),
        ("/?" + "&".join(f"a{n}=1" for n in range(200)), 400),
        ("http://evil.example/", 400),
    ],
)
def test_addresses_are_limited(target: str, expected: int) -> None:
    with serving() as server:
        assert status(get(server, target)) == expected


def test_headers_are_limited() -> None:
    with serving() as server:
        assert status(get(server, "/", *(f"X-{n}: 1" for n in range(200)))) == 431
        assert status(get(server, "/", "X-Long: " + "x" * 70_000)) == 431


@pytest.mark.parametrize(
    ("long", "said"),
    [
        ("GET /" + "x" * 70_000, HTTPStatus.REQUEST_URI_TOO_LONG.phrase),
        ("GET / HTTP/1.1\r\nX: " + "x" * 70_000, "Line too long"),
    ],
)
def test_what_python_refuses_ends_the_connection_and_says_why(long: str, said: str) -> None:
    with serving() as server:
        head, _, body = exchange(server.port, f"{long}\r\n\r\n".encode()).partition(b"\r\n\r\n")
    assert b"\r\nConnection: close" in head
    assert body.decode().strip() == said


def test_a_request_for_another_host_or_from_another_site_is_refused() -> None:
    with serving() as server:
        assert (
            status(exchange(server.port, b"GET / HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n")) == 421
        )
        foreign = f"POST / HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n{FORM}\r\nContent-Length: 0\r\n\r\n"
        assert status(exchange(server.port, foreign.encode())) == 403
        answer = post(server, FORM, "Content-Length: 3", body=b"a=b")
        assert b"\r\nConnection: close" in answer.partition(b"\r\n\r\n")[0]  # what follows a form is not read


@pytest.mark.parametrize("names", [("evil.example", ""), ("", "evil.example"), ("", "")])
def test_a_request_that_names_two_hosts_is_refused(names: tuple[str, str]) -> None:
    with serving() as server:
        hosts = "".join(f"Host: {name or f'127.0.0.1:{server.port}'}\r\n" for name in names)
        assert status(exchange(server.port, f"GET / HTTP/1.1\r\n{hosts}Connection: close\r\n\r\n".encode())) == 400


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ((FORM, "Content-Length: 3"), 200),
        ((FORM,), 411),
        ((FORM, "Content-Length: 3", "Content-Length: 4"), 411),
        ((FORM, "Content-Length: -3"), 411),
        ((FORM, "Content-Length: 3", "Transfer-Encoding: chunked"), 411),
        ((FORM, f"Content-Length: {MAX_FORM_BYTES + 1}"), 413),
        ((FORM, "Content-Length: " + "9" * 5000), 413),
        (("Content-Type: application/json", "Content-Length: 3"), 415),
        (("Content-Type: multipart/form-data; boundary=x", "Content-Length: 3"), 415),
    ],
)
def test_forms_are_limited(headers: tuple[str, ...], expected: int) -> None:
    with serving() as server:
        assert status(post(server, *headers, body=b"a=b")) == expected


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND"])
def test_other_methods_are_refused(method: str) -> None:
    with serving() as server:
        asked = f"{method} / HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n"
        assert status(exchange(server.port, asked.encode())) == 405


def test_a_connection_of_another_user_is_closed_unread() -> None:
    with serving(own=False) as server, suppress(ConnectionResetError):
        assert get(server, "/") == b""


def test_a_request_that_drips_is_cut_off() -> None:
    clock = Clock()
    with serving(clock=clock) as server, socket.create_connection(("127.0.0.1", server.port), scaled(30)) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: 127.")
        until(lambda: list(server.deadlines._deadlines.values()) == [REQUEST_S], "the request has begun")
        clock.now = REQUEST_S
        assert sock.recv(1) == b""


def test_an_idle_connection_is_closed() -> None:
    clock = Clock()
    with serving(clock=clock) as server, socket.create_connection(("127.0.0.1", server.port), scaled(30)) as sock:
        until(lambda: bool(server.deadlines._deadlines), "the connection is open")

        def closed_later() -> bool:  # its handler may begin to wait only now
            clock.now += request_handler.IDLE_S
            return not server.deadlines._deadlines

        until(closed_later, "it is closed")
        assert sock.recv(1) == b""


def test_there_are_only_so_many_connections() -> None:
    with serving() as server:
        sockets = [socket.create_connection(("127.0.0.1", server.port), scaled(30)) for _ in range(MAX_CONNECTIONS)]
        until(lambda: len(server.deadlines._deadlines) == MAX_CONNECTIONS, "all are open")
        with suppress(ConnectionResetError):
            assert exchange(server.port, b"GET / HTTP/1.1\r\n\r\n") == b""
        sockets.pop().close()
        until(lambda: len(server.deadlines._deadlines) < MAX_CONNECTIONS, "one has closed")
        assert status(get(server, "/")) == 200
        for each in sockets:
            each.close()
