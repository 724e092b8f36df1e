"""Messages between the front end and the kinetod-writer service, and the process with which either of them writes.

Theory of operation
    One SOCK_SEQPACKET packet is one message: a head (magic, version) and one JSON object. Everything has a bound, and
    unknown fields are refused. There is one kind of request, with one descriptor (SCM_RIGHTS) for each of its names,
    and one answer.

    Only a process of its own becomes the user and writes (trace_writer.py). The daemon starts it, if it may, or the
    service does.
"""

import contextlib
import json
import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import msgspec

from kinetod.supervise.child import ask_once, python
from kinetod.supervise.helper_connection import PacketFormat

VERSION = 1
MAX_PACKET_BYTES = 64 << 10
MAX_PROBLEM_CHARS = 1000
MAX_NAME_BYTES = 255

Uid = Annotated[int, msgspec.Meta(ge=0, lt=(1 << 32) - 1)]
FolderName = Annotated[str, msgspec.Meta(max_length=4096)]
FileName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_BYTES)]
Problem = Annotated[str, msgspec.Meta(max_length=MAX_PROBLEM_CHARS)]
WRITER = python("kinetod.trace_writing.trace_writer")
CHECK_S = 5.0  # a folder answers at once, or hangs
WRITE_S = 120.0
FILES_AT_ONCE = 32  # descriptors passed to one writer
GRACE_S = 2.0  # the process keeps its deadline itself
MAX_FILE_BYTES = 16 << 30  # more than any trace: decoders and recorders have their own limits


class NoAnswer(Exception):
    """The process was ended at its deadline, or should have been."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteQuestion:
    """What to write, as which user and where.

    uid: None checks the root only. files: descriptors and names. unit: systemd unit in which the process runs.
    """

    uid: int | None
    root: str
    parts: tuple[str, ...]
    files: tuple[tuple[int, str], ...]
    unit: str
    max_bytes: int = MAX_FILE_BYTES


async def run_writer(
    question: WriteQuestion, *, deadline_s: float, command: Sequence[str] = WRITER, alive: int | None = None
) -> list[str]:
    """Returns the problem of each file, or of the folder if there are no files; "" for none.

    alive: a descriptor that stays open in the process as long as it exists. Raises NoAnswer.
    """
    lines: list[bytes] = []
    asked = {**asdict(question), "deadline_s": deadline_s}
    passed = [each for each, _name in question.files] + ([] if alive is None else [alive])
    count = max(1, len(question.files))
    try:
        text = json.dumps(asked).encode()
        end = await ask_once(command, text, lines.append, deadline_s=deadline_s + GRACE_S, pass_fds=passed)
    except (OSError, ValueError) as exc:
        return [f"the writing process failed: {exc}"] * count
    if end.status in (None, -signal.SIGALRM):
        raise NoAnswer(f"the folder did not respond within {deadline_s:g} s")
    with contextlib.suppress(ValueError, IndexError):
        said = json.loads(lines[0])
        if isinstance(said, list) and len(said) == count and all(isinstance(each, str) for each in said):
            return said
    return [f"the writing process failed: exit status {end.status}: {end.errors[-300:]}"] * count


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
    return BadWriterMessage(f"it uses version {theirs} of the writer's protocol, but this side uses version {VERSION}")


_PACKETS = PacketFormat(
    b"KWRI", VERSION, BadWriterMessage, "a packet that is not a message of the writer's protocol", _other_version
)

encode: Callable[[PlaceTraces | TracesPlaced], bytes] = _PACKETS.encode
# For a caller and for the service; both raise BadWriterMessage.
request = _PACKETS.reader(msgspec.json.Decoder(PlaceTraces), MAX_PACKET_BYTES)
answer = _PACKETS.reader(msgspec.json.Decoder(TracesPlaced), MAX_PACKET_BYTES)
