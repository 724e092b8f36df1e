"""Dynolog's frames: an int32 in the byte order of the host, then as many bytes of JSON. Pure.

rpc/SimpleJsonServer.cpp of facebookincubator/dynolog at c3a231a is the source of this format and of `requests`.
"""

import json
import struct
from collections.abc import Mapping
from typing import Any

PREFIX = struct.Struct("=i")
MAX_REQUEST_BYTES = 64 << 10  # dyno's have 300 to 600 bytes; 4096 pids fit


class BadFrame(ValueError):
    """What came is not a request; the text says why. Dynolog answers nothing to it."""


def body_size(prefix: bytes) -> int:
    """The length of the JSON that follows. Raises BadFrame."""
    (size,) = PREFIX.unpack(prefix)
    if not 0 < size <= MAX_REQUEST_BYTES:
        raise BadFrame(f"a length of {size} bytes; a request has 1 to {MAX_REQUEST_BYTES}")
    return int(size)


def read_object(body: bytes) -> Mapping[str, Any]:
    """The JSON object in a frame. Raises BadFrame."""
    try:
        found = json.loads(body.decode("utf-8-sig"), parse_constant=_refuse)
    except (ValueError, RecursionError) as exc:  # UnicodeDecodeError and JSONDecodeError too
        raise BadFrame(f"not JSON: {exc}") from exc
    if not isinstance(found, dict) or not found:
        raise BadFrame("not a JSON object with a member")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def frame(answer: Mapping[str, Any]) -> bytes:
    """An answer as it is sent: compact, members in the order of their names, as Dynolog's."""
    text = json.dumps(answer, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    body = text.encode("utf-8", "replace")
    return PREFIX.pack(len(body)) + body
