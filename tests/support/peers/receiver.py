"""A receiver of webhooks: a real HTTP server that answers what the test says."""

import contextlib
import ssl
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from support.peers.certificates import Authority


@contextlib.contextmanager
def serving(server: ThreadingHTTPServer) -> Iterator[None]:
    """Serves in a thread of its own."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass
class Received:
    """One request. Names of headers are in lower case."""

    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass
class Receiver:
    """answers: status codes, one for each request, then 204. headers: of each answer."""

    url: str = ""
    answers: list[int] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    received: list[Received] = field(default_factory=list)


@contextlib.contextmanager
def receiving(tls: Path | None = None, authority: Authority | None = None) -> Iterator[Receiver]:
    """tls: a folder for a certificate of `authority` for localhost; None: plain HTTP."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.received.append(
                Received(self.path, {name.lower(): value for name, value in self.headers.items()}, body)
            )
            status = receiver.answers.pop(0) if receiver.answers else 204
            text = b"" if status == 204 else b"not now\n"
            self.send_response(status)
            for name, value in receiver.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_args: object) -> None:
            """Clients that hang up are no news."""

    server = Server(("127.0.0.1", 0), Handler)
    scheme = "http"
    if tls is not None and authority is not None:
        scheme = "https"
        pair = authority.issue("localhost", dns="localhost")
        for name, content in (("receiver.pem", pair.certificate), ("receiver.key", pair.key)):
            (tls / name).write_bytes(content)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls / "receiver.pem", tls / "receiver.key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
    receiver.url = f"{scheme}://localhost:{server.server_address[1]}/hook"
    with serving(server):
        yield receiver
