"""Receivers that break off, hang or repeat what they must not: each is an answer with its status."""

import base64
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from kinetod.hooks.http_post import ReceiverAnswer, post
from support.waiting import scaled

HEAD = b"HTTP/1.1 %d Because\r\n%s\r\n\r\n"
TOKEN = "glc_" + "0123456789abcdef" * 4


@contextlib.contextmanager
def receiver(*said: bytes, then: Callable[[socket.socket], None] = lambda _connection: None) -> Iterator[str]:
    """Takes one request and says these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)  # a test that fails must not hang

        def serve() -> None:
            connection, _ = server.accept()
            connection.settimeout(20)
            with connection, contextlib.suppress(OSError):
                connection.recv(65536)
                connection.sendall(b"".join(said))
                then(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}/"
        finally:
            thread.join()


def until_the_client_gives_up(connection: socket.socket) -> None:
    connection.recv(1)


def posted(url: str, *secrets: str) -> ReceiverAnswer:
    return post(url, b"body", {}, ca_file="", timeout_s=scaled(2), secrets=secrets)[0]


@pytest.mark.parametrize(
    ("kind", "rest", "then"),
    [
        (b"Content-Length: 1000", b"", until_the_client_gives_up),
        (b"Transfer-Encoding: chunked", b"zz\r\nno chunk", until_the_client_gives_up),
    ],
)
@pytest.mark.parametrize(("status", "again"), [(400, False), (503, True)])
def test_a_refusal_whose_text_does_not_come_counts_by_its_status(
    kind: bytes, rest: bytes, then: Callable[[socket.socket], None], status: int, again: bool
) -> None:
    with receiver(HEAD % (status, kind), rest, then=then) as url:
        assert posted(url) == ReceiverAnswer(text=f"answered {status} Because", again=again)


@pytest.mark.parametrize("before", [0, 250, 290, 298])
def test_a_refusal_that_repeats_a_secret_is_cut_behind_it_and_not_within(before: int) -> None:
    body = b"x" * before + b" " + TOKEN.encode() + b" y"
    with receiver(HEAD % (401, b"Content-Length: %d" % len(body)), body) as url:
        answer = posted(url, TOKEN)
    assert "glc_" not in answer.text
    assert answer.text.startswith("answered 401 Because: ")


@pytest.mark.parametrize(
    ("said", "text", "again"),
    [
        (
            b"HTTP/1.1 407 Not as %s\r\n\r\n",
            "the proxy in https_proxy answered 407: add a user name and password to its URL, "
            "or add the host to no_proxy",
            False,
        ),
        (
            b"HTTP/1.1 502 Not as %s\r\n\r\n",
            "the proxy in https_proxy answered 502: ask whoever runs it, or add the host to no_proxy",
            True,
        ),
        (b"%s\r\n\r\n", "cannot be reached: (hidden)", True),
    ],
)
def test_a_proxy_that_repeats_its_credentials_gets_them_into_no_message(
    monkeypatch: pytest.MonkeyPatch, said: bytes, text: str, again: bool
) -> None:
    credentials = base64.b64encode(b"user:hunter2 secret")
    with receiver(said % credentials) as proxy:
        monkeypatch.setenv("https_proxy", proxy.replace("//", "//user:hunter2%20secret@"))
        answer = posted("https://example.invalid/hook")
    assert answer == ReceiverAnswer(text=text, again=again)
