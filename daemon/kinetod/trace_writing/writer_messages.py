"""Messages between the front end and the kinetod-writer service: one SOCK_SEQPACKET packet is one message.

Theory of operation
    A packet is a head (magic, version) and one JSON object. Everything has a bound, and unknown fields are refused.
    There is one kind of request, with one descriptor (SCM_RIGHTS) for each of its names, and one answer.
"""

from collections.abc import Callable
from typing import Annotated

import msgspec

from kinetod.supervise.helper_connection import PacketFormat
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
    """The packet is not one of the expected messages. The message text says why."""


class PlaceTraces(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="place"):
    """Writes the descriptors under these names into a folder as that user; without names, only checks whether it could.

    uid: None, without names, asks whether anything may be written there at all: for root, and for diagnoses.
    """

    uid: Uid | None
    folder: FolderName
    names: Annotated[tuple[FileName, ...], msgspec.Meta(max_length=FILES_AT_ONCE)] = ()


class TracesPlaced(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="placed"
):
    """The problem of each file, or of the folder without names; "" for none."""

    problems: Annotated[tuple[Problem, ...], msgspec.Meta(min_length=1, max_length=FILES_AT_ONCE)]


def _other_version(theirs: int) -> BadWriterMessage:
    return BadWriterMessage(f"it speaks version {theirs} of the writer's protocol, and this side version {VERSION}")


_PACKETS = PacketFormat(
    b"KWRI", VERSION, BadWriterMessage, "a packet that is not a message of the writer's protocol", _other_version
)

encode: Callable[[PlaceTraces | TracesPlaced], bytes] = _PACKETS.encode
# For a caller and for the service; both raise BadWriterMessage.
request = _PACKETS.reader(msgspec.json.Decoder(PlaceTraces), MAX_PACKET_BYTES)
answer = _PACKETS.reader(msgspec.json.Decoder(TracesPlaced), MAX_PACKET_BYTES)
