"""What the front end asks of the kinetod-writer service: one SOCK_SEQPACKET packet is one message.

Theory of operation
    A packet is a head (magic, version) and one JSON object. Everything has a bound, and unknown fields are refused.
    There is one request, with one descriptor (SCM_RIGHTS) for each of its names, and it has one answer.
"""

from typing import Annotated

import msgspec

from kinetod.supervise.helper_packets import PacketFormat
from kinetod.trace_writing.writing_process import FILES_AT_ONCE

VERSION = 1
MAX_PACKET_BYTES = 64 << 10
MAX_PROBLEM_CHARS = 1000
MAX_NAME_BYTES = 255

Uid = Annotated[int, msgspec.Meta(ge=0, lt=(1 << 32) - 1)]
FolderName = Annotated[str, msgspec.Meta(max_length=4096)]
FileName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_BYTES)]
Problem = Annotated[str, msgspec.Meta(max_length=MAX_PROBLEM_CHARS)]


class BadWriterMessage(Exception):
    """The packet is not one of the expected messages. The text says why."""


class PlaceTraces(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="place"):
    """Writes the descriptors under these names into a folder as that user; without names, only looks whether it could.

    uid: None, without names, asks whether anything may be written there at all: for root, and for diagnoses.
    """

    uid: Uid | None
    folder: FolderName
    names: Annotated[tuple[FileName, ...], msgspec.Meta(max_length=FILES_AT_ONCE)] = ()


class TracesPlaced(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="placed"
):
    """What is wrong with each file, or with the folder if none was named; "" where nothing is."""

    problems: Annotated[tuple[Problem, ...], msgspec.Meta(min_length=1, max_length=FILES_AT_ONCE)]


def _other_version(theirs: int) -> BadWriterMessage:
    return BadWriterMessage(f"it speaks version {theirs} of the writer's protocol, and this side version {VERSION}")


_requests = msgspec.json.Decoder(PlaceTraces)
_answers = msgspec.json.Decoder(TracesPlaced)
_PACKETS = PacketFormat(
    b"KWRI", VERSION, BadWriterMessage, "a packet that is not a message of the writer's protocol", _other_version
)


def encode(message: PlaceTraces | TracesPlaced) -> bytes:
    """Encodes a message as one packet."""
    return _PACKETS.encode(message)


def request(packet: bytes) -> PlaceTraces:
    """Decodes a caller's request. Raises BadWriterMessage."""
    return _PACKETS.decode(packet, _requests, MAX_PACKET_BYTES)


def answer(packet: bytes) -> TracesPlaced:
    """Decodes the service's answer. Raises BadWriterMessage."""
    return _PACKETS.decode(packet, _answers, MAX_PACKET_BYTES)
