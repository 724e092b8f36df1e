"""Reads serialised protobuf messages field by field, from hostile input, too.

Theory of operation
    A message is a sequence of fields: a varint with number and wire type, then the value. A reader asks for the fields
    of a message and descends into those that it knows; the others are stepped over. No message is kept: values are
    numbers and places in the data. What does not fit into its message, or is no field, raises Damaged; so no length of
    the input is trusted, and the work is bounded by its size: every step forward takes at least one byte.
"""

from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
_FIXED = {FIXED64: 8, FIXED32: 4}  # bytes
_MOST_SHIFT = 63
_MASK = (1 << 64) - 1


class Damaged(ValueError):
    """The bytes are not such a message."""


def varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Returns the number that begins there, and the place after it. Raises Damaged."""
    value = shift = 0
    while True:
        if at >= end or shift > _MOST_SHIFT:
            raise Damaged
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & _MASK, at
        shift += 7


def fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields (field number, wire type, value or begin, end) of each field of the message in data[at:end].

    Numbers: value and 0; FIXED64 and FIXED32 likewise, as unsigned. BYTES: where they begin and end. Raises Damaged.
    """
    if not 0 <= at <= end <= len(data):
        raise Damaged
    while at < end:
        tag, at = varint(data, at, end)
        kind = tag & 7
        if kind == VARINT:
            value, at = varint(data, at, end)
            yield tag >> 3, kind, value, 0
        elif kind == BYTES:
            size, at = varint(data, at, end)
            if size > end - at:
                raise Damaged
            yield tag >> 3, kind, at, at + size
            at += size
        elif kind in _FIXED:
            size = _FIXED[kind]
            if size > end - at:
                raise Damaged
            yield tag >> 3, kind, int.from_bytes(data[at : at + size], "little"), 0
            at += size
        else:
            raise Damaged


def step_over(data: bytes, at: int, end: int) -> int:
    """Returns the place after the field that begins there. Raises Damaged."""
    tag, at = varint(data, at, end)
    kind = tag & 7
    if kind == VARINT:
        return varint(data, at, end)[1]
    size, at = varint(data, at, end) if kind == BYTES else (_FIXED.get(kind, end + 1), at)
    if size > end - at:
        raise Damaged
    return at + size


def numbers(data: bytes, kind: int, value: int, end: int) -> list[int]:
    """Returns the values of a repeated number, of which one field may hold one or, packed, many. Raises Damaged."""
    if kind == VARINT:
        return [value]
    found = []
    at = value
    while at < end:
        number, at = varint(data, at, end)
        found.append(number)
    return found


def signed(value: int) -> int:
    """Returns an int64 that was written as a varint."""
    return value - (1 << 64) if value >> 63 else value
