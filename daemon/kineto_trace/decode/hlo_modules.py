"""Reads compiled modules of XLA (HloModuleProto) and the arguments of their instructions, without protobuf.

Field numbers are those of xla/service/hlo.proto.

Theory of operation
    A module has computations, and a scheduled module states in which order the instructions of each are launched. Only
    what matters for that is kept: instructions that launch something, and those that run other computations (loops,
    branches, calls) in their place. The contents of a fusion are dropped: it is one kernel.

    XLA makes one kernel for all equal instructions and names it after one of them; deduplicated_name lists these
    instructions.

The HLO instruction behind an activity, as arguments in JSON: {"hlo_op": …, "hlo_module": …}, without the braces.

Their names are those of XLA's own profiles, so that users of XProf find them again: hlo_op, hlo_module. op_name is the
path of the JAX operation ("jit(update)/jvp()/dot_general"), source the line of the program that it came from.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kineto_agent.protocol.records import HLO_MODULES_FORMAT, PART_HEAD

from kineto_trace.decode.decoded import EVERYTHING, Decoded, DecodeWindow
from kineto_trace.decode.xspace import BYTES, VARINT, Damaged, fields, numbers
from kineto_trace.model.hlo_module import HloInstruction, HloModule, Launch
from kineto_trace.model.trace import NO_STRING, StringTable
from kineto_trace.spool.raw_records import RawSource

FORMAT = HLO_MODULES_FORMAT
MOST_TEXT = 300  # characters of a name
_SILENT = frozenset(
    (
        "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency", "opt-barrier",
        "domain", "partition-id", "replica-id", "async-update", "async-done", "copy-done", "all-reduce-done",
        "all-gather-done", "collective-permute-done", "send-done", "recv-done",
    )
)  # fmt: skip
_COLLECTIVE = re.compile(r"(?:all-|reduce-scatter|collective-|ragged-all|send|recv)")
_LAUNCHES = {
    "fusion": Launch.FUSION,
    "copy": Launch.COPY,
    "copy-start": Launch.COPY,
    "call": Launch.CALL,
    "async-start": Launch.CALL,
    "while": Launch.LOOP,
    "conditional": Launch.BRANCH,
}
KEYS = ("hlo_op", "hlo_module", "op_name", "source")
MOST_DISTINCT = 200_000  # texts of one trace


@dataclass(slots=True)
class _Parsed:
    name: str = ""
    opcode: str = ""
    op_name: str = ""
    file: str = ""
    line: int = 0
    same_kernel: str = ""
    frame: int = 0
    number: int = 0
    called: tuple[int, ...] = ()


class _Frames:
    """The lines of the program that a module's instructions refer to by number, each counted from 1."""

    def __init__(self, data: bytes = b"", begin: int = 0, end: int = 0) -> None:
        self._files: list[str] = []
        self._locations: list[tuple[int, int]] = []  # file, line
        self._frames: list[int] = []  # location
        for number, kind, first, last in fields(data, begin, end):
            if kind != BYTES:
                continue
            if number == 1:
                self._files.append(_text(data, first, last))
            elif number == 3:
                values = _small(data, first, last)
                self._locations.append((values.get(1, 0), values.get(3, 0)))
            elif number == 4:
                self._frames.append(_small(data, first, last).get(1, 0))

    def place(self, frame: int) -> str:
        """Returns "file:line" of a frame; "" if there is none."""
        location = self._frames[frame - 1] if 0 < frame <= len(self._frames) else 0
        file, line = self._locations[location - 1] if 0 < location <= len(self._locations) else (0, 0)
        return f"{self._files[file - 1]}:{line}" if 0 < file <= len(self._files) else ""


class HloArguments:
    """Turns the values of KEYS into numbers of ready-made texts. full: some values did not fit."""

    def __init__(self, strings: StringTable) -> None:
        self._strings = strings
        self._numbers: dict[tuple[str, ...], int] = {}
        self.full = False

    def number(self, *values: str) -> int:
        """Returns the number of the text in the string table; NO_STRING if all values are empty."""
        found = self._numbers.get(values)
        if found is not None:
            return found
        if len(self._numbers) >= MOST_DISTINCT:
            self.full = True
            return NO_STRING
        members = [
            f"{json.dumps(key)}:{json.dumps(value[:MOST_TEXT], ensure_ascii=False)}"
            for key, value in zip(KEYS, values, strict=False)
            if value
        ]
        found = self._numbers[values] = self._strings.add(",".join(members)) if members else NO_STRING
        return found


def decode(source: RawSource, _strings: StringTable, _window: DecodeWindow = EVERYTHING) -> Decoded:
    """Decodes all modules of a source, without tables: structure/hlo_kernels.py finds which kernels belong to them."""
    data = b"".join(source.buffers())
    modules: list[HloModule] = []
    damaged = 0
    for part in parts(data):
        try:
            modules.append(read_module(part))
        except Damaged:
            damaged += 1
    return Decoded(tables={}, records=len(modules), undecoded=damaged, hlo_modules=tuple(modules))


def read_module(data: bytes) -> HloModule:
    """Reads a serialised HloModuleProto. Raises Damaged."""
    name, entry = "", 0
    computations: dict[int, dict[int, _Parsed]] = {}
    order: dict[int, list[int]] = {}
    frames = _Frames()
    for number, kind, begin, end in fields(data, 0, len(data)):
        if number == 1 and kind == BYTES:
            name = _text(data, begin, end)
        elif number == 6 and kind == VARINT:
            entry = begin
        elif number == 3 and kind == BYTES:
            key, instructions = _computation(data, begin, end)
            computations[key] = instructions
        elif number == 7 and kind == BYTES:
            order = _schedule(data, begin, end)
        elif number == 17 and kind == BYTES:
            frames = _Frames(data, begin, end)
    return HloModule(
        name,
        entry,
        {key: _launching(found, order.get(key), frames) for key, found in computations.items()},
    )


def _computation(data: bytes, begin: int, end: int) -> tuple[int, dict[int, _Parsed]]:
    key, instructions = 0, {}
    for number, kind, first, last in fields(data, begin, end):
        if number == 5 and kind == VARINT:
            key = first
        elif number == 2 and kind == BYTES:
            found = _instruction(data, first, last)
            instructions[found.number] = found
    return key, instructions


def _instruction(data: bytes, begin: int, end: int) -> _Parsed:
    found, called = _Parsed(), []
    for number, kind, first, last in fields(data, begin, end):
        if number == 1 and kind == BYTES:
            found.name = _text(data, first, last)
        elif number == 2 and kind == BYTES:
            found.opcode = _text(data, first, last)
        elif number == 7 and kind == BYTES:
            _metadata(found, data, first, last)
        elif number == 35 and kind == VARINT:
            found.number = first
        elif number == 38:
            called += numbers(data, kind, first, last)
    found.called = tuple(called)
    return found


def _metadata(found: _Parsed, data: bytes, begin: int, end: int) -> None:
    for number, kind, first, last in fields(data, begin, end):
        if number == 2 and kind == BYTES:
            found.op_name = _text(data, first, last)
        elif number == 3 and kind == BYTES:
            found.file = _text(data, first, last)
        elif number == 4 and kind == VARINT:
            found.line = first
        elif number == 12 and kind == BYTES:
            found.same_kernel = _text(data, first, last)
        elif number == 15 and kind == VARINT:
            found.frame = first


def _schedule(data: bytes, begin: int, end: int) -> dict[int, list[int]]:
    """Returns the ids of the instructions of each computation, in order."""
    found: dict[int, list[int]] = {}
    for _number, kind, entry, entry_end in fields(data, begin, end):
        key, ids = 0, []
        for number, kind_2, first, last in fields(data, entry, entry_end) if kind == BYTES else ():
            if number == 1 and kind_2 == VARINT:
                key = first
            elif number == 2 and kind_2 == BYTES:
                for number_3, kind_3, value, value_end in fields(data, first, last):
                    if number_3 == 1:
                        ids += numbers(data, kind_3, value, value_end)
        found[key] = ids
    return found


def _launching(found: Mapping[int, _Parsed], order: list[int] | None, frames: "_Frames") -> tuple[HloInstruction, ...]:
    chosen = found.values() if order is None else [found[number] for number in dict.fromkeys(order) if number in found]
    return tuple(_launch(each, frames) for each in chosen if each.opcode not in _SILENT)


def _launch(found: _Parsed, frames: "_Frames") -> HloInstruction:
    launch = _LAUNCHES.get(found.opcode, Launch.LIBRARY)
    if launch is Launch.LIBRARY and _COLLECTIVE.match(found.opcode):
        launch = Launch.COLLECTIVE
    called = found.called if launch in (Launch.CALL, Launch.LOOP, Launch.BRANCH) else ()
    source = f"{found.file}:{found.line}" if found.file else frames.place(found.frame)
    return HloInstruction(found.name, launch, found.same_kernel or found.name, found.op_name, source, called)


def _small(data: bytes, begin: int, end: int) -> dict[int, int]:
    return {number: first for number, kind, first, _last in fields(data, begin, end) if kind == VARINT}


def _text(data: bytes, begin: int, end: int) -> str:
    return data[begin : min(end, begin + 4 * MOST_TEXT)].decode("utf-8", "replace")[:MOST_TEXT]


def parts(data: bytes) -> Iterator[bytes]:
    """Yields the messages, the last one perhaps truncated."""
    at = 0
    while at + PART_HEAD.size <= len(data):
        (size,) = PART_HEAD.unpack_from(data, at)
        at += PART_HEAD.size
        yield data[at : at + size]
        at += size
