"""The bytes of a request and of an answer."""

import struct

import pytest
from kinetod.dynolog_door.json_frames import MAX_REQUEST_BYTES, BadFrame, body_size, frame, read_object
from support.dynolog import recorded


def test_a_length_is_an_int32_in_the_hosts_byte_order() -> None:
    assert body_size(struct.pack("=i", 18)) == 18
    assert body_size(struct.pack("=i", MAX_REQUEST_BYTES)) == MAX_REQUEST_BYTES


@pytest.mark.parametrize("size", [0, -1, MAX_REQUEST_BYTES + 1, -(2**31), 2**31 - 1])
def test_a_length_that_no_request_has_is_refused_before_anything_is_read(size: int) -> None:
    with pytest.raises(BadFrame, match="bytes; a request has"):
        body_size(struct.pack("=i", size))


def test_what_dyno_sends_is_read() -> None:
    for sent in (recorded.STATUS, recorded.PAUSE, recorded.ITERATIONS, recorded.JOB, recorded.MEMORY):
        assert body_size(sent[:4]) == len(sent) - 4
        assert "fn" in read_object(sent[4:])
    assert read_object(b'\xef\xbb\xbf{"fn":1}') == {"fn": 1}


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"{}", b"1", b'{"a":NaN}', b'{"a":"\xff"}', b"[" * 60_000, b'"\\ud800"', recorded.QUOTE[4:]],
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadFrame):
        read_object(body)


def test_an_answer_is_compact_with_members_in_order() -> None:
    assert frame({"b": [1, 2], "a": "ü"}) == struct.pack("=i", 20) + b'{"a":"\xc3\xbc","b":[1,2]}'
    assert frame({"a": "\ud800"})[4:] == b'{"a":"?"}'
