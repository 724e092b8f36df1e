"""Finds what a call instruction of a Python function calls, as the source writes it: "pickle.dumps", ".tolist".

Theory of operation
    A sample whose innermost Python frame stands at a call instruction is inside what that calls: a function in C, since
    one in Python would have a frame. Its name follows from the code object alone. Each instruction has a span in the
    source (line_tables.py). The text of a call begins with the text of what is called, so the callable was pushed by
    the nearest earlier instruction whose span begins with the call's and ends before it. If that loads a variable, it
    names the callee; if it loads an attribute, the instruction right before it may name what that is an attribute of.

    Two things have the span of a call without being one in the source: entering or leaving a with statement, and a
    decorator that is applied. What they call comes from something else of the same span, so that a call gets no name if
    an instruction of its span comes before it that does not put its arguments together. Nor does a call of anything but
    a variable or an attribute. The span of an attribute on a line of its own begins there, and a call's does so only
    sometimes: what is found gets no name either if an attribute of it is loaded next.

    Bytecode that runs is specialised: opcodes are replaced by others, while their arguments stay. The traced process
    tells which opcodes stand for which instruction, and how many units of cache follow it (`Opcodes`). Others
    (instrumented ones, those of a JIT) have an unknown length: reading ends there. The bytes come from a traced process
    and are not trusted; a name must be made of ASCII identifiers.
"""

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from kineto_trace.decode.python.line_tables import Span, SpanTable, span_table

MAX_NAME = 128  # characters of a whole name
_UNIT_BYTES = 2
_FARTHEST = 256  # instructions whose span begins with a call's that are looked at
_EARLIEST = (3, 11)  # whose tables have columns
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
_OF_ANY_SPAN = frozenset({"PUSH_NULL", "KW_NAMES"})  # they are for a call, too, but may have the span of what is called
_OF_KEYWORDS = frozenset({"CALL_KW", "BUILD_CONST_KEY_MAP"})  # the constant before them is such an instruction
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


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


class Instruction(NamedTuple):
    """One instruction. offset: in bytes. span: None if it has none."""

    offset: int
    name: str
    argument: int
    span: Span | None


def opcodes(version: object, table: object) -> Opcodes | None:
    """Returns the instruction set that a process told: {name: [units of cache, opcodes…]}; None without columns.

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


class Bytecode:
    """The instructions of one code object, which are read when a callee is first requested.

    raw: as it runs. spans: its table of locations. names, variables: of its attributes and globals, and of its locals.
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
        """Returns what the instruction at this offset calls; "" if it is no call, or that is not known.

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
        """The places of instructions by where their spans begin."""
        found: dict[tuple[int, int], list[int]] = {}
        for place, instruction in enumerate(self._instructions):
            if instruction.span is not None:
                found.setdefault(instruction.span[:2], []).append(place)
        return found

    def _callable(self, call: int, span: Span) -> int:
        """The place of the instruction that pushed what is called; -1: unknown."""
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
        """The name of what the instruction loads; "" if it has none."""
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
        """Whether the instruction before one that loads an attribute pushed what that is an attribute of."""
        own, before = self._instructions[place].span, self._instructions[place - 1].span
        if not place or own is None or before is None or self._instructions[place].name == "LOAD_SUPER_ATTR":
            return False
        return before[:2] == own[:2] and before[2:] < own[2:]

    def _own_name(self, instruction: Instruction) -> str:
        """The variable or attribute that this loads; "" if it loads none, or one whose name is not to be shown."""
        if instruction.name not in _VARIABLES and instruction.name not in _ATTRIBUTES:
            return ""
        names = self._variables if instruction.name in _LOCALS else self._names
        index = self._known.index(instruction)
        return names[index] if index < len(names) and _IDENTIFIER.fullmatch(names[index]) else ""


def _instructions(known: Opcodes, raw: bytes, spans: SpanTable) -> list[Instruction]:
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
            found.append(Instruction(at, name, argument, spans.span(at)))
        at += _UNIT_BYTES * (1 + known.caches[opcode])
    return found
