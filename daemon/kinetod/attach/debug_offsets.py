"""Where CPython 3.14 and 3.15 keep what a remote debugger needs: `_Py_DebugOffsets`, decoded by field order.

Theory of operation
    `_PyRuntime` begins with a table that the interpreter's own compiler has filled: a cookie, the version, and the
    offsets of the members of its internal structures, all 64 bits wide (Include/internal/pycore_debug_offsets.h).
    The order of its fields is fixed within a minor release and changes between them, so it is written down here for
    each release that we know; another one is not guessed at. Since a wrong offset would make us write into the middle
    of somebody's data, everything that can be checked is: the table must agree with itself, with the size of the
    symbol and with what the fields can mean.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

COOKIE = b"xdebugpy"
TABLE_BYTES = 1024  # at most, of any release
MAX_SCRIPT_PATH_BYTES = 512  # _Py_MAX_SCRIPT_PATH_SIZE

_RELEASE_CANDIDATE = 0xC  # PY_RELEASE_LEVEL_GAMMA: the layout may still change before that

# The vendor's structures and fields, in the order of the header.
_HEAD = (
    ("header", "cookie version free_threaded"),
    ("runtime_state", "size finalizing interpreters_head"),
    (
        "interpreter_state",
        "size id next threads_head threads_main gc imports_modules sysdict builtins ceval_gil gil_runtime_state "
        "gil_runtime_state_enabled gil_runtime_state_locked gil_runtime_state_holder code_object_generation "
        "tlbc_generation",
    ),
)
_FRAMES = (
    ("interpreter_frame", "size previous executable instr_ptr localsplus owner stackpointer tlbc_index"),
    (
        "code_object",
        "size filename name qualname linetable firstlineno argcount localsplusnames localspluskinds co_code_adaptive "
        "co_tlbc",
    ),
    ("pyobject", "size ob_type"),
)
_CONTAINERS = (
    ("tuple_object", "size ob_item ob_size"),
    ("list_object", "size ob_item ob_size"),
    ("set_object", "size used table mask"),
    ("dict_object", "size ma_keys ma_values"),
    ("float_object", "size ob_fval"),
    ("long_object", "size lv_tag ob_digit"),
    ("bytes_object", "size ob_size ob_sval"),
)
_TAIL = (
    ("gen_object", "size gi_name gi_iframe gi_frame_state"),
    ("llist_node", "next prev"),
    (
        "debugger_support",
        "eval_breaker remote_debugger_support remote_debugging_enabled debugger_pending_call debugger_script_path "
        "debugger_script_path_size",
    ),
)
_LAYOUTS = {
    (3, 14): (
        *_HEAD,
        (
            "thread_state",
            "size prev next interp current_frame thread_id native_thread_id datastack_chunk status",
        ),
        *_FRAMES,
        ("type_object", "size tp_name tp_repr tp_flags"),
        *_CONTAINERS,
        ("unicode_object", "size state length asciiobject_size"),
        ("gc", "size collecting"),
        *_TAIL,
    ),
    (3, 15): (
        *_HEAD,
        (
            "thread_state",
            "size prev next interp current_frame base_frame last_profiled_frame last_profiled_frame_seq thread_id "
            "native_thread_id datastack_chunk status holds_gil gil_requested current_exception exc_state",
        ),
        ("err_stackitem", "exc_value"),
        *_FRAMES,
        ("type_object", "size tp_name tp_repr tp_flags tp_basicsize tp_dictoffset"),
        ("heap_type_object", "size ht_cached_keys"),
        *_CONTAINERS,
        ("unicode_object", "size state length asciiobject_size compactunicodeobject_size"),
        ("gc", "size collecting frame generation_stats_size generation_stats"),
        *_TAIL,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugOffsets:
    """Offsets in bytes. In parentheses: from the begin of what."""

    version: tuple[int, int]
    finalizing: int  # (_PyRuntime) pointer: the thread that shuts the interpreter down
    interpreters_head: int  # (_PyRuntime) pointer
    interpreter_id: int  # (interpreter) int64; 0: the main one
    next_interpreter: int  # (interpreter) pointer
    threads_main: int  # (interpreter) pointer: the thread that runs the main program
    remote_debugging_enabled: int  # (interpreter) int
    thread_interpreter: int  # (thread) pointer
    eval_breaker: int  # (thread) 64 bits, events in the lowest 8
    pending_call: int  # (thread) int32; 1: there is a script
    script_path: int  # (thread) text of at most MAX_SCRIPT_PATH_BYTES with its final zero


def decode(table: bytes, runtime_size: int) -> DebugOffsets:
    """From the first TABLE_BYTES of _PyRuntime, which is runtime_size bytes long. Raises ValueError, saying why."""
    if table[: len(COOKIE)] != COOKIE:
        raise ValueError("its _PyRuntime does not begin with a table of debug offsets")
    version, level = _version(table)
    layout = _LAYOUTS.get(version)
    if layout is None or level < _RELEASE_CANDIDATE:
        known = " and ".join(f"{major}.{minor}" for major, minor in _LAYOUTS)
        raise ValueError(
            f"its debug offsets are those of a Python {version[0]}.{version[1]} that is not known ({known})"
        )
    values = _values(table, layout)
    if values["header.free_threaded"]:
        raise ValueError("it is a free-threaded build, whose threads may be at any point")
    wrong = next(_contradictions(values, runtime_size), None)
    if wrong:
        raise ValueError(f"its debug offsets contradict themselves ({wrong})")
    support = values["debugger_support.remote_debugger_support"]
    return DebugOffsets(
        version=version,
        finalizing=values["runtime_state.finalizing"],
        interpreters_head=values["runtime_state.interpreters_head"],
        interpreter_id=values["interpreter_state.id"],
        next_interpreter=values["interpreter_state.next"],
        threads_main=values["interpreter_state.threads_main"],
        remote_debugging_enabled=values["debugger_support.remote_debugging_enabled"],
        thread_interpreter=values["thread_state.interp"],
        eval_breaker=values["debugger_support.eval_breaker"],
        pending_call=support + values["debugger_support.debugger_pending_call"],
        script_path=support + values["debugger_support.debugger_script_path"],
    )


def _version(table: bytes) -> tuple[tuple[int, int], int]:
    (number,) = struct.unpack_from("<Q", table, 8)  # PY_VERSION_HEX
    return (number >> 24 & 0xFF, number >> 16 & 0xFF), number >> 4 & 0xF


def _values(table: bytes, layout: tuple[tuple[str, str], ...]) -> dict[str, int]:
    names = [f"{structure}.{field}" for structure, fields in layout for field in fields.split()]
    if len(table) < 8 * len(names):
        raise ValueError("its table of debug offsets is cut off")
    return dict(zip(names, struct.unpack_from(f"<{len(names)}Q", table), strict=True))


def _contradictions(values: dict[str, int], runtime_size: int) -> Iterator[str]:
    """What cannot be true of a layout that is read rightly."""
    if values["runtime_state.size"] != runtime_size:
        yield "size of _PyRuntime"
    inside = {
        "runtime_state": ("runtime_state.finalizing", "runtime_state.interpreters_head"),
        "interpreter_state": (
            *("interpreter_state.id", "interpreter_state.next", "interpreter_state.threads_main"),
            "debugger_support.remote_debugging_enabled",
        ),
        "thread_state": (
            *("thread_state.interp", "debugger_support.eval_breaker", "debugger_support.remote_debugger_support"),
        ),
    }
    for structure, names in inside.items():
        size = values[f"{structure}.size"]
        for name in names:
            if values[name] + 8 > size or values[name] % (4 if name.startswith("debugger_support.remote") else 8):
                yield name
    if values["debugger_support.debugger_pending_call"] != 0 or values["debugger_support.debugger_script_path"] != 4:
        yield "members of _PyRemoteDebuggerSupport"
    if values["debugger_support.debugger_script_path_size"] != MAX_SCRIPT_PATH_BYTES:
        yield "length of the script's path"
    end = values["debugger_support.remote_debugger_support"] + 4 + MAX_SCRIPT_PATH_BYTES
    if end > values["thread_state.size"]:
        yield "end of _PyRemoteDebuggerSupport"
