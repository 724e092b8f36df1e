"""Fields of messages, and bytes that are no message."""

import pytest
from kineto_trace.decode.xspace import BYTES, FIXED32, FIXED64, VARINT, Damaged, fields, signed, step_over
from kineto_trace.formats.perfetto_proto import data, number

MESSAGE = number(1, 300) + data(2, "text") + b"\x19" + bytes(range(8)) + b"\x25" + bytes(4) + number(20_000, 1)


def test_every_wire_type_is_read() -> None:
    found = list(fields(MESSAGE, 0, len(MESSAGE)))
    assert found == [
        (1, VARINT, 300, 0),
        (2, BYTES, 5, 9),
        (3, FIXED64, int.from_bytes(bytes(range(8)), "little"), 0),
        (4, FIXED32, 0, 0),
        (20_000, VARINT, 1, 0),
    ]


def test_fields_are_stepped_over_one_by_one() -> None:
    at, places = 0, []
    while at < len(MESSAGE):
        at = step_over(MESSAGE, at, len(MESSAGE))
        places.append(at)
    assert places == [3, 9, 18, 23, len(MESSAGE)]


@pytest.mark.parametrize(
    "bad",
    [
        b"\x08",  # a number without bytes
        b"\x08" + b"\xff" * 10 + b"\x01",  # a number without end
        b"\x12\x05four",  # longer than the message
        b"\x12" + b"\xff" * 9 + b"\x01",  # as long as anything can be
        b"\x19" + bytes(7),
        b"\x0b",  # a group
        b"\x0f",  # no wire type
    ],
)
def test_what_is_no_message_is_damaged(bad: bytes) -> None:
    with pytest.raises(Damaged):
        list(fields(bad, 0, len(bad)))
    with pytest.raises(Damaged):
        step_over(bad, 0, len(bad))


def test_negative_numbers_are_those_that_int64_has() -> None:
    ((_, _, value, _),) = fields(number(1, -5), 0, len(number(1, -5)))
    assert signed(value) == -5
