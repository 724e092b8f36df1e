import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kinetod.kineto_ipc.datagrams import (
    MAX_DATAGRAM_BYTES,
    MAX_PIDS,
    BadDatagram,
    Poll,
    Registration,
    decode,
    poll_answer,
    registration_answer,
)
from support.peers import libkineto

INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)


def test_the_poll_that_torch_sends_is_read() -> None:
    recorded = (
        bytes.fromhex("2000000000000000") + b"req".ljust(32, b"\0")
        + bytes.fromhex("03000000" "04000000" "4d00000000000000" "e0070000" "df070000" "01000000" "00000000")
    )  # fmt: skip
    assert decode(recorded) == Poll(3, 77, (2016, 2015, 1, 0))
    assert libkineto.poll(3, pids=(2016, 2015, 1, 0), job=77) == recorded


@given(INT32, INT64, st.lists(INT32, max_size=MAX_PIDS))
def test_every_poll_is_read_as_it_was_written(wants: int, job: int, pids: list[int]) -> None:
    read = decode(libkineto.poll(wants, pids=pids, job=job))
    assert read == Poll(wants, job, tuple(pids))
    assert isinstance(read, Poll) and read.free == bool(wants & 2)


@given(INT32, INT32, INT64)
def test_every_registration_is_read_as_it_was_written(gpu: int, pid: int, job: int) -> None:
    assert decode(libkineto.registration(gpu, pid, job)) == Registration(gpu, pid, job)


@given(st.binary(max_size=MAX_DATAGRAM_BYTES + 10))
def test_any_bytes_are_read_or_refused(datagram: bytes) -> None:
    try:
        decode(datagram)
    except BadDatagram as exc:
        assert str(exc)


@given(st.data())
def test_a_poll_that_lies_about_a_length_is_refused(data: st.DataObject) -> None:
    good = libkineto.poll(pids=range(data.draw(st.integers(0, 11))))
    at, width = data.draw(st.sampled_from([(0, 8), (44, 4)]))
    before = int.from_bytes(good[at : at + width], "little")
    said = data.draw(st.integers(0, 2 ** (8 * width) - 1).filter(lambda said: said != before))
    with pytest.raises(BadDatagram):
        decode(good[:at] + said.to_bytes(width, "little") + good[at + width :])


@given(st.integers(0, 120), st.integers(0, 11))
def test_a_poll_cut_short_is_refused(length: int, pids: int) -> None:
    whole = libkineto.poll(pids=range(pids))
    if length < len(whole):
        with pytest.raises(BadDatagram):
            decode(whole[:length])


@pytest.mark.parametrize(
    ("datagram", "problem"),
    [
        (b"", "0 bytes; expected 40 to 4096"),
        (bytes(39), "39 bytes; expected 40 to 4096"),
        (bytes(4097), "4097 bytes; expected 40 to 4096"),
        (bytes(40), "its type is neither req nor ctxt"),
        (struct.pack("<Q", 0) + b"req".ljust(32, b"\0"), "a poll of 0 bytes"),
        (libkineto.poll(pids=[1], count=2), "a poll of 2 pids in 20 bytes"),
        (libkineto.poll(count=-1), "a poll of -1 pids"),
        (libkineto.poll(count=2**31 - 1), "a poll of 2147483647 pids"),
        (libkineto.poll(pids=range(65)), "a poll of 65 pids"),
        (libkineto.registration(0, 1, 2)[:-1], "its header speaks of 16 bytes, but 15 follow"),
        (struct.pack("<Q", 0) + b"ctxt".ljust(32, b"\0"), "a registration of 0 bytes"),
    ],
)
def test_what_is_wrong_is_said(datagram: bytes, problem: str) -> None:
    with pytest.raises(BadDatagram) as refused:
        decode(datagram)
    assert str(refused.value) == problem


def test_a_poll_without_pids_is_a_poll() -> None:
    assert decode(libkineto.poll(2)) == Poll(2, 0, ())


def test_types_are_compared_by_their_beginning_as_dynolog_does() -> None:
    assert decode(libkineto.poll().replace(b"req\0", b"reqX")) == Poll(3, 0, ())


def test_answers_are_header_and_body() -> None:
    assert poll_answer() == bytes(8) + b"req".ljust(32, b"\0")
    assert poll_answer(b"A=1\n") == struct.pack("<Q", 4) + b"req".ljust(32, b"\0") + b"A=1\n"
    assert registration_answer(-1) == struct.pack("<Q", 4) + b"ctxt".ljust(32, b"\0") + b"\xff\xff\xff\xff"
