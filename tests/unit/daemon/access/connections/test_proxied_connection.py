"""How many calls begin in what a client sends."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kinetod.access.connections.proxied_connection import PREFACE, Streams

DATA, HEADERS, SETTINGS, WINDOW_UPDATE = 0, 1, 4, 8  # RFC 9113, section 6


def frame(kind: int, size: int = 5, stream: int = 1) -> bytes:
    return size.to_bytes(3, "big") + bytes([kind, 0]) + stream.to_bytes(4, "big") + bytes([HEADERS]) * size


# Three calls, and frames whose contents look like headers.
SAID = PREFACE + b"".join(
    frame(kind, size)
    for kind, size in [(SETTINGS, 0), (HEADERS, 20), (DATA, 300), (HEADERS, 0), (WINDOW_UPDATE, 4), (HEADERS, 9)]
)


@given(st.lists(st.integers(0, len(SAID))))
def test_calls_are_counted_however_the_bytes_come(places: list[int]) -> None:
    streams = Streams()
    ends = [0, *sorted(places), len(SAID)]
    parts = [SAID[begin:end] for begin, end in itertools.pairwise(ends)]
    assert [streams.cut(part, 3)[0] for part in parts] == [len(part) for part in parts]
    assert streams.cut(frame(HEADERS), 0) == (0, 0)


@given(st.integers(1, 400), st.integers(0, 3))
def test_what_may_not_begin_yet_is_left_over_whole(most_read: int, granted: int) -> None:
    streams, waiting, passed, begun = Streams(), b"", b"", 0
    rest = SAID
    while rest or waiting:
        waiting, rest = waiting + rest[:most_read], rest[most_read:]
        size, calls = streams.cut(waiting, granted)
        assert calls <= granted
        if not rest and size < len(waiting):
            granted = 1
        passed, waiting, begun = passed + waiting[:size], waiting[size:], begun + calls
    assert (passed, begun) == (SAID, 3)


def test_the_bytes_before_the_call_that_is_too_many_pass() -> None:
    streams, first, second = Streams(), PREFACE + frame(SETTINGS, 0) + frame(HEADERS), frame(HEADERS) + frame(DATA)
    assert streams.cut(first + second, 1) == (len(first), 1)
    assert streams.cut(second, 1) == (len(second), 1)


@pytest.mark.parametrize(
    "said",
    [b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/1", b"x" * 1000, bytes([HEADERS]) * 1000, b"P" + bytes([HEADERS]) * 99],
)
def test_what_is_no_http_2_passes(said: bytes) -> None:
    streams = Streams()
    assert streams.cut(said, 0) == (len(said), 0)
    for later in (SAID, frame(HEADERS) * 3):
        assert streams.cut(later, 0) == (len(later), 0)
