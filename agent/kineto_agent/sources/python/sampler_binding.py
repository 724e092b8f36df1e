"""The stack sampler's C interface (agent/native/python/stack_sampler.h) through ctypes. Imported when it is needed.

The sampler reads the interpreter's structures by a table of offsets. Before each recording, `checked` compares the
values read with Python's own: the stack of the calling thread, the parts of a code object, strings of every kind. If
they differ, nothing is recorded, so that no stack is misread.
"""

import ctypes
import gc
import os
import sys
from types import CodeType, FrameType
from typing import Any, Dict, Iterator, List, Optional, Tuple

from kineto_agent.sources.interface import SourceError
from kineto_agent.sources.native_interface import NativeCounts, NativeInterface
from kineto_agent.sources.python.interpreter_layouts import (
    FRAME_OBJECTS,
    FRAMES_BY_THREAD,
    GIL_UNKNOWN,
    TABLE_BYTES,
    StackLayout,
    layout,
)
from kineto_agent.system.libraries import PyLibrary, interpreter

_SYSTEM, _UNREAD, _ORDER = -2, -3, -4
_UNREADABLE = "STACKS_UNREADABLE"
_REASONS = {_SYSTEM: "ARENA_FAILED", _UNREAD: _UNREADABLE, _ORDER: "STACKS_BUSY"}
_DEPTH = 256  # STACK_DEPTH_MOST
_TEXTS = ("plain", "na\u00efve", "\u0436\u4e2d", "\u4e2d\U0001f40d")  # one for each of CPython's string representations
_TEXT_BYTES = 64
_NAMES_BYTES = 4096
# struct _gc_runtime_state of 3.9 to 3.12: generations[0].threshold to collecting, and struct gc_generation.
_THRESHOLDS_BEFORE, _GENERATION_BYTES = 160, 24


class _SamplerLayout(ctypes.Structure):
    """kc_sampler_layout."""

    _fields_ = [
        ("runtime", ctypes.c_uint64),
        ("code_type", ctypes.c_uint64),
        ("frame_type", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in StackLayout._fields),
    ]


class _Frame(ctypes.Structure):
    """kc_sampler_frame."""

    code: int
    instruction: int
    _fields_ = [("code", ctypes.c_uint64), ("instruction", ctypes.c_int32), ("reserved", ctypes.c_uint32)]


_ITEM_FUNCTIONS = ("PyObject_SetItem", "PyObject_DelItem")


class _Item(ctypes.Structure):
    """kc_sampler_item."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _ITEM_FUNCTIONS),
        *((name, ctypes.py_object) for name in ("object", "key", "new_value")),
    ]


class SamplerConfig(ctypes.Structure):
    """kc_sampler_config."""

    _fields_ = [
        ("buffer_limit_bytes", ctypes.c_uint64),
        ("buffer_bytes", ctypes.c_uint64),
        ("strings_bytes", ctypes.c_uint64),
        ("hz", ctypes.c_uint32),
        ("max_load_ppm", ctypes.c_uint32),
    ]


_RESULTS = (
    "cpu_ns", "ticks", "missed_ticks", "truncated_stacks", "torn_samples", "partial_stacks", "unnamed_samples",
    "threads_left_out", "longest_period_ns", "longest_cost_ns", "timed_out",
)  # fmt: skip


class SamplerResult(ctypes.Structure):
    """kc_sampler_stop_result."""

    counts: NativeCounts
    cpu_ns: int
    ticks: int
    missed_ticks: int
    truncated_stacks: int
    torn_samples: int
    partial_stacks: int
    unnamed_samples: int
    threads_left_out: int
    longest_period_ns: int
    longest_cost_ns: int
    timed_out: int
    _fields_ = [("counts", NativeCounts), *((name, ctypes.c_uint64) for name in _RESULTS)]


def _unreadable(what: str) -> SourceError:
    reason = "the stacks of this Python (%s) cannot be read reliably, so none are sampled: %s"
    return SourceError(_UNREADABLE, reason % (sys.version.split()[0], what))


class Sampler(NativeInterface):
    """The one stack sampler of this process. Methods raise SourceError with the C side's reason."""

    ABI_FUNCTION = "kc_sampler_abi"
    ABI = 4
    USE = " for stacks"
    REASONS = _REASONS

    def __init__(self, path: str) -> None:
        super().__init__(path)
        # The same library, but calls through this keep the GIL. So only one thread at a time is inside, and a short
        # call does not wait to get the GIL back, which took seconds in programs that release it every 1 ms.
        self._with_gil: Any = PyLibrary(path, handle=self._library._handle)
        self._with_gil.kc_sampler_ticks.restype = ctypes.c_uint64

    def open(self, numbers: StackLayout) -> None:
        """Read memory by this layout from now on."""
        places = _SamplerLayout(_runtime_address(), id(CodeType), id(FrameType), *numbers)
        self._check(self._with_gil.kc_sampler_open(ctypes.byref(places), *self._error.room))

    def look(self) -> Tuple[List[Tuple[int, int]], bool]:
        """The caller's stack from this method outwards, and whether the sampler sees the caller hold the GIL.

        A frame is the address of its code and the offset of its instruction.
        """
        frames = (_Frame * _DEPTH)()
        holds_gil = ctypes.c_uint32()
        depth = self._check(self._with_gil.kc_sampler_look(frames, _DEPTH, ctypes.byref(holds_gil), *self._error.room))
        return [(frame.code, frame.instruction) for frame in frames[:depth]], bool(holds_gil.value)

    def read_text(self, text: str) -> str:
        """The string as read by the sampler; "" if it cannot."""
        room = ctypes.create_string_buffer(_TEXT_BYTES)
        size = self._with_gil.kc_sampler_read_text(ctypes.c_uint64(id(text)), room, _TEXT_BYTES)
        return room.raw[: max(size, 0)].decode("utf-8", "replace")

    def read_names(self, address: int) -> List[str]:
        """The items of the tuple of strings at this address as read by the sampler; [] if it cannot."""
        room = ctypes.create_string_buffer(_NAMES_BYTES)
        size = self._with_gil.kc_sampler_read_names(ctypes.c_uint64(address), room, _NAMES_BYTES)
        return room.raw[: max(size, 0)].decode("utf-8", "replace").split("\0")[:-1]

    def runs(self, code: CodeType) -> bool:
        """Whether a thread of any interpreter is inside this code."""
        return bool(self._with_gil.kc_sampler_runs(ctypes.c_uint64(id(code))) > 0)

    def change_item(self, file: str, items: Dict[Any, Any], key: Any, *value: Any) -> bool:
        """Set an item, or remove it if no value is given. Changes nothing and returns False if a thread may be inside
        code of this file.

        items: an exact dict or OrderedDict whose keys hash and compare without Python code, so that no other thread
        gets the GIL between the check and the change. Raises KeyError.
        """
        functions = [interpreter().address(name) for name in _ITEM_FUNCTIONS]
        item = _Item(*functions, items, key, *value)
        return bool(self._with_gil.kc_sampler_change_item(file.encode("utf-8", "replace"), ctypes.byref(item)) > 0)

    def prepare(self, config: SamplerConfig) -> int:
        """Create the arena and return its file descriptor, which the sampler keeps."""
        return self._check(self._library.kc_sampler_prepare(ctypes.byref(config), *self._error.room))

    def start(self) -> None:
        """Start the sampler's thread."""
        self._check(self._with_gil.kc_sampler_start(*self._error.room))

    def name(self, tid: int, name: str) -> None:
        """Set the program's own name for a thread."""
        text = name.encode("utf-8", "replace")[:256]
        self._with_gil.kc_sampler_name(ctypes.c_uint32(tid), text, ctypes.c_uint32(len(text)))

    def counts(self) -> NativeCounts:
        """Counts so far; zeros when nothing is recorded."""
        counts = NativeCounts()
        self._with_gil.kc_sampler_counts(ctypes.byref(counts))
        return counts

    def ticks(self) -> int:
        """How often all threads have been sampled in this recording."""
        return int(self._with_gil.kc_sampler_ticks())

    def stop(self, limit_ms: int) -> SamplerResult:
        """End the recording; zeros when nothing was recorded."""
        result = SamplerResult()
        self._library.kc_sampler_stop(ctypes.c_uint32(limit_ms), ctypes.byref(result))
        return result

    def close(self) -> None:
        """Free the arena."""
        self._library.kc_sampler_close()


def checked() -> Sampler:
    """The process's sampler, just verified to read this interpreter correctly. Raises SourceError."""
    sampler = Sampler.of_process()
    numbers = layout(sys.version_info[:2], ctypes.string_at(_runtime_address(), TABLE_BYTES))
    if numbers is None or _pointer_bits() != 64:
        raise _unreadable("this agent does not know where this build keeps them")
    try:
        sampler.open(numbers)
        frames, holds_gil = sampler.look()
    except SourceError as exc:
        raise _unreadable(exc.reason) from exc
    wrong = next(_differences(sampler, numbers, frames), None)
    if wrong is not None:
        raise _unreadable(wrong)
    sure = numbers
    if not holds_gil:  # then everything is recorded except the GIL's holder
        sure = sure._replace(gil=GIL_UNKNOWN)
    # Likewise the runs of the garbage collector. They are seen on the thread with the GIL; callbacks may release that.
    if gc.callbacks or not _finds_collector(numbers):
        sure = sure._replace(interpreter_collecting=0)
    if not _finds_bytecode(sampler, numbers):  # likewise, the callee of a line
        sure = sure._replace(code_names=0)
    if sure != numbers:
        sampler.open(sure)
    return sampler


def _finds_collector(numbers: StackLayout) -> bool:
    """Whether that field appears to say whether the garbage collector runs, which it does not now."""
    try:
        state = interpreter().PyInterpreterState_Get
    except AttributeError:
        return False
    state.restype = ctypes.c_void_p
    place = state() + numbers.interpreter_collecting
    if numbers.frames != FRAMES_BY_THREAD:  # the offset comes from our table, so check the fields before it, too
        thresholds = [_int(place - _THRESHOLDS_BEFORE + _GENERATION_BYTES * number) for number in range(3)]
        if thresholds != list(gc.get_threshold()):
            return False
    return _int(place) == 0


def _finds_bytecode(sampler: Sampler, numbers: StackLayout) -> bool:
    """Whether the bytecode and the names of a code object are at the expected offsets."""
    code = layout.__code__  # it is not running now, so its bytecode does not change
    live = getattr(code, "_co_code_adaptive", None)
    if not numbers.code_names or live is None or _bytes(code, numbers.code_bytecode, len(live)) != live:
        return False
    of_cells = [name for name in code.co_cellvars if name not in code.co_varnames]
    wanted = [list(code.co_names), [*code.co_varnames, *of_cells, *code.co_freevars]]
    return [sampler.read_names(_word(code, at)) for at in (numbers.code_names, numbers.code_variables)] == wanted


def _int(address: int) -> int:
    return ctypes.c_int.from_address(address).value


def _pointer_bits() -> int:
    """Width of a pointer in bits."""
    return 8 * ctypes.sizeof(ctypes.c_void_p)


def _runtime_address() -> int:
    """Address of _PyRuntime. Raises SourceError."""
    for library in _pythons():
        try:
            return int(library.address("_PyRuntime"))
        except AttributeError:
            continue
    raise _unreadable("it does not export _PyRuntime")


def _pythons() -> Iterator[Any]:
    """Libraries that may export it: the program with its dependencies, then any libpython loaded separately."""
    yield interpreter()
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
        paths = {line.rstrip("\n").split(None, 5)[-1] for line in lines if "libpython" in line}
    for path in sorted(paths):
        try:
            yield PyLibrary(path, mode=os.RTLD_NOLOAD)
        except OSError:
            continue


def _differences(sampler: Sampler, numbers: StackLayout, frames: List[Tuple[int, int]]) -> Iterator[str]:
    """Yields differences between the sampler's values and Python's. frames: from look(), called by the caller."""
    found = iter(frames)
    frame: Optional[FrameType] = sys._getframe(1)
    exact = False  # the two innermost frames have advanced since look()
    if next(found, (0, 0))[0] != id(Sampler.look.__code__):
        yield "the innermost frame is not the expected one"
    for code, instruction in found:
        if frame is None or code != id(frame.f_code) or (exact and instruction != frame.f_lasti):
            yield "a frame differs from what sys._getframe returns"
            return
        frame, exact = frame.f_back, True
    if frame is not None and len(frames) < _DEPTH:
        yield "frames are missing"
    yield from _code_differences(numbers, sys._getframe(1).f_code)
    for text in _TEXTS:
        if sampler.read_text(text) != text:
            yield "strings are not stored as expected"


def _code_differences(numbers: StackLayout, code: CodeType) -> Iterator[str]:
    named = code.co_name if numbers.code_bytecode == 0 else code.co_qualname  # type: ignore[attr-defined,unused-ignore]
    lines = code.co_lnotab if numbers.line_table_kind == 9 else code.co_linetable
    for offset, thing in (
        (numbers.object_type, CodeType),
        (numbers.code_filename, code.co_filename),
        (numbers.code_name, named),
        (numbers.code_lines, lines),
    ):
        if _word(code, offset) != id(thing):
            yield "code objects do not have the expected layout"
    if _bytes(code, numbers.code_first_line, 4) != code.co_firstlineno.to_bytes(4, sys.byteorder):
        yield "code objects store their first line elsewhere"
    if _bytes(lines, numbers.bytes_value, len(lines)) != lines or _word(lines, numbers.object_size) != len(lines):
        yield "bytes are not stored as expected"
    if numbers.frames == FRAME_OBJECTS and _word(sys._getframe(), numbers.object_type) != id(FrameType):
        yield "frames do not have the expected layout"


def _bytes(thing: object, offset: int, size: int) -> bytes:
    """Bytes of an object's memory; empty outside of it: the offset is what is being verified."""
    return ctypes.string_at(id(thing) + offset, size) if 0 <= offset <= sys.getsizeof(thing) - size else b""


def _word(thing: object, offset: int) -> int:
    return int.from_bytes(_bytes(thing, offset, 8), sys.byteorder)
