"""The callees of a sampled frame: the instructions of its code, its lines and the functions that they call.

Theory of operation
    A sample whose innermost Python frame is at a call instruction is inside the callee: a function in C, since one in
    Python would have a frame. Its name follows from the code object alone. Each instruction has a span in the source
    (line_tables.py). The text of a call begins with the text of the callable, so the callable was pushed by the nearest
    earlier instruction whose span begins with the call's and ends before it. If that loads a variable, it names the
    callee; if it loads an attribute, the instruction right before it may name the owner of the attribute.

    Two things have the span of a call without being one in the source: entering or leaving a with statement, and
    applying a decorator. Their callee comes from something else of the same span, so a call gets no name if it is
    preceded by an instruction of its span that does not put its arguments together. Nor does a call of anything but a
    variable or an attribute. The span of an attribute on a line of its own begins there, and a call's does so only
    sometimes: the callee gets no name either if an attribute of it is loaded next.

    Running bytecode is specialised: opcodes are replaced by others, while their arguments stay. The traced process
        reports which opcodes stand for which instruction, and how many units of cache follow it (`Opcodes`). Others
        (instrumented ones, those of a JIT) have an unknown length: reading ends there. The bytes come from a traced
        process and are not trusted; a name must consist of ASCII identifiers.

Finds the source line of an instruction of a Python function, from the raw tables of CPython's code objects.
    A table maps ranges of bytecode to lines, in the order of their offsets (bytes). There are three forms:

    9   co_lnotab (3.9): pairs (bytes: u8, lines: i8). The line changes by `lines` after `bytes` further bytes.
    10  co_linetable of 3.10: pairs (bytes: u8, lines: i8). The line changes first and holds for `bytes` bytes; -128:
        that range has no line.
    11  co_linetable of 3.11 and later: entries whose first byte consists of a 1 bit, a code of four bits, and the
        number of two-byte units less one. The code defines what follows: columns (0-9), the line's change in the code
        and columns (10-12), a variable-length change (13), such a change with end line and columns (14), or no line
        (15).

    Instructions without a line have the line of the preceding instructions. Tables come from a traced process and are
    not trusted: reading ends at the first invalid byte, and offsets that are not covered then have the function's first
    line. Reading takes one pass over the table's bytes.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

from kineto_trace.model.line_counts import MAX_LINE

T = TypeVar("T")
MAX_NAME = 128  # characters of a whole name
_UNIT_BYTES = 2
_FARTHEST = 256  # search limit for instructions whose span begins with a call's
_EARLIEST = (3, 11)  # first version whose tables have columns
_CALLS = frozenset({"PRECALL", "CALL", "CALL_KW", "CALL_FUNCTION_EX"})
_LOCALS = frozenset(
    {"LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"}
)
_VARIABLES = _LOCALS | {"LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"}
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"})
_ARGUMENTS = frozenset(  # instructions with the span of the call that put its arguments together
    {
        "PRECALL", "NOP", "BUILD_LIST", "BUILD_TUPLE", "BUILD_MAP", "BUILD_CONST_KEY_MAP", "LIST_APPEND", "LIST_EXTEND",
        "LIST_TO_TUPLE", "CALL_INTRINSIC_1", "DICT_MERGE", "DICT_UPDATE", "MAP_ADD",
    }
)  # fmt: skip
_OF_ANY_SPAN = frozenset({"PUSH_NULL", "KW_NAMES"})  # they may have the span of the callable, not of the call
_OF_KEYWORDS = frozenset({"CALL_KW", "BUILD_CONST_KEY_MAP"})  # the constant before them is such an instruction
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
LNOTAB, LINETABLE, LOCATIONS = 9, 10, 11
_NO_LINE = -128
_MAX_VARINT_BYTES = 6  # with six bits each: more than any line needs
_LONG, _NO_COLUMNS, _NONE = 14, 13, 15
_FIRST_ONE_LINE = 10
_EVERYTHING = 1 << 62
Stretch = tuple[int, int, int]  # first offset, offset after the end, line


@dataclass(frozen=True, slots=True)
class Opcodes:
    """The instruction set of one interpreter. name, caches: by opcode; opcodes that are not in `name` are unknown."""

    version: tuple[int, int]
    name: Mapping[int, str]
    caches: Mapping[int, int]

    def index(self, instruction: "Instruction") -> int:
        """Returns which name of the code object (of locals or others) this loads; flags are in the lowest bits."""
        shift = {"LOAD_GLOBAL": 1, "LOAD_ATTR": 1 if self.version >= (3, 12) else 0, "LOAD_SUPER_ATTR": 2}
        return instruction.argument >> shift.get(instruction.name, 0)


class OffsetTable(NamedTuple, Generic[T]):
    """Ranges of bytecode: the first offset of each, its value, and the end of the last one."""

    starts: list[int]
    values: list[T]
    end: int
    otherwise: T

    def at(self, offset: int) -> T:
        """Returns the value at this offset; `otherwise` if the table does not cover it."""
        place = bisect_right(self.starts, offset) - 1
        return self.values[place] if place >= 0 and offset < self.end else self.otherwise


class _Entry(NamedTuple):
    """An entry of a table of 3.11 and later. at: where the bytes after its first one begin."""

    start: int
    stop: int
    line: int
    code: int
    at: int


class Span(NamedTuple):
    """A span of the source: lines from 1, columns from 0 in bytes of UTF-8, the end exclusive."""

    line: int
    column: int
    end_line: int
    end_column: int


class Instruction(NamedTuple):
    """One instruction. offset: in bytes. span: None if it has none."""

    offset: int
    name: str
    argument: int
    span: Span | None


class Bytecode:
    """The instructions of one code object, which are read when a callee is first requested.

    raw: the bytecode as it runs.
    spans: its table of locations.
    names, variables: of its attributes and globals, and of its locals.
    """

    def __init__(
        self,
        known: Opcodes,
        raw: bytes,
        spans: bytes,
        first_line: int,
        *,
        names: Sequence[str],
        variables: Sequence[str],
    ) -> None:
        self._known = known
        self._raw, self._spans, self._first_line = raw, spans, first_line
        self._names, self._variables = names, variables

    @cached_property
    def _instructions(self) -> list[Instruction]:
        return _instructions(self._known, self._raw, span_table(self._first_line, self._spans))

    @cached_property
    def _offsets(self) -> list[int]:
        return [instruction.offset for instruction in self._instructions]

    def callee(self, offset: int) -> str:
        """Returns the callee of the instruction at this offset; "" if it is unknown or the instruction is not a call.

        A name that begins with a dot is an attribute of a value without a name.
        """
        place = bisect_left(self._offsets, offset)
        if place == len(self._offsets) or self._offsets[place] != offset:
            return ""
        call = self._instructions[place]
        if call.name not in _CALLS or call.span is None:
            return ""
        found = self._callable(place, call.span)
        name = self._name(found) if found >= 0 else ""
        return name if len(name) <= MAX_NAME else ""

    @cached_property
    def _by_start(self) -> Mapping[tuple[int, int], list[int]]:
        """Returns the places of instructions by the beginning of their spans."""
        found: dict[tuple[int, int], list[int]] = {}
        for place, instruction in enumerate(self._instructions):
            if instruction.span is not None:
                found.setdefault(instruction.span[:2], []).append(place)
        return found

    def _callable(self, call: int, span: Span) -> int:
        """Returns the place of the instruction that pushed the callable, or -1."""
        places = self._by_start[span[:2]]
        before = bisect_left(places, call)
        for place in reversed(places[max(before - _FARTHEST, 0) : before]):
            own = self._instructions[place].span
            if own is None or self._is_for_call(place):
                continue
            if own == span and self._instructions[place].name not in _ARGUMENTS:
                return -1
            if own[2:] < span[2:]:
                return -1 if self._has_attribute_loaded(place) else place
        return -1

    def _has_attribute_loaded(self, place: int) -> bool:
        following = (each.name for each in self._instructions[place + 1 : place + 3] if each.name not in _OF_ANY_SPAN)
        return next(following, "") in _ATTRIBUTES

    def _is_for_call(self, place: int) -> bool:
        name = self._instructions[place].name
        return name in _OF_ANY_SPAN or (name == "LOAD_CONST" and self._instructions[place + 1].name in _OF_KEYWORDS)

    def _name(self, place: int) -> str:
        """Returns the name that the instruction loads; "" if it has none."""
        parts: list[str] = []
        owner = ""
        for at in range(place, max(place - MAX_NAME, -1), -1):
            instruction = self._instructions[at]
            own = self._own_name(instruction)
            if not own:
                break
            if instruction.name in _VARIABLES:
                owner = own
                break
            parts.append(own)
            if not self._has_owner(at):
                break
        return ".".join([owner, *reversed(parts)])

    def _has_owner(self, place: int) -> bool:
        """Returns whether the instruction before one that loads an attribute pushed the owner of the attribute."""
        own, before = self._instructions[place].span, self._instructions[place - 1].span
        if not place or own is None or before is None or self._instructions[place].name == "LOAD_SUPER_ATTR":
            return False
        return before[:2] == own[:2] and before[2:] < own[2:]

    def _own_name(self, instruction: Instruction) -> str:
        """Returns the variable or attribute that this loads; "" if it loads none, or one whose name is not to
        be shown.
        """
        if instruction.name not in _VARIABLES and instruction.name not in _ATTRIBUTES:
            return ""
        names = self._variables if instruction.name in _LOCALS else self._names
        index = self._known.index(instruction)
        return names[index] if index < len(names) and _IDENTIFIER.fullmatch(names[index]) else ""


def opcodes(version: object, table: object) -> Opcodes | None:
    """Returns the instruction set reported by a process: {name: [units of cache, opcodes…]}; None without columns.

    version: its Python, such as "3.11.7". Entries of any other form are skipped.
    """
    told = re.match(r"(\d{1,3})\.(\d{1,3})\.", version) if isinstance(version, str) else None
    if told is None or not isinstance(table, Mapping) or (int(told[1]), int(told[2])) < _EARLIEST:
        return None
    name: dict[int, str] = {}
    caches: dict[int, int] = {}
    for base, numbers in table.items():
        if isinstance(numbers, list) and all(type(number) is int and 0 <= number < 256 for number in numbers):
            name.update(dict.fromkeys(numbers[1:], base))
            caches.update(dict.fromkeys(numbers[1:], *numbers[:1]))
    return Opcodes((int(told[1]), int(told[2])), name, caches)


def _instructions(known: Opcodes, raw: bytes, spans: OffsetTable[Span | None]) -> list[Instruction]:
    found = []
    at = extended = 0
    while at + 1 < len(raw):
        opcode, argument = raw[at], raw[at + 1] | extended << 8
        name = known.name.get(opcode)
        if name is None:
            break
        if name == "EXTENDED_ARG":
            extended = argument & 0xFFFFFF
        else:
            extended = 0
            found.append(Instruction(at, name, argument, spans.at(at)))
        at += _UNIT_BYTES * (1 + known.caches[opcode])
    return found


def line_table(kind: int, first_line: int, raw: bytes) -> OffsetTable[int]:
    """Returns the lines of one code object, the first one by default; none are known for an unknown kind."""
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
    return OffsetTable(starts, lines, end, first_line)


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


def span_table(first_line: int, raw: bytes) -> OffsetTable[Span | None]:
    """Returns the spans of one code object of Python 3.11 or later."""
    starts: list[int] = []
    spans: list[Span | None] = []
    end = 0
    for entry in _entries(raw, first_line):
        starts.append(entry.start)
        spans.append(_span(raw, entry))
        end = entry.stop
    return OffsetTable(starts, spans, end, None)


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
