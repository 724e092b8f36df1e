"""Which events of a Chrome trace belong to which table, and which of their arguments are columns.

The bit of an argument in `present` is FIRST_ARG_BIT plus its place in the tuple of its kind. Stored traces have these
bits: new arguments are added at the end, none is moved or removed (at most MAX_ARGS per kind).

A column that is not in the table's schema stands among its origin columns. Names of arguments are Kineto's, of all
years and vendors; those that differ from row to row must be here, since the rest is kept as text, once per distinct
text.
"""

from typing import NamedTuple

from kineto_trace.model.trace import NO_MODULE, NO_PRIORITY, NO_SEQUENCE

FIRST_ARG_BIT = 20
MAX_ARGS = 42

# Bits of `present` that are not arguments: the event has the member, and the columns say it exactly.
PHASE, CATEGORY, NAME, PID, TID, TS, DUR, ID, ARGS = (1 << n for n in range(9))
BP_E, S_T, S_G = 1 << 9, 1 << 10, 1 << 11  # "bp":"e", "s":"t", "s":"g"
TS_INTEGER, DUR_INTEGER = 1 << 12, 1 << 13  # without a decimal point
TS_REAL, DUR_REAL = 1 << 14, 1 << 15  # not whole nanoseconds: origin columns ts_real, dur_real (double, us)
PID_TEXT, TID_TEXT, ID_TEXT = 1 << 16, 1 << 17, 1 << 18

# Types of arguments, as in chrome.h
I64, U64, I32, U32, U16, F64, BOOL, I32X3, SIGNED_U32 = range(9)
DTYPES = {
    I64: "int64",
    U64: "uint64",
    I32: "int32",
    U32: "uint32",
    U16: "uint16",
    F64: "float64",
    BOOL: "uint8",
    I32X3: "int32",
    SIGNED_U32: "uint32",
}


class Arg(NamedTuple):
    """One argument. column: where it goes; of I32X3, its first letters (grid -> grid_x, grid_y, grid_z)."""

    key: str
    column: str
    type: int
    default: int = 0

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that it fills."""
        if self.type == I32X3:
            return tuple(f"{self.column}_{axis}" for axis in "xyz")
        return (self.column,)


_EXTERNAL = (Arg("External id", "external_id", I64), Arg("external id", "external_id", I64))
_NAN = 0x7FF8 << 48
_UNKNOWN = 0xFFFFFFFF  # not in the arguments: formats/chrome/chrome_tables.py takes it from pid or tid
_GPU = (
    *_EXTERNAL,
    Arg("device", "device", U32, _UNKNOWN),
    Arg("context", "context", U32),
    Arg("stream", "stream", U32, _UNKNOWN),
    Arg("correlation", "correlation", U32),
    Arg("graph id", "graph_id", U32),
    Arg("graph node id", "graph_node_id", U64),
    Arg("channel", "channel", U32),
    Arg("channel_type", "channel_type", U32),
    Arg("bytes", "bytes", U64),
    Arg("memory bandwidth (GB/s)", "bandwidth", F64, _NAN),
    Arg("Ev Idx", "event_index", I64),
    Arg("appended", "appended", I64),  # this one and those below: Intel's
    Arg("submitted", "submitted", I64),
    Arg("sycl_task_begin", "sycl_task_begin", I64),
    Arg("sycl_enqk_begin", "sycl_enqk_begin", I64),
    Arg("kernel_id", "kernel_id", I64),
    Arg("sycl_node_id", "sycl_node_id", I64),
    Arg("sycl_invocation_id", "sycl_invocation_id", I64),
    Arg("memory opration id", "memory_operation_id", I64),  # spelled so
)
_API = (
    *_EXTERNAL,
    Arg("cbid", "cbid", U32),
    Arg("correlation", "correlation", U32),
    Arg("external ts", "external_ts", I64),
    Arg("cid", "cid", I64),  # AMD's
    Arg("Ev Idx", "event_index", I64),
)
_OP = (
    Arg("External id", "external_id", I64),
    Arg("external id", "external_id", I64),
    Arg("Record function id", "record_function_id", I64),
    Arg("Sequence number", "sequence", I64, NO_SEQUENCE),
    Arg("Fwd thread id", "forward_thread", U32),
    Arg("Ev Idx", "event_index", I64),
    Arg("finished", "finished", BOOL, 1),
    Arg("Profiler Event Index", "event_index", I64),  # the same, by an older name
)

KINDS: dict[str, tuple[Arg, ...]] = {
    "kernel": (
        *_GPU,
        Arg("queued", "queued", U64),
        Arg("registers per thread", "registers", U16),
        Arg("shared memory", "dynamic_shared_memory", I32),  # the sum of both kinds
        Arg("grid", "grid", I32X3),
        Arg("block", "block", I32X3),
        Arg("priority", "priority", I32, NO_PRIORITY),
    ),
    "gpu_memcpy": (
        *_GPU,
        Arg("fromDevice", "src_device", U32),
        Arg("inDevice", "device", U32, _UNKNOWN),
        Arg("toDevice", "dst_device", U32),
        Arg("fromContext", "src_context", U32),
        Arg("inContext", "context", U32),
        Arg("toContext", "dst_context", U32),
    ),
    "gpu_memset": _GPU,
    "cuda_runtime": _API,
    "cuda_driver": _API,
    "cuda_sync": (
        *_EXTERNAL,
        Arg("device", "device", I32, -1),
        Arg("context", "context", U32),
        Arg("stream", "stream", SIGNED_U32, -1),
        Arg("correlation", "correlation", U32),
        Arg("wait_on_cuda_event_id", "event", U32),
        Arg("wait_on_stream", "wait_on_stream", I64, -1),
        Arg("wait_on_cuda_event_record_corr_id", "wait_on_correlation", I64, -1),
        Arg("Ev Idx", "event_index", I64),
    ),
    "cpu_op": _OP,
    "user_annotation": _OP,
    "gpu_user_annotation": (
        *_EXTERNAL,
        Arg("device", "device", U32, _UNKNOWN),
        Arg("stream", "stream", U32, _UNKNOWN),
        Arg("Ev Idx", "event_index", I64),
    ),
    "cpu_instant_event": (
        Arg("Bytes", "bytes", I64),
        Arg("Addr", "address", U64),
        Arg("Total Allocated", "total_allocated", I64, -1),
        Arg("Total Reserved", "total_reserved", I64, -1),
        Arg("Device Type", "device_type", I32),
        Arg("Device Id", "device", I32, -1),
        Arg("External id", "external_id", I64),
        Arg("Ev Idx", "event_index", I64),
        Arg("finished", "finished", BOOL),
        Arg("Device", "device_number", I64),
        Arg("Profiler Event Index", "event_index", I64),
    ),
    "overhead": (Arg("External id", "external_id", I64), Arg("Ev Idx", "event_index", I64)),
    "python_function": (
        Arg("Python id", "python_id", I64, -1),
        Arg("Python parent id", "python_parent_id", I64, -1),
        Arg("Python thread", "python_thread", I64),
        Arg("Python module id", "module", I32, NO_MODULE),
        Arg("Ev Idx", "event_index", I64),
        Arg("External id", "external_id", I64),
        Arg("samples", "samples", I32),
        Arg("self samples", "self_samples", I32),
        Arg("finished", "finished", BOOL),
        Arg("line", "line", I32),
        Arg("running samples", "running", I32),
        Arg("samples waiting for the GIL", "waiting", I32),
        Arg("idle samples", "idle", I32),
    ),
    "flow": (Arg("Ev Idx", "event_index", I64),),
    "other": (
        *_EXTERNAL,
        Arg("device", "device", I64, -1),
        Arg("context", "context", I64),
        Arg("stream", "stream", I64, -1),
        Arg("correlation", "correlation", I64),
        Arg("event_id", "event_id", I64),  # cuda_event
        Arg("Ev Idx", "event_index", I64),
        Arg("bytes", "bytes", I64),
        Arg("Bytes", "memory_bytes", I64),
        Arg("Addr", "address", U64),
        Arg("k_work_ptr", "k_work_ptr", U64),  # this one and those below: of mtia_ccp_events
        Arg("seq_num", "seq_num", I64),
        Arg("size", "size", I64),
    ),
}
MEMORY, FLOW, OTHER = "cpu_instant_event", "flow", "other"

# Categories of complete events, in lower case: (text, whether it is only the end of one, kind). The first that fits.
CATEGORIES: tuple[tuple[str, bool, str], ...] = (
    ("cpu_op", False, "cpu_op"),
    ("operator", False, "cpu_op"),
    ("user_annotation", False, "user_annotation"),
    ("gpu_user_annotation", False, "gpu_user_annotation"),
    ("kernel", False, "kernel"),
    ("gpu_memcpy", False, "gpu_memcpy"),
    ("memcpy", False, "gpu_memcpy"),
    ("gpu_memset", False, "gpu_memset"),
    ("memset", False, "gpu_memset"),
    ("python_function", False, "python_function"),
    ("overhead", False, "overhead"),
    ("cuda_sync", False, "cuda_sync"),
    ("xpu_sync", False, "cuda_sync"),
    ("runtime", False, "cuda_runtime"),
    ("_runtime", True, "cuda_runtime"),  # cuda_, hip_, xpu_, mtia_, glow_, privateuse1_, …
    ("_driver", True, "cuda_driver"),
)
