"""Finds the source line of an instruction of a Python function, from the raw tables of CPython's code objects.

Theory of operation
    A table maps stretches of bytecode to lines, in the order of their offsets (bytes). There are three forms:

    9   co_lnotab (3.9): pairs (bytes: u8, lines: i8). The line changes by `lines` after `bytes` further bytes.
    10  co_linetable of 3.10: pairs (bytes: u8, lines: i8). The line changes first and holds for `bytes` bytes; -128:
        that stretch has no line.
    11  co_linetable of 3.11 and later: entries whose first byte consists of a 1 bit, a code of four bits, and the
        number of two-byte units less one. The code defines what follows: columns (0-9), the line's change in the code
        and columns (10-12), a variable-length change (13), such a change with end line and columns (14), or no line
        (15).

    Instructions without a line have the line of the preceding instructions. Tables come from a traced process and are
    not trusted: reading ends at the first invalid byte, and offsets that are not covered then have the function's first
    line. Reading takes one pass over the table's bytes.
"""

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from kineto_trace.model.line_counts import MAX_LINE

LNOTAB, LINETABLE, LOCATIONS = 9, 10, 11
_NO_LINE = -128
_MAX_VARINT_BYTES = 6  # with six bits each: more than any line needs
_LONG, _NO_COLUMNS, _NONE = 14, 13, 15
_FIRST_ONE_LINE = 10
_EVERYTHING = 1 << 62


class LineTable(NamedTuple):
    """Stretches of bytecode: the first offset of each, its line, and the end of the last one."""

    first_line: int
    starts: list[int]
    lines: list[int]
    end: int

    def line(self, offset: int) -> int:
        """Returns the line of the instruction at this offset; the first line if the table does not cover it."""
        place = bisect_right(self.starts, offset) - 1
        return self.lines[place] if place >= 0 and offset < self.end else self.first_line


def line_table(kind: int, first_line: int, raw: bytes) -> LineTable:
    """Returns the table of one code object; an empty one for an unknown kind."""
    starts: list[int] = []
    lines: list[int] = []
    end = 0
    for start, stop, line in _STRETCHES[kind](raw, first_line) if kind in _STRETCHES else ():
        if not 0 <= line <= MAX_LINE:
            break
        shown = line or first_line  # a module's first instruction has line 0
        if not lines or lines[-1] != shown:
            starts.append(start)
            lines.append(shown)
        end = stop
    return LineTable(first_line, starts, lines, end)


Stretch = tuple[int, int, int]  # first offset, offset after the end, line


def _lnotab(raw: bytes, line: int) -> Iterator[Stretch]:
    at = offset = 0
    for at in range(0, len(raw) - 1, 2):
        if raw[at]:
            yield offset, offset + raw[at], line
            offset += raw[at]
        line += _signed(raw[at + 1])
    yield offset, _EVERYTHING, line  # the last line holds to the end of the code


def _linetable(raw: bytes, line: int) -> Iterator[Stretch]:
    offset = 0
    for at in range(0, len(raw) - 1, 2):
        change = _signed(raw[at + 1])
        line += change if change != _NO_LINE else 0
        if raw[at]:
            yield offset, offset + raw[at], line
            offset += raw[at]


def _locations(raw: bytes, line: int) -> Iterator[Stretch]:
    for entry in _entries(raw, line):
        yield entry.start, entry.stop, entry.line


class _Entry(NamedTuple):
    """An entry of a table of 3.11 and later. at: where the bytes after its first one begin."""

    start: int
    stop: int
    line: int
    code: int
    at: int


def _entries(raw: bytes, line: int) -> Iterator[_Entry]:
    at = offset = 0
    while at < len(raw) and raw[at] & 0x80:
        code, length = raw[at] >> 3 & 15, ((raw[at] & 7) + 1) * 2
        at += 1
        if code in (_NO_COLUMNS, _LONG):
            change, _ = _signed_varint(raw, at)
            if change is None:
                return
            line += change
        elif _FIRST_ONE_LINE <= code < _NO_COLUMNS:
            line += code - _FIRST_ONE_LINE
        yield _Entry(offset, offset + length, line, code, at)
        while at < len(raw) and not raw[at] & 0x80:  # only the first byte of an entry has that bit
            at += 1
        offset += length


class Span(NamedTuple):
    """A stretch of the source: lines from 1, columns from 0 in bytes of UTF-8, the end exclusive."""

    line: int
    column: int
    end_line: int
    end_column: int


class SpanTable(NamedTuple):
    """Stretches of bytecode: the first offset of each, its span, and the end of the last one."""

    starts: list[int]
    spans: list[Span | None]
    end: int

    def span(self, offset: int) -> Span | None:
        """Returns the span of the instruction at this offset; None if it has none or the table does not cover it."""
        place = bisect_right(self.starts, offset) - 1
        return self.spans[place] if place >= 0 and offset < self.end else None


def span_table(first_line: int, raw: bytes) -> SpanTable:
    """Returns the spans of one code object of Python 3.11 or later."""
    starts: list[int] = []
    spans: list[Span | None] = []
    end = 0
    for entry in _entries(raw, first_line):
        starts.append(entry.start)
        spans.append(_span(raw, entry))
        end = entry.stop
    return SpanTable(starts, spans, end)


def _span(raw: bytes, entry: _Entry) -> Span | None:
    line, code, at = entry.line, entry.code, entry.at
    if code == _LONG:
        numbers = []
        _, at = _signed_varint(raw, at)
        for _ in range(3):
            number, at = _varint(raw, at)
            if number is None:
                return None
            numbers.append(number)
        more, column, end = numbers  # columns are counted from 1; 0: none
        return Span(line, column - 1, line + more, end - 1) if column and end else None
    if code < _FIRST_ONE_LINE and at < len(raw):
        column = code << 3 | raw[at] >> 4 & 7
        return Span(line, column, line, column + (raw[at] & 15))
    if _FIRST_ONE_LINE <= code < _NO_COLUMNS and at + 1 < len(raw):
        return Span(line, raw[at], line, raw[at + 1])
    return None


def _signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def _signed_varint(raw: bytes, at: int) -> tuple[int | None, int]:
    """Returns the number that begins there, or None, and where it ends. The number's lowest bit is the sign."""
    value, end = _varint(raw, at)
    if value is None:
        return None, end
    return -(value >> 1) if value & 1 else value >> 1, end


def _varint(raw: bytes, at: int) -> tuple[int | None, int]:
    """Returns the number that begins there, or None, and where it ends.

    It has six bits per byte, lowest first; bit 6: more bytes follow.
    """
    value = 0
    for place, byte in enumerate(raw[at : at + _MAX_VARINT_BYTES]):
        value |= (byte & 63) << 6 * place
        if byte & 0x80:
            break
        if not byte & 64:
            return value, at + place + 1
    return None, at


_STRETCHES = {LNOTAB: _lnotab, LINETABLE: _linetable, LOCATIONS: _locations}
