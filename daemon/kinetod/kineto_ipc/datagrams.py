"""libkineto's datagrams, as bytes and as values: its polls, its registrations, and the answers to both.

Theory of operation
    A datagram is a header (the body's length as u64, a type in 32 bytes padded with zeros) and a body, little-endian
    without a version field. The layouts are those of dynolog/src/ipcfabric/Utils.h and FabricManager.h, as torch 2.13
    sends them. Types are compared by their beginning, as Dynolog does. Nothing is taken from a datagram whose length is
    not exactly what its header and its counts say.
"""

import struct
from dataclasses import dataclass
from enum import StrEnum

MAX_DATAGRAM_BYTES = 4096
MAX_PIDS = 64  # libkineto sends at most 11: itself and 10 ancestors
EVENTS, ACTIVITIES = 1, 2  # bits of Poll.wants
_HEADER = struct.Struct("<Q32s")
_POLL = struct.Struct("<iiq")
_REGISTRATION = struct.Struct("<iiq")
_COUNT = struct.Struct("<i")
_POLL_TYPE, _REGISTRATION_TYPE = b"req", b"ctxt"


class Drop(StrEnum):
    """Why a datagram is not answered: the values of the metric's label."""

    MALFORMED = "malformed"  # not one of libkineto's datagrams
    UNNAMED = "unnamed"  # its sender has no address that an answer may go to
    UNIDENTIFIED = "unidentified"  # the kernel names no process of this PID namespace as the sender, or it has ended
    TOO_OFTEN = "too_often"  # its process, or all processes of its user, send too much
    TOO_MANY = "too_many"  # too many processes poll
    LATE = "late"  # read so late that its sender no longer waits: an answer would lie there until the next poll
    PENDING = "pending"  # its sender was sent a configuration already, and may not have read it yet
    UNREAD = "unread"  # the sender does not read its answers, or has closed its socket


class BadDatagram(Exception):
    """The datagram is not one of libkineto's. The text says why."""


@dataclass(frozen=True, slots=True)
class Poll:
    """ "Is there a configuration for me?" wants: bits of EVENTS and ACTIVITIES. pids: claimed, its own first."""

    wants: int
    job_id: int
    pids: tuple[int, ...]

    @property
    def free(self) -> bool:
        """Whether its activity profiler can take a configuration; otherwise it is armed or records."""
        return bool(self.wants & ACTIVITIES)


@dataclass(frozen=True, slots=True)
class Registration:
    """An older libkineto says that it is there; all values are claims."""

    gpu: int
    pid: int
    job_id: int


def decode(datagram: bytes) -> Poll | Registration:
    """Decodes a datagram of a libkineto. Raises BadDatagram."""
    if not _HEADER.size <= len(datagram) <= MAX_DATAGRAM_BYTES:
        raise BadDatagram(f"{len(datagram)} bytes; expected {_HEADER.size} to {MAX_DATAGRAM_BYTES}")
    size, kind = _HEADER.unpack_from(datagram)
    body = datagram[_HEADER.size :]
    if size != len(body):
        raise BadDatagram(f"its header speaks of {size} bytes, but {len(body)} follow")
    if kind.startswith(_POLL_TYPE):
        return _poll(body)
    if kind.startswith(_REGISTRATION_TYPE):
        return _registration(body)
    raise BadDatagram("its type is neither req nor ctxt")


def _poll(body: bytes) -> Poll:
    if len(body) < _POLL.size:
        raise BadDatagram(f"a poll of {len(body)} bytes")
    wants, count, job_id = _POLL.unpack_from(body)
    if not 0 <= count <= MAX_PIDS:
        raise BadDatagram(f"a poll of {count} pids")
    if len(body) != _POLL.size + 4 * count:
        raise BadDatagram(f"a poll of {count} pids in {len(body)} bytes")
    return Poll(wants, job_id, struct.unpack_from(f"<{count}i", body, _POLL.size))


def _registration(body: bytes) -> Registration:
    if len(body) != _REGISTRATION.size:
        raise BadDatagram(f"a registration of {len(body)} bytes")
    return Registration(*_REGISTRATION.unpack(body))


def poll_answer(configuration: bytes = b"") -> bytes:
    """The answer to a poll; empty: there is no configuration."""
    return _HEADER.pack(len(configuration), _POLL_TYPE) + configuration


def registration_answer(count: int) -> bytes:
    """The answer to a registration: how many processes are registered for the same job and GPU; -1: it failed."""
    return _HEADER.pack(_COUNT.size, _REGISTRATION_TYPE) + _COUNT.pack(count)
