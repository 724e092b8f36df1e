"""A libkineto as a daemon sees it: exact bytes of its polls and registrations, and the answers to them.

The layouts are written out here once more, so that a mistake in the daemon's codec is not repeated.
"""

import os
import socket
import struct
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

DAEMON = b"\0dynolog\0"
FREE, BUSY = 3, 1  # what torch 2.13 sends while its profiler can take a configuration, and while it cannot
PATIENCE_S = 0.09  # libkineto tries nine times, 10 ms apart


def poll(wants: int = FREE, *, pids: Sequence[int] = (), job: int = 0, count: int | None = None) -> bytes:
    """A poll's datagram."""
    body = struct.pack("<iiq", wants, len(pids) if count is None else count, job)
    body += b"".join(struct.pack("<i", pid) for pid in pids)
    return struct.pack("<Q", len(body)) + b"req".ljust(32, b"\0") + body


def registration(gpu: int, pid: int, job: int) -> bytes:
    """A registration's datagram."""
    return struct.pack("<Q", 16) + b"ctxt".ljust(32, b"\0") + struct.pack("<iiq", gpu, pid, job)


class Libkineto:
    """A client with a socket of its own; folder: KINETO_IPC_SOCKET_DIR; daemon: the abstract name without it."""

    def __init__(self, folder: Path | None = None, *, daemon: bytes = DAEMON, job: int = 0) -> None:
        name = f"dynoconfigclient{uuid.uuid4()}"
        self.job = job
        self.daemon: bytes | str = daemon if folder is None else str(folder / "dynolog")
        self.address: bytes | str = f"\0{name}\0".encode() if folder is None else str(folder / name)
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind(self.address)
        self.sender: bytes | str = b""  # of the last answer
        self.waited_s = 0.0

    def poll(self, wants: int = FREE, *, patience_s: float = 10.0) -> str | None:
        """Polls once; returns the configuration, or None if no answer comes."""
        self.send(poll(wants, pids=[os.getpid(), os.getppid()], job=self.job))
        answer = self.receive(patience_s)
        if answer is None:
            return None
        size, kind = struct.unpack_from("<Q32s", answer)
        assert (size, kind.rstrip(b"\0")) == (len(answer) - 40, b"req")
        return answer[40:].decode()

    def send(self, datagram: bytes) -> None:
        """Sends bytes to the daemon."""
        self.sock.sendto(datagram, self.daemon)

    def receive(self, patience_s: float = 10.0) -> bytes | None:
        """The next answer; None if none comes."""
        self.sock.settimeout(patience_s)
        began = time.perf_counter()
        try:
            answer, self.sender = self.sock.recvfrom(1 << 16)
            return answer
        except TimeoutError:
            return None
        finally:
            self.waited_s = time.perf_counter() - began

    def close(self) -> None:
        """Closes the socket, and removes its file."""
        self.sock.close()
        if isinstance(self.address, str):
            Path(self.address).unlink(missing_ok=True)
