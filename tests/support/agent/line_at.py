"""Lines of instructions from the raw line tables in stack records: a small decoder for tests, CPython 3.9 to 3.15."""

from typing import Iterator, Optional, Tuple

Range = Tuple[int, int, Optional[int]]  # first byte of bytecode, one behind the last, line


def line_at(kind: int, table: bytes, first_line: int, offset: int) -> int:
    """The line of the instruction at `offset`; the first line if the table does not tell."""
    if offset < 0 or kind == 0:
        return first_line
    ranges = {9: _lnotab, 10: _linetable_310, 11: _linetable_311}[kind](table, first_line)
    for start, end, line in ranges:
        if start <= offset < end and line is not None:
            return line
    return first_line


def _signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def _lnotab(table: bytes, line: int) -> Iterator[Range]:
    address = start = 0
    for step, lines in zip(table[::2], table[1::2]):
        address += step
        if lines:
            yield start, address, line
            start = address
        line += _signed(lines)
    yield start, 1 << 31, line


def _linetable_310(table: bytes, line: int) -> Iterator[Range]:
    start = 0
    for step, lines in zip(table[::2], table[1::2]):
        known = _signed(lines) != -128
        line += _signed(lines) if known else 0
        yield start, start + step, line if known else None
        start += step


def _linetable_311(table: bytes, line: int) -> Iterator[Range]:
    data = iter(table)
    start = 0
    for first in data:
        code, size = first >> 3 & 15, 2 * ((first & 7) + 1)
        if code in (13, 14):
            line += _signed_number(data)
            for _ in range(3 if code == 14 else 0):
                _number(data)
        elif code != 15:
            line += max(code - 10, 0)
            for _ in range(2 if code >= 10 else 1):
                next(data)
        yield start, start + size, None if code == 15 else line
        start += size


def _number(data: Iterator[int]) -> int:
    value = shift = 0
    while True:
        byte = next(data)
        value |= (byte & 63) << shift
        shift += 6
        if not byte & 64:
            return value


def _signed_number(data: Iterator[int]) -> int:
    value = _number(data)
    return -(value >> 1) if value & 1 else value >> 1
