"""Local sockets that lead somewhere else: what is connected to one goes through a connection made by a function.

They lie in a folder that only this user can enter, which is removed with the process.
"""

import atexit
import contextlib
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from kinetoctl.errors import CliError

CHUNK_BYTES = 256 << 10
Connect = Callable[[], socket.socket]


class Tunnels:
    """All of a process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._made = 0

    def nowhere(self, name: str) -> str:
        """An address where nobody answers."""
        return f"unix:{self._path(name)}"

    def open(self, name: str, connect: Connect, first: socket.socket | None, tell: Callable[[str], None]) -> str:
        """The gRPC address of a new one. first: a connection that is made already; tell: takes why one failed."""
        path = self._path(name)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        listener.listen()
        waiting = [first] if first is not None else []
        accept = threading.Thread(target=_serve, args=(listener, name, connect, waiting, tell), name=name, daemon=True)
        accept.start()
        return f"unix:{path}"

    def _path(self, name: str) -> Path:
        with self._lock:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="kinetoctl-"))  # mode 0700
                atexit.register(shutil.rmtree, self._folder, ignore_errors=True)
            self._made += 1
            return self._folder / f"{self._made}-{name[:40]}.sock"


def _serve(
    listener: socket.socket, name: str, connect: Connect, waiting: list[socket.socket], tell: Callable[[str], None]
) -> None:
    while True:
        near, _ = listener.accept()
        threading.Thread(target=_join, args=(near, name, connect, waiting, tell), name=name, daemon=True).start()


def _join(
    near: socket.socket, name: str, connect: Connect, waiting: list[socket.socket], tell: Callable[[str], None]
) -> None:
    with near:
        try:
            far = waiting.pop() if waiting else connect()
        except CliError as exc:
            tell(f"{name}: {exc}")
            return
        back = threading.Thread(target=_pass_on, args=(far, near), name=name, daemon=True)
        back.start()
        _pass_on(near, far)
        back.join()
        far.close()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    """Until one end has gone; then the other one is told."""
    with contextlib.suppress(OSError):
        while data := source.recv(CHUNK_BYTES):
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
