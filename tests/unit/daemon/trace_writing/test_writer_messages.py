"""The writer's packets: what is not understood is refused."""

import struct

import pytest
from kinetod.trace_writing import writer_messages as messages
from kinetod.trace_writing.writer_messages import BadWriterMessage, PlaceTraces, TracesPlaced

ASKED = PlaceTraces(uid=1000, folder="/scratch", names=("t.json",))


def test_messages_read_back_the_same() -> None:
    assert messages.request(messages.encode(ASKED)) == ASKED
    look = PlaceTraces(uid=None, folder="/scratch")
    assert messages.request(messages.encode(look)) == look
    said = TracesPlaced(problems=("", "no"))
    assert messages.answer(messages.encode(said)) == said


def body(text: str, version: int = messages.VERSION) -> bytes:
    return struct.pack("<4sH", b"KWRI", version) + text.encode()


@pytest.mark.parametrize(
    ("packet", "why"),
    [
        (b"", "not a message"),
        (b"GET / HTTP/1.1", "not a message"),
        (body("{}", 9), "version 9"),
        (body("{}"), "cannot be decoded"),
        (body('{"type":"place","uid":-1,"folder":"/","names":[]}'), "cannot be decoded"),
        (body('{"type":"place","uid":4294967295,"folder":"/","names":[]}'), "cannot be decoded"),
        (body('{"type":"place","uid":1,"folder":"/","names":[""]}'), "cannot be decoded"),
        (body('{"type":"place","uid":1,"folder":"/","command":"sh"}'), "cannot be decoded"),
        (body("[" * 2000), "cannot be decoded"),
        (body("x" * messages.MAX_PACKET_BYTES), "a packet of more than"),
    ],
)
def test_what_is_no_request_is_named(packet: bytes, why: str) -> None:
    with pytest.raises(BadWriterMessage, match=why):
        messages.request(packet)
