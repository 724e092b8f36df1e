"""Offsets of CPython's interpreters, threads, frames and code objects: one table for each minor version.

From 3.13 on CPython exports them: _PyRuntime begins with a table of offsets (_Py_DebugOffsets) whose order is that of
Include/internal/pycore_debug_offsets.h. For 3.9 to 3.12 the numbers are offsetof() of each release's own headers, for
64-bit builds. sampler_binding.py checks all of them in the running process before use.
"""

import struct
from typing import Dict, NamedTuple, Optional, Tuple

COOKIE = b"xdebugpy"
TABLE_BYTES = 1024  # more than the required fields occupy
FRAME_OBJECTS, FRAMES_BY_CFRAME, FRAMES_BY_THREAD = range(3)  # kc_sampler_frames
_CODE_NAMES = 32  # PyCodeObject.co_names, second of the "hottest fields" from 3.11 on
_TEXT_KIND_SHIFT = 2  # interned has 2 bits, then come kind, compact and ascii
GIL_UNKNOWN, GIL_IN_RUNTIME, GIL_BY_POINTER = range(3)  # kc_sampler_gil


class StackLayout(NamedTuple):
    """The offsets in kc_sampler_layout (agent/native/python/stack_sampler.h), in its order. 0: there is none."""

    frames: int
    gil: int
    runtime_interpreters: int
    interpreter_next: int
    interpreter_threads: int
    thread_next: int
    thread_interpreter: int
    thread_frame: int
    thread_id: int
    thread_native_id: int
    cframe_frame: int
    frame_code: int
    frame_previous: int
    frame_instruction: int
    frame_owner: int
    instruction_scale: int
    least_shim_owner: int
    object_type: int
    object_size: int
    code_filename: int
    code_name: int
    code_first_line: int
    code_lines: int
    code_bytecode: int
    code_names: int
    code_variables: int
    tuple_items: int
    bytes_value: int
    text_length: int
    text_state: int
    text_kind_shift: int
    text_ascii: int
    text_compact: int
    gil_offset: int
    gil_holder: int
    gil_locked: int
    interpreter_collecting: int
    line_table_kind: int


_39 = StackLayout(
    frames=FRAME_OBJECTS,
    gil=GIL_IN_RUNTIME,
    runtime_interpreters=32,  # _PyRuntimeState.interpreters.head
    interpreter_next=0,  # PyInterpreterState.next
    interpreter_threads=8,  # tstate_head
    thread_next=8,  # PyThreadState.next
    thread_interpreter=16,  # interp
    thread_frame=24,  # frame
    thread_id=176,  # thread_id
    thread_native_id=0,
    cframe_frame=0,
    frame_code=32,  # PyFrameObject.f_code
    frame_previous=24,  # f_back
    frame_instruction=104,  # f_lasti, bytes
    frame_owner=0,
    instruction_scale=1,
    least_shim_owner=0,
    object_type=8,
    object_size=16,
    code_filename=104,  # PyCodeObject.co_filename
    code_name=112,  # co_name
    code_first_line=40,  # co_firstlineno
    code_lines=120,  # co_lnotab
    code_bytecode=0,
    code_names=0,
    code_variables=0,
    tuple_items=24,  # PyTupleObject.ob_item
    bytes_value=32,  # PyBytesObject.ob_sval
    text_length=16,  # PyASCIIObject.length
    text_state=32,  # state
    text_kind_shift=_TEXT_KIND_SHIFT,
    text_ascii=48,  # sizeof(PyASCIIObject)
    text_compact=72,  # sizeof(PyCompactUnicodeObject)
    gil_offset=352,  # _PyRuntimeState.ceval.gil
    gil_holder=8,  # _gil_runtime_state.last_holder
    gil_locked=16,  # locked
    interpreter_collecting=816,  # PyInterpreterState.gc.collecting
    line_table_kind=9,
)
_310 = _39._replace(
    frame_instruction=96,  # f_lasti, counted in units of two bytes
    instruction_scale=2,
    code_lines=120,  # co_linetable
    line_table_kind=10,
)
_311 = _310._replace(
    frames=FRAMES_BY_CFRAME,
    runtime_interpreters=40,
    interpreter_threads=16,  # threads.head
    thread_frame=56,  # cframe
    thread_id=152,
    thread_native_id=160,
    cframe_frame=8,  # _PyCFrame.current_frame
    frame_code=32,  # _PyInterpreterFrame.f_code
    frame_previous=48,  # previous
    frame_instruction=56,  # prev_instr
    frame_owner=69,  # owner
    instruction_scale=0,
    least_shim_owner=3,  # enum _frameowner: FRAME_OWNED_BY_CSTACK from 3.12 on
    code_filename=112,
    code_name=128,  # co_qualname
    code_first_line=72,
    code_lines=136,
    code_bytecode=184,  # co_code_adaptive
    code_names=_CODE_NAMES,
    code_variables=96,  # co_localsplusnames
    gil_offset=360,
    interpreter_collecting=848,
    line_table_kind=11,
)
_312 = _311._replace(
    gil=GIL_BY_POINTER,
    interpreter_threads=72,
    thread_id=136,
    thread_native_id=144,
    cframe_frame=0,
    frame_code=0,
    frame_previous=8,
    frame_owner=70,
    code_first_line=68,
    code_bytecode=192,
    text_ascii=40,
    text_compact=56,
    gil_offset=384,  # PyInterpreterState.ceval.gil
    interpreter_collecting=312,
)
_BY_HEADERS: Dict[Tuple[int, int], StackLayout] = {(3, 9): _39, (3, 10): _310, (3, 11): _311, (3, 12): _312}

_HEADER = ("header", "cookie version free_threaded")
_RUNTIME = ("runtime_state", "size finalizing interpreters_head")
_GIL = "ceval_gil gil_runtime_state gil_runtime_state_enabled gil_runtime_state_locked gil_runtime_state_holder"
_THREAD = "thread_id native_thread_id datastack_chunk status"
_CODE = "filename name qualname linetable firstlineno argcount localsplusnames localspluskinds co_code_adaptive"
_PYOBJECT = ("pyobject", "size ob_type")
_CONTAINERS = (
    ("dict_object", "size ma_keys ma_values"),
    ("float_object", "size ob_fval"),
    ("long_object", "size lv_tag ob_digit"),
    ("bytes_object", "size ob_size ob_sval"),
)
_TEXT = "size state length asciiobject_size"
_GC = ("gc", "size collecting")
_LISTS = (("tuple_object", "size ob_item ob_size"), ("list_object", "size ob_item ob_size"))
_SET = ("set_object", "size used table mask")
_BY_TABLE: Dict[Tuple[int, int], Tuple[Tuple[str, str], ...]] = {
    (3, 13): (
        _HEADER,
        _RUNTIME,
        ("interpreter_state", "size id next threads_head gc imports_modules sysdict builtins " + _GIL),
        ("thread_state", "size prev next interp current_frame " + _THREAD),
        ("interpreter_frame", "size previous executable instr_ptr localsplus owner"),
        ("code_object", "size " + _CODE),
        _PYOBJECT,
        ("type_object", "size tp_name tp_repr tp_flags"),
        *_LISTS,
        *_CONTAINERS,
        ("unicode_object", _TEXT),
        _GC,
    ),
    (3, 14): (
        _HEADER,
        _RUNTIME,
        (
            "interpreter_state",
            "size id next threads_head threads_main gc imports_modules sysdict builtins %s code_object_generation "
            "tlbc_generation" % _GIL,
        ),
        ("thread_state", "size prev next interp current_frame " + _THREAD),
        ("interpreter_frame", "size previous executable instr_ptr localsplus owner stackpointer tlbc_index"),
        ("code_object", "size %s co_tlbc" % _CODE),
        _PYOBJECT,
        ("type_object", "size tp_name tp_repr tp_flags"),
        *_LISTS,
        _SET,
        *_CONTAINERS,
        ("unicode_object", _TEXT),
        _GC,
    ),
    (3, 15): (
        _HEADER,
        _RUNTIME,
        (
            "interpreter_state",
            "size id next threads_head threads_main gc imports_modules sysdict builtins %s code_object_generation "
            "tlbc_generation" % _GIL,
        ),
        (
            "thread_state",
            "size prev next interp current_frame base_frame last_profiled_frame last_profiled_frame_seq %s holds_gil "
            "gil_requested current_exception exc_state" % _THREAD,
        ),
        ("err_stackitem", "exc_value"),
        ("interpreter_frame", "size previous executable instr_ptr localsplus owner stackpointer tlbc_index"),
        ("code_object", "size %s co_tlbc" % _CODE),
        _PYOBJECT,
        ("type_object", "size tp_name tp_repr tp_flags tp_basicsize tp_dictoffset"),
        ("heap_type_object", "size ht_cached_keys"),
        *_LISTS,
        _SET,
        *_CONTAINERS,
        ("unicode_object", _TEXT + " compactunicodeobject_size"),
        _GC,
    ),
}
_UTF8_FIELDS_BYTES = 16  # PyCompactUnicodeObject is PyASCIIObject, utf8_length and utf8


def known(version: Tuple[int, int]) -> bool:
    """Whether there is a table for this version."""
    return version in _BY_HEADERS or version in _BY_TABLE


def layout(version: Tuple[int, int], table: bytes) -> Optional[StackLayout]:
    """The layout of a version; table: the first TABLE_BYTES of _PyRuntime. None: unknown, or free-threaded."""
    if version in _BY_HEADERS:
        return _BY_HEADERS[version]
    if version not in _BY_TABLE or table[: len(COOKIE)] != COOKIE:
        return None
    names = ["%s.%s" % (kind, field) for kind, fields in _BY_TABLE[version] for field in fields.split()]
    value = dict(zip(names, struct.unpack_from("<%dQ" % len(names), table)))
    number = value["header.version"]
    if value["header.free_threaded"] or (number >> 24, number >> 16 & 0xFF) != version:
        return None
    return _from_table(value)


def _from_table(value: Dict[str, int]) -> StackLayout:
    gil = value["interpreter_state.gil_runtime_state"]
    return StackLayout(
        frames=FRAMES_BY_THREAD,
        gil=GIL_BY_POINTER,
        runtime_interpreters=value["runtime_state.interpreters_head"],
        interpreter_next=value["interpreter_state.next"],
        interpreter_threads=value["interpreter_state.threads_head"],
        thread_next=value["thread_state.next"],
        thread_interpreter=value["thread_state.interp"],
        thread_frame=value["thread_state.current_frame"],
        thread_id=value["thread_state.thread_id"],
        thread_native_id=value["thread_state.native_thread_id"],
        cframe_frame=0,
        frame_code=value["interpreter_frame.executable"],
        frame_previous=value["interpreter_frame.previous"],
        frame_instruction=value["interpreter_frame.instr_ptr"],
        frame_owner=value["interpreter_frame.owner"],
        instruction_scale=0,
        least_shim_owner=3,  # 3.13: FRAME_OWNED_BY_CSTACK; later: FRAME_OWNED_BY_INTERPRETER and one more
        object_type=value["pyobject.ob_type"],
        object_size=value["bytes_object.ob_size"],
        code_filename=value["code_object.filename"],
        code_name=value["code_object.qualname"],
        code_first_line=value["code_object.firstlineno"],
        code_lines=value["code_object.linetable"],
        code_bytecode=value["code_object.co_code_adaptive"],
        code_names=_CODE_NAMES,  # not in the table
        code_variables=value["code_object.localsplusnames"],
        tuple_items=value["tuple_object.ob_item"],
        bytes_value=value["bytes_object.ob_sval"],
        text_length=value["unicode_object.length"],
        text_state=value["unicode_object.state"],
        text_kind_shift=_TEXT_KIND_SHIFT,
        text_ascii=value["unicode_object.asciiobject_size"],
        text_compact=value["unicode_object.asciiobject_size"] + _UTF8_FIELDS_BYTES,
        gil_offset=value["interpreter_state.ceval_gil"],
        gil_holder=value["interpreter_state.gil_runtime_state_holder"] - gil,
        gil_locked=value["interpreter_state.gil_runtime_state_locked"] - gil,
        interpreter_collecting=value["interpreter_state.gc"] + value["gc.collecting"],
        line_table_kind=11,
    )
