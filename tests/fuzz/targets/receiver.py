"""A webhook's receiver, or an API server, that answers what it likes instead of HTTP."""

import http.client
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from kinetod.hooks import webhook_sender
from kinetod.kubernetes.api_server import ApiServer, Exchange

WAIT_S = 5.0
_CONTEXT = ssl.create_default_context()
_listener = socket.create_server(("127.0.0.1", 0), backlog=8)
_port = _listener.getsockname()[1]
_said = b""


def _serve() -> None:
    while True:
        connection, _ = _listener.accept()
        with connection:
            connection.settimeout(WAIT_S)
            try:
                connection.recv(65536)
                connection.sendall(_said)
                connection.shutdown(socket.SHUT_WR)
            except OSError:
                continue


threading.Thread(target=_serve, daemon=True).start()


def play(data: bytes) -> None:
    global _said
    _said = data
    delivery = webhook_sender.Delivery(
        url=f"http://127.0.0.1:{_port}/x", message_id="m", secret_file="", ca_file="", timeout_s=WAIT_S
    )
    with patch("kinetod.hooks.http_post.ssl.create_default_context", return_value=_CONTEXT):  # 50 ms each
        answer = webhook_sender.deliver(delivery, b"{}", 1)
    assert 0 <= answer.after_s < 1e6 and len(answer.text) < 100_000
    server = ApiServer(("127.0.0.1", _port), Path("/nonexistent"), deadline_s=WAIT_S)
    connection = http.client.HTTPConnection("127.0.0.1", _port, timeout=WAIT_S)
    try:
        connection.connect()
        server._answer(Exchange(), connection, "GET", "/x", None, {})  # type: ignore[arg-type]  # HTTPS is another door
    except (OSError, http.client.HTTPException):
        pass
    finally:
        server.close()


def seeds() -> Iterator[bytes]:
    """Answers as they should be, refusals, redirects, chunks."""
    yield b"HTTP/1.1 204 No Content\r\n\r\n"
    yield b"HTTP/1.1 503 Busy\r\nRetry-After: 30\r\nContent-Length: 4\r\n\r\nlate"
    yield b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\n\r\n"
    yield b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
