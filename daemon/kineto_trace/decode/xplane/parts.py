"""Takes the messages of a source of XLA apart: each lies behind its length."""

from collections.abc import Iterator

from kineto_agent.protocol.records import PART_HEAD


def parts(data: bytes) -> Iterator[bytes]:
    """Yields the messages, the last one perhaps truncated."""
    at = 0
    while at + PART_HEAD.size <= len(data):
        (size,) = PART_HEAD.unpack_from(data, at)
        at += PART_HEAD.size
        yield data[at : at + size]
        at += size
