"""Messages between the server and its workers: JSON with its length in front."""

import json
import socket
from typing import Any

_LENGTH_BYTES = 8
MAX_FRAME_BYTES = 256 << 20


def send(sock: socket.socket, value: Any) -> None:
    """Sends one value. Raises OSError."""
    content = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    sock.sendall(len(content).to_bytes(_LENGTH_BYTES, "big") + content)


def receive(sock: socket.socket) -> bytes:
    """The JSON text of the next value. Raises EOFError at the end, OSError, ValueError if it is too large."""
    length = int.from_bytes(_exactly(sock, _LENGTH_BYTES), "big")
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {length} bytes is too large")
    return _exactly(sock, length)


def _exactly(sock: socket.socket, count: int) -> bytes:
    content = bytearray(count)
    view = memoryview(content)
    while view:
        got = sock.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return bytes(content)
