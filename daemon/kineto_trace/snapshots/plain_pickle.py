"""Reads pickles that hold plain values: None, bools, numbers, text, bytes, lists, tuples and dicts. Pure.

Theory of operation
    A pickle is a program for a small stack machine. Python's own machine imports and calls whatever the program names.
    Even one that refuses every name can be crashed by deeply nested keys of dicts, or made to fill all memory by a few
    bytes that name a distant place of its memo. So this is a machine of our own: it has the opcodes that make plain
    values (protocols 2 to 5, and those that torch's C++ writes) and none that imports, calls, or requests anything
    outside. Keys of dicts are text or small integers. It does not recurse, and it counts the values it makes.

    Values can be shared, and a list can contain itself: code that walks over them must count, too.
"""

from collections.abc import Callable, Mapping
from functools import partial
from struct import Struct
from struct import error as StructError
from typing import Any

PROTOCOLS = range(2, 6)
MAGIC = 0x80  # the first byte of a pickle since protocol 2
MAX_VALUES = 20_000_000  # lists, tuples, dicts and places of the memo: about 100 bytes each
_MAX_KEY = 1 << 61

_UINT8, _UINT16, _UINT32, _UINT64 = Struct("<B"), Struct("<H"), Struct("<I"), Struct("<Q")
_INT32 = Struct("<i")
_CONSTANTS: Mapping[int, Any] = {0x4E: None, 0x88: True, 0x89: False}
_CODE: Mapping[int, str] = {
    **dict.fromkeys((0x63, 0x69, 0x93), "imports something"),
    **dict.fromkeys((0x52, 0x6F, 0x81, 0x92, 0x62), "calls something"),
    **dict.fromkeys((0x82, 0x83, 0x84), "uses an extension"),
    **dict.fromkeys((0x50, 0x51, 0x97), "refers to something outside the file"),
}


class NotPlainPickle(ValueError):
    """These bytes are not a pickle of plain values; the text has the reason."""


def load_plain(data: bytes, most_values: int = MAX_VALUES) -> Any:
    """Returns the value of a pickle. Raises NotPlainPickle."""
    if len(data) < 2 or data[0] != MAGIC or data[1] not in PROTOCOLS:
        raise NotPlainPickle("is not a pickle of protocol 2 to 5")
    try:
        return _Machine(data, most_values).run()
    except KeyError as exc:
        raise NotPlainPickle(f"is damaged: its memo has no entry {exc}") from None
    except (IndexError, StructError):
        raise NotPlainPickle("is truncated: its last bytes are missing, or it is damaged") from None


class _Machine:
    """The machine while it runs: the stack of values, those below marks, and the memo."""

    def __init__(self, data: bytes, most_values: int) -> None:
        self.data = data
        self.left = most_values
        self.at = 2
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Returns the value. Raises NotPlainPickle; IndexError and StructError at the end of the data or of a stack."""
        data, memo, stack, at = self.data, self.memo, self.stack, self.at
        steps = _STEPS
        while True:
            op = data[at]
            at += 1
            # Most of a snapshot: keys seen before, and numbers.
            if op == 0x68:  # BINGET
                stack.append(memo[data[at]])
                at += 1
            elif op == 0x4A:  # BININT
                stack.append(_INT32.unpack_from(data, at)[0])
                at += 4
            elif op == 0x4B:  # BININT1
                stack.append(data[at])
                at += 1
            elif op == 0x6A:  # LONG_BINGET
                stack.append(memo[_UINT32.unpack_from(data, at)[0]])
                at += 4
            elif op in _CONSTANTS:
                stack.append(_CONSTANTS[op])
            elif op == 0x2E:  # STOP
                if len(stack) != 1 or self.marks:
                    raise NotPlainPickle("is damaged: it ends with more than one value, or with none")
                return stack[0]
            elif op in steps:
                self.at = at
                steps[op](self)
                at, stack = self.at, self.stack
            else:
                what = _CODE.get(op, f"has the opcode {op:#04x}")
                raise NotPlainPickle(f"is not plain data: it {what} at byte {at - 1}, so it was not read")

    def memoize(self) -> None:
        self._count()
        self.memo[len(self.memo)] = self.stack[-1]

    def put(self, size: Struct) -> None:
        self._count()
        place = self._size(size)
        self.at += size.size
        self.memo[place] = self.stack[-1]

    def empty(self, kind: type) -> None:
        self._count()
        self.stack.append(kind())

    def mark(self) -> None:
        self._count()
        self.marks.append(self.stack)
        self.stack = []

    def set_items(self) -> None:
        items = self._marked()
        _set(self.stack[-1], items)

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        _set(self.stack[-1], [key, value])

    def extend(self) -> None:
        items = self._marked()
        _listed(self.stack[-1]).extend(items)

    def append(self) -> None:
        item = self.stack.pop()
        _listed(self.stack[-1]).append(item)

    def marked_tuple(self) -> None:
        items = self._marked()
        self.stack.append(tuple(items))

    def frame(self) -> None:
        self.at += 8  # skips its length: everything is in memory

    def number(self, form: Struct) -> None:
        self.stack.append(form.unpack_from(self.data, self.at)[0])
        self.at += form.size

    def integer(self, size: Struct) -> None:
        self.stack.append(int.from_bytes(self._taken(size), "little", signed=True))

    def text(self, size: Struct) -> None:
        self.stack.append(self._taken(size).decode("utf-8", "replace"))

    def data_bytes(self, size: Struct) -> None:
        self.stack.append(self._taken(size))

    def small_tuple(self, count: int) -> None:
        self._count()
        if len(self.stack) < count:
            raise IndexError
        first = len(self.stack) - count
        self.stack[first:] = [tuple(self.stack[first:])]

    def _marked(self) -> list[Any]:
        """Pops the values above the last mark."""
        items, self.stack = self.stack, self.marks.pop()
        return items

    def _size(self, form: Struct) -> int:
        """Returns the next number."""
        (size,) = form.unpack_from(self.data, self.at)
        return int(size)

    def _taken(self, size: Struct) -> bytes:
        """Returns as many bytes as the next number says."""
        start = self.at + size.size
        self.at = start + self._size(size)
        if self.at > len(self.data):
            raise IndexError
        return self.data[start : self.at]

    def _count(self) -> None:
        """Counts a value that stays in memory. Raises NotPlainPickle."""
        self.left -= 1
        if self.left < 0:
            raise NotPlainPickle("has too many parts: torch did not write it, or the recording was far too long")


_Step = Callable[[_Machine], None]
_STEPS: Mapping[int, _Step] = {
    0x94: _Machine.memoize,
    0x8A: partial(_Machine.integer, size=_UINT8),
    0x4D: partial(_Machine.number, form=_UINT16),
    0x7D: partial(_Machine.empty, kind=dict),
    0x28: _Machine.mark,
    0x75: _Machine.set_items,
    0x5D: partial(_Machine.empty, kind=list),
    0x65: _Machine.extend,
    0x8C: partial(_Machine.text, size=_UINT8),
    0x58: partial(_Machine.text, size=_UINT32),
    0x8D: partial(_Machine.text, size=_UINT64),
    0x71: partial(_Machine.put, size=_UINT8),
    0x72: partial(_Machine.put, size=_UINT32),
    0x73: _Machine.set_item,
    0x61: _Machine.append,
    0x95: _Machine.frame,
    0x74: _Machine.marked_tuple,
    0x29: partial(_Machine.small_tuple, count=0),
    0x85: partial(_Machine.small_tuple, count=1),
    0x86: partial(_Machine.small_tuple, count=2),
    0x87: partial(_Machine.small_tuple, count=3),
    0x47: partial(_Machine.number, form=Struct(">d")),
    0x8B: partial(_Machine.integer, size=_UINT32),
    0x43: partial(_Machine.data_bytes, size=_UINT8),
    0x42: partial(_Machine.data_bytes, size=_UINT32),
    0x8E: partial(_Machine.data_bytes, size=_UINT64),
}


def _listed(value: Any) -> list[Any]:
    if type(value) is not list:
        raise NotPlainPickle(f"is damaged: it appends to a value of type {type(value).__name__}")
    return value


def _set(value: Any, items: list[Any]) -> None:
    """Sets keys and values, one after the other. Raises NotPlainPickle."""
    if type(value) is not dict or len(items) % 2:
        raise NotPlainPickle(
            f"is damaged: it sets {len(items)} keys and values on a value of type {type(value).__name__}"
        )
    for key in items[::2]:
        if type(key) is not str and not (type(key) is int and -_MAX_KEY < key < _MAX_KEY):
            raise NotPlainPickle(f"is not plain data: a dict has a key of type {type(key).__name__}")
    value.update(zip(items[::2], items[1::2], strict=True))
