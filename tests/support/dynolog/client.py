"""A client of Dynolog in Python, as in-house scripts have it."""

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.dynolog.raw_client import TIMEOUT_S, connected, raw_answer
from support.service.daemon import as_user

__all__ = ["asked", "asked_as", "connected", "framed", "raw_answer"]
SCRIPT = Path(__file__).with_name("raw_client.py")


def framed(request: Any) -> bytes:
    """A request in its frame; bytes stay what they are."""
    if isinstance(request, bytes):
        return request
    body = json.dumps(request).encode()
    return struct.pack("=i", len(body)) + body


def _read(received: bytes) -> Any:
    if not received:
        return None
    (size,) = struct.unpack("=i", received[:4])
    assert size == len(received) - 4
    return json.loads(received[4:])


def asked(address: str, request: Any) -> Any:
    """The answer to a request, or to bytes; None if there is none."""
    return _read(raw_answer(address, framed(request)))


def asked_as(uid: int, address: str, request: Any) -> Any:
    """The same from a process of another user."""
    command = [*as_user(uid), sys.executable, "-S", str(SCRIPT), address, framed(request).hex()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    return _read(bytes.fromhex(done.stdout))
