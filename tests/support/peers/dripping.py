"""Servers that never come to an end: each connection gets a beginning, and then one byte after the other."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

PERIOD_S = 0.05
LONGEST_S = 30.0  # a test that waits for the end fails, and ends
HEAD = b"HTTP/1.1 200 OK\r\nX-Endless: "
BODY = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n"
HTTP2 = b"\0\0\0\4\0\0\0\0\0" + b"\0\x40\0\0\0\0\0\0\1"  # settings, and that there come 16 KiB of an answer
HANDSHAKE = b"\x16\x03\x03\x40\x00"  # of TLS, that there come 16 KiB


class Dripping:
    """A running server. port: where it listens; met: set once it has dripped on somebody."""

    def __init__(self, said: bytes, context: ssl.SSLContext | None, path: Path | None) -> None:
        self._said = said
        self._context = context
        family, address = (socket.AF_UNIX, str(path)) if path is not None else (socket.AF_INET, ("127.0.0.1", 0))
        self._listener = socket.create_server(address, family=family)
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self.port: int = self._listener.getsockname()[1] if path is None else 0
        self.met = threading.Event()

    def serve(self) -> None:
        """Serves until it is closed."""
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._drip, args=(connection,)))
                self._threads[-1].start()

    def _drip(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            sock = self._context.wrap_socket(connection, server_side=True) if self._context else connection
            with sock:
                sock.recv(1 << 16)
                sock.sendall(self._said)
                for _ in range(int(LONGEST_S / PERIOD_S)):
                    sock.sendall(b"x")
                    self.met.set()
                    if self._stopped.wait(PERIOD_S):
                        return

    def close(self) -> None:
        """Closes all connections."""
        self._stopped.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()


@contextlib.contextmanager
def dripping(said: bytes, pair: Path | None = None, path: Path | None = None) -> Iterator[Dripping]:
    """pair: a folder with server.pem and server.key for TLS; None: plain text. path: of a Unix socket; None: a port."""
    context = None
    if pair is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pair / "server.pem", pair / "server.key")
    server = Dripping(said, context, path)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join()
