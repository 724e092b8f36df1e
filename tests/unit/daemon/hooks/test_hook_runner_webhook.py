"""A webhook whose receiver is hostile: what it costs, and what gets into the log."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from kinetod.hooks import hook_runner
from kinetod.hooks.hook_runner import WebhookHook
from kinetod.hooks.hook_types import Ended, HookOutcome, HookResult

ENDED = Ended(capture_id="c1", status="DONE", variables={}, body=b"{}")


@contextlib.contextmanager
def receiver(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server that does what it likes with each connection; its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection, contextlib.suppress(OSError):
                        connection.recv(65536)
                        answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def told(url: str, timeout_s: float = 20.0) -> HookOutcome:
    return asyncio.run(WebhookHook(url, None, None).call(ENDED, timeout_s))


def test_one_that_answers_byte_by_byte_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook_runner, "_OWN_S", 0.0)
    done = threading.Event()

    def drip(connection: socket.socket) -> None:
        while not done.wait(0.1):
            connection.sendall(b"H")

    with receiver(drip) as port:
        outcome = told(f"http://127.0.0.1:{port}/", 1.0)
        done.set()
    assert (outcome.result, outcome.again) == (HookResult.TIMEOUT, True)


def test_of_an_answer_without_an_end_little_is_read() -> None:
    def flood(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 404 Not Found\r\n\r\n")
        while True:
            connection.sendall(b"x" * 65536)

    with receiver(flood) as port:
        outcome = told(f"http://127.0.0.1:{port}/")
    assert outcome.text.startswith("answered 404 Not Found: xxx")
    assert len(outcome.text) <= 500


def test_an_address_s_secrets_are_in_no_message_even_if_the_receiver_says_them() -> None:
    secrets = "T0KENpathT0KENpath", "s3cret/value"

    def echo(connection: socket.socket) -> None:
        said = f"Cannot POST /services/{secrets[0]}?key=s3cret%2Fvalue and {secrets[1]}".encode()
        connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n%s" % (len(said), said))

    with receiver(echo) as port:
        url = f"http://127.0.0.1:{port}/services/{secrets[0]}?key=s3cret%2Fvalue"
        outcome = told(url)
        name = WebhookHook(url, None, None).name
    assert "Cannot POST /services/" in outcome.text
    for secret in (*secrets, "s3cret"):
        assert secret not in outcome.text + name
    assert name == f"http://127.0.0.1:{port}/services/…"


def test_a_sender_that_crashes_tells_no_secret_of_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    crash = "echo no address: /services/T0KENpathT0KENpath; exit 1"
    monkeypatch.setattr(hook_runner, "_WEBHOOK_COMMAND", ("/bin/sh", "-c", crash))
    outcome = told("http://127.0.0.1:1/services/T0KENpathT0KENpath")
    assert outcome.text == "cannot be called: its process exited with status 1: no address: /services/(hidden)"
