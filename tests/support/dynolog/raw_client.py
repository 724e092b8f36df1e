"""Sends bytes to the door and takes what comes: `python raw_client.py HOST:PORT|unix:/path HEX` prints it as hex."""

import contextlib
import socket
import sys

TIMEOUT_S = 60


def connected(address: str) -> socket.socket:
    """A connection to the door."""
    if address.startswith("unix:"):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(TIMEOUT_S)
        sock.connect(address.removeprefix("unix:"))
        return sock
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), TIMEOUT_S)


def raw_answer(address: str, sent: bytes) -> bytes:
    """Everything that comes until the connection ends."""
    received = b""
    with contextlib.suppress(ConnectionResetError, BrokenPipeError), connected(address) as sock:
        sock.sendall(sent)
        while part := sock.recv(65536):
            received += part
    return received


if __name__ == "__main__":
    sys.stdout.write(raw_answer(sys.argv[1], bytes.fromhex(sys.argv[2])).hex())
