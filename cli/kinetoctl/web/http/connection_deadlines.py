"""Open connections, and until when something is expected of each: what is late is cut. Thread-safe."""

import socket
import threading
import time
from collections.abc import Callable


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
