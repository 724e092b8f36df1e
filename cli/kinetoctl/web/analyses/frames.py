"""Messages between the server and its workers: JSON with its length in front."""

import json
import os
import socket
from typing import Any

_LENGTH_BYTES = 8
MAX_FRAME_BYTES = 256 << 20


class DescriptorSocket:
    """A socket that is used by read and write alone, where nothing else is allowed."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def sendall(self, data: bytes) -> None:
        """Sends everything. Raises OSError."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    def recv_into(self, buffer: memoryview) -> int:
        """Receives some bytes; 0 at the end. Raises OSError."""
        return os.readv(self._descriptor, [buffer])


Connection = socket.socket | DescriptorSocket


def send(sock: Connection, value: Any) -> None:
    """Sends one value. Raises OSError."""
    content = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    sock.sendall(len(content).to_bytes(_LENGTH_BYTES, "big") + content)


def receive(sock: Connection, most: int = MAX_FRAME_BYTES) -> bytes:
    """The JSON text of the next value. Raises EOFError at the end, OSError, ValueError if it is too large."""
    length = int.from_bytes(_exactly(sock, _LENGTH_BYTES), "big")
    if length > most:
        raise ValueError(f"a message of {length} bytes is too large")
    return _exactly(sock, length)


def _exactly(sock: Connection, count: int) -> bytes:
    content = bytearray(count)
    view = memoryview(content)
    while view:
        got = sock.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return bytes(content)
