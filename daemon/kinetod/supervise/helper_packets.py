"""How a helper service and its caller write messages: one SOCK_SEQPACKET packet is a head and one JSON object."""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from kinetod.base.safe_text import clean

MAX_QUOTED_CHARS = 500
_HEAD = struct.Struct("<4sH")  # magic, version
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PacketFormat:
    """The packets of one protocol.

    magic: four bytes. bad: the error for a packet that is none of its messages; foreign: what to say of one without the
    magic; other_version: the error for one of another version.
    """

    magic: bytes
    version: int
    bad: Callable[[str], Exception]
    foreign: str
    other_version: Callable[[int], Exception]

    def encode(self, message: Any) -> bytes:
        """Encodes a message as one packet."""
        return _HEAD.pack(self.magic, self.version) + msgspec.json.encode(message)

    def decode(self, packet: bytes, decoder: msgspec.json.Decoder[T], max_bytes: int) -> T:
        """The message in a packet. Raises the errors of this format."""
        if len(packet) > max_bytes:
            raise self.bad(f"a packet of more than {max_bytes} bytes")
        if len(packet) < _HEAD.size or not packet.startswith(self.magic):
            raise self.bad(self.foreign)
        _, version = _HEAD.unpack_from(packet)
        if version != self.version:
            raise self.other_version(version)
        try:
            return decoder.decode(packet[_HEAD.size :])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            # It quotes what the other side has sent, of any length.
            raise self.bad(f"a message that cannot be decoded: {clean(str(exc), MAX_QUOTED_CHARS)}") from exc
