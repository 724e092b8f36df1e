"""The listening socket: loopback only, this user's programs only, and no client can hold more than its share.

Theory of operation
    Python's own HTTP server parses requests; it is meant for no more than this, and what it lacks is here. Each
    connection is a thread, and there are at most MAX_CONNECTIONS: further ones are closed at once. A connection
    belongs to a program of this user or of root, or it is closed before a byte of it is read, so that no other user of
    the host can use up the connections or present a stolen cookie. A request must be complete within REQUEST_S from its
    first byte, however slowly it drips, and a connection may be idle for IDLE_S: the thread of the listening socket
    closes those that are late. Of an answer, a client must take something within SEND_S.
"""

import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kinetoctl.base.socket_owner import Address, is_own
from kinetoctl.web.http.security import HOST

MAX_CONNECTIONS = 64  # a browser has six to a server
REQUEST_S, IDLE_S, SEND_S = 10.0, 30.0, 30.0
_LOOK_S = 0.25

Owner = Callable[[Address, Address], bool]


class WebServer(ThreadingHTTPServer):
    """Listens on a loopback address. port 0: any free one. Raises OSError if the port is in use."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 32

    def __init__(
        self,
        port: int = 0,
        *,
        host: str = HOST,
        is_own: Owner = is_own,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._is_own = is_own
        self.deadlines = ConnectionDeadlines(clock)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), BaseHTTPRequestHandler)

    def answer_with(self, handler: Callable[..., BaseHTTPRequestHandler]) -> None:
        """Sets what handles a connection; before `serve`."""
        self.RequestHandlerClass = handler

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self.server_address[1])

    def serve(self) -> None:
        """Serves until `shutdown`."""
        self.serve_forever(poll_interval=_LOOK_S)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether this connection is served at all."""
        if len(self.deadlines) >= MAX_CONNECTIONS or not self._is_own(request.getsockname(), client_address):
            return False
        request.settimeout(SEND_S)
        self.deadlines.expect(request, IDLE_S)
        return True

    def service_actions(self) -> None:
        """Ends the connections that are late. Runs a few times a second."""
        self.deadlines.cut_late()

    def shutdown_request(self, request: Any) -> None:
        """Forgets a connection that has ended."""
        self.deadlines.forget(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints nothing: a client that disconnects is no news, and other errors were answered with a page."""

    def server_close(self) -> None:
        """Closes the listening socket and every connection."""
        super().server_close()
        self.deadlines.cut_all()


# Open connections, and until when something is expected of each: what is late is cut. Thread-safe.
class ConnectionDeadlines:
    """The open connections of one server. clock: seconds that only grow."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._deadlines: dict[socket.socket, float | None] = {}

    def __len__(self) -> int:
        with self._lock:
            return len(self._deadlines)

    def expect(self, connection: socket.socket, within_s: float | None) -> None:
        """Cuts the connection unless something else is expected of it within this time; None: an answer is made."""
        with self._lock:
            self._deadlines[connection] = None if within_s is None else self._clock() + within_s

    def forget(self, connection: socket.socket) -> None:
        """The connection has ended."""
        with self._lock:
            self._deadlines.pop(connection, None)

    def cut_late(self) -> None:
        """Ends the connections that are late. To be called a few times a second."""
        now = self._clock()
        with self._lock:
            late = [each for each, deadline in self._deadlines.items() if deadline is not None and deadline <= now]
        for connection in late:
            _cut(connection)

    def cut_all(self) -> None:
        """Ends every connection."""
        with self._lock:
            open_ones = list(self._deadlines)
        for connection in open_ones:
            _cut(connection)


def _cut(connection: socket.socket) -> None:
    """Makes the thread of a connection see its end, without touching the state of TLS, which is the thread's."""
    try:
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
    except OSError:
        return
