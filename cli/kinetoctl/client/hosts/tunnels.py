"""Tunnels: local sockets whose connections are forwarded through connections that a function makes.

The sockets lie in a folder that only this user can enter. It is removed when the tunnels are closed, at the latest when
the process ends.
"""

import atexit
import contextlib
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kinetoctl.errors import CliError

CHUNK_BYTES = 256 << 10
Connect = Callable[[], socket.socket]


@dataclass(frozen=True, slots=True)
class _Tunnel:
    """waiting: remote connections that are not in use yet; taken: local ends of connections in use."""

    name: str
    listener: socket.socket
    connect: Connect
    tell: Callable[[str], None]
    waiting: list[socket.socket]
    taken: set[socket.socket]


class Tunnels:
    """A set of tunnels. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._made = 0
        self._open: list[_Tunnel] = []
        atexit.register(self.close)

    def close(self) -> None:
        """Closes all tunnels and their connections. New tunnels may be opened afterwards."""
        with self._lock:
            for tunnel in self._open:
                with contextlib.suppress(OSError):
                    tunnel.listener.shutdown(socket.SHUT_RDWR)  # wakes who accepts
                tunnel.listener.close()
                while tunnel.waiting:
                    tunnel.waiting.pop().close()
                for near in tunnel.taken:
                    with contextlib.suppress(OSError):
                        near.shutdown(socket.SHUT_RDWR)
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
            self._open, self._folder = [], None

    def nowhere(self, name: str) -> str:
        """An address at which nothing answers."""
        with self._lock:
            return f"unix:{self._path(name)}"

    def open(self, name: str, connect: Connect, first: socket.socket | None, tell: Callable[[str], None]) -> str:
        """Opens a tunnel and returns its gRPC address.

        first: a remote connection that exists already; tell: receives the reason if a connection fails.
        """
        with self._lock:
            path = self._path(name)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(str(path))
            listener.listen()
            tunnel = _Tunnel(name, listener, connect, tell, [first] if first is not None else [], set())
            self._open.append(tunnel)
        threading.Thread(target=self._serve, args=(tunnel,), name=name, daemon=True).start()
        return f"unix:{path}"

    def _path(self, name: str) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="kinetoctl-"))  # mode 0700
        self._made += 1
        return self._folder / f"{self._made}-{name[:40]}.sock"

    def _serve(self, tunnel: _Tunnel) -> None:
        while True:
            try:
                near, _ = tunnel.listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._join, args=(tunnel, near), name=tunnel.name, daemon=True).start()

    def _join(self, tunnel: _Tunnel, near: socket.socket) -> None:
        with near:
            with self._lock:
                first = tunnel.waiting.pop() if tunnel.waiting else None
            try:
                far = first or tunnel.connect()
            except CliError as exc:
                tunnel.tell(f"{tunnel.name}: {exc}")
                return
            with self._lock:
                tunnel.taken.add(near)
            back = threading.Thread(target=_pass_on, args=(far, near), name=tunnel.name, daemon=True)
            back.start()
            _pass_on(near, far)
            back.join()
            with self._lock:
                tunnel.taken.discard(near)
            far.close()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    """Forwards data until one end closes, then shuts both down."""
    with contextlib.suppress(OSError):
        while data := source.recv(CHUNK_BYTES):
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
