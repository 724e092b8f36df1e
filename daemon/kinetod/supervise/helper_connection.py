"""Connects the front end to a helper service; the packets that both sides write."""

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from kineto_protos import unix_peer

from kinetod.base.safe_text import clean

_QUEUE_PAUSE_S = 0.02
MAX_QUOTED_CHARS = 500
_HEAD = struct.Struct("<4sH")  # magic, version
T = TypeVar("T")


class NotOurService(OSError):
    """Another user's process listens. uid: that user."""

    def __init__(self, uid: int) -> None:
        super().__init__(f"the socket belongs to uid {uid}, which is neither root nor the daemon's own user")
        self.uid = uid


async def connected(path: Path) -> socket.socket:
    """A non-blocking connection to the service at `path`, which must be root's or our own user's (SO_PEERCRED).

    A Unix socket connects at once, or not at all while the other side's queue is full (EAGAIN), which asyncio would
    take for connected; then this waits. Raises OSError, NotOurService.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        while True:
            try:
                sock.connect(str(path))
                break
            except BlockingIOError:
                await asyncio.sleep(_QUEUE_PAUSE_S)
        _pid, uid, _gid = unix_peer.credentials(sock)
        if uid not in (0, os.geteuid()):
            raise NotOurService(uid)
    except BaseException:
        sock.close()
        raise
    return sock


@dataclass(frozen=True, slots=True)
class PacketFormat:
    """The packets of one protocol.

    magic: four bytes. bad: creates the error for an invalid packet; foreign: its text for one without the magic;
    other_version: creates the error for one of another version.
    """

    magic: bytes
    version: int
    bad: Callable[[str], Exception]
    foreign: str
    other_version: Callable[[int], Exception]

    def encode(self, message: Any) -> bytes:
        """Encodes a message as one packet."""
        return _HEAD.pack(self.magic, self.version) + msgspec.json.encode(message)

    def reader(self, decoder: msgspec.json.Decoder[T], max_bytes: int) -> Callable[[bytes], T]:
        """A function that decodes such messages and raises the errors of this format."""
        return partial(self.decode, decoder=decoder, max_bytes=max_bytes)

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
            # It quotes data of the other side, of any length.
            raise self.bad(f"a message that cannot be decoded: {clean(str(exc), MAX_QUOTED_CHARS)}") from exc
