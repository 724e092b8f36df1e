"""The tables of a trace, one declaration each: columns, arguments and categories in Chrome traces, rows of viewers.

Theory of operation
    Readers, writers, SQL and analyses use these declarations. Adding a table on the GPU's streams takes one more
    declaration: without code of its own it is read by its categories, and written with those of its arguments that have
    a column of the schema.

    The bit of an argument in the column `present` of rows read from a file is FIRST_ARG_BIT plus its place among its
    table's arguments. Stored traces contain these bits: new arguments are added at the end, none is moved or removed
    (at most MAX_ARGS per table).

    The column of an argument that is not in the table's schema is one of its origin columns. Names of arguments are
    Kineto's, of all years and vendors. Arguments whose values differ from row to row must be declared here, since all
    others are kept as text, once per distinct text.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

from kineto_agent.protocol.schema import RESERVED_COLUMNS, TRACKS

from kineto_trace.model.line_counts import WAITS

# Columns of tables, and arguments of their rows in Chrome traces, that several tables share.
NAN_BITS = 0x7FF8 << 48
UNKNOWN_NUMBER = 0xFFFFFFFF  # missing among the arguments: formats/chrome/chrome_tables.py derives it from pid or tid
STEP_PREFIX = "ProfilerStep#"  # of the names of annotations around training steps
STEP_NUMBER = "step_num"  # argument of an annotation: the program's number of its step (JAX)
NO_PRIORITY = -(2**31)  # the kernel records of this CUPTI version have no priority
MEMORY, FLOW, OTHER, COUNTER = "cpu_instant_event", "flow", "other", "counter"
OWN_NAME = re.compile(r"[a-z][a-z0-9]*_[a-z0-9_]{1,62}")
LEAST_COLUMNS = {
    "start": "int64",
    "duration": "int64",
    "name": "int32",
    "correlation": "uint32",
    "external_id": "int64",
}
# Columns that queries add to each table. Columns of the other track are forbidden to plug-ins only: rocm_memory has a
# device.
_ADDED_COLUMNS = RESERVED_COLUMNS.difference(*TRACKS.values())
_NO_ARGUMENTS = frozenset(("start", "duration", "name", "thread", "external_id"))
_COLUMN = re.compile(r"[a-z][a-z0-9_]{0,63}")
_DTYPE = re.compile(r"u?int(8|16|32|64)|float64")
_MAX_MEANING = 400
FIRST_ARG_BIT = 20
MAX_ARGS = 42
# Bits of `present` that are not arguments: the event has the member, and the columns hold its exact value.
PHASE, CATEGORY, NAME, PID, TID, TS, DUR, ID, ARGS = (1 << n for n in range(9))
BP_E, S_T, S_G = 1 << 9, 1 << 10, 1 << 11  # "bp":"e", "s":"t", "s":"g"
TS_INTEGER, DUR_INTEGER = 1 << 12, 1 << 13  # without a decimal point
TS_REAL, DUR_REAL = 1 << 14, 1 << 15  # fractions of a nanosecond: origin columns ts_real, dur_real (double, us)
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


class Column(NamedTuple):
    """One column of a table. text: its values are numbers into Trace.strings; -1 for none."""

    name: str
    dtype: str
    meaning: str
    text: bool = False


TIMED = (
    Column("start", "int64", "Unix ns"),
    Column("duration", "int64", "ns"),
    Column("name", "int32", "its name", text=True),
)
GPU = (
    *TIMED,
    Column("device", "uint32", "device index as the process sees it"),
    Column("context", "uint32", "CUPTI's context id"),
    Column("stream", "uint32", "CUPTI's stream id"),
    Column("correlation", "uint32", "joins with the runtime or driver call that caused it"),
    Column("external_id", "int64", "id of the innermost op or annotation around that call; 0: none"),
)
QUEUE = (
    Column("graph_id", "uint32", "CUDA graph; 0: none"),
    Column("graph_node_id", "uint64", "node of the graph; 0: none"),
    Column("channel", "uint32", "hardware channel"),
    Column("channel_type", "uint32", "0 invalid, 1 compute, 2 copy"),
)
API = (
    *TIMED,
    Column("thread", "uint32", "system thread id"),
    Column("correlation", "uint32", "joins with the GPU activities that the call caused"),
    Column("cbid", "uint32", "CUPTI's callback id of the function"),
    Column("external_id", "int64", "id of the innermost op or annotation around it; 0: none"),
)
OP = (
    *TIMED,
    Column("thread", "uint32", "system thread id"),
    Column("id", "int64", "id of this op, counted from 1; unique in the trace across both tables of ops"),
    Column("sequence", "int64", "autograd's sequence number; -1: none"),
    Column("torch_thread", "uint32", "torch's own thread number; 0: unknown"),
    Column("forward_thread", "uint32", "backward ops: torch's thread number of the forward op; 0: none"),
    Column("scope", "uint8", "at::RecordScope: 0 function, 1 backward function, 7 user"),
    Column("finished", "uint8", "0: it was still running when the recording ended"),
    Column("inputs", "int32", "its inputs as Kineto's JSON arguments; -1: not recorded", text=True),
)


class ViewerRow(Enum):
    """Where a viewer shows the activities of a table."""

    OPERATOR = auto()  # on their thread: they have ids, and contain what happens inside them
    ANNOTATION = auto()  # around the GPU work, on the row of a stream
    GPU = auto()  # GPU work, on the row of its stream
    PYTHON = auto()  # on their thread
    OVERHEAD = auto()  # on a row of the profiler's own
    SYNC = auto()  # on a row beside that of the stream
    CALL = auto()  # on their thread: they cause GPU work
    MEMORY = auto()  # on their thread, without duration
    FILE = auto()  # at their place in the file; only in traces that were read from a file
    NONE = auto()  # nowhere: they have no time
    COUNTER = auto()  # as a value over time, beside the streams of their GPU


OWN_ROWS = (ViewerRow.GPU, ViewerRow.CALL)
ROW_COLUMNS = {
    ViewerRow.GPU: {**LEAST_COLUMNS, "device": "uint32", "context": "uint32", "stream": "uint32"},
    ViewerRow.CALL: {**LEAST_COLUMNS, "thread": "uint32"},
}


class Arg(NamedTuple):
    """One argument. column: its destination; for I32X3 the common prefix (grid -> grid_x, grid_y, grid_z)."""

    key: str
    column: str
    type: int
    default: int = 0

    @property
    def columns(self) -> tuple[str, ...]:
        """Returns all columns that the argument fills."""
        if self.type == I32X3:
            return tuple(f"{self.column}_{axis}" for axis in "xyz")
        return (self.column,)


# Of a sampled slice in a file: how many ns its ends were moved so that it nests with the other events of its thread.
START_MOVED, END_MOVED = "start moved by ns", "end moved by ns"
EXTERNAL = (Arg("External id", "external_id", I64), Arg("external id", "external_id", I64))
GPU_ARGUMENTS = (
    *EXTERNAL,
    Arg("device", "device", U32, UNKNOWN_NUMBER),
    Arg("context", "context", U32),
    Arg("stream", "stream", U32, UNKNOWN_NUMBER),
    Arg("correlation", "correlation", U32),
    Arg("graph id", "graph_id", U32),
    Arg("graph node id", "graph_node_id", U64),
    Arg("channel", "channel", U32),
    Arg("channel_type", "channel_type", U32),
    Arg("bytes", "bytes", U64),
    Arg("memory bandwidth (GB/s)", "bandwidth", F64, NAN_BITS),
    Arg("Ev Idx", "event_index", I64),
    Arg("appended", "appended", I64),  # this argument and those below are Intel's
    Arg("submitted", "submitted", I64),
    Arg("sycl_task_begin", "sycl_task_begin", I64),
    Arg("sycl_enqk_begin", "sycl_enqk_begin", I64),
    Arg("kernel_id", "kernel_id", I64),
    Arg("sycl_node_id", "sycl_node_id", I64),
    Arg("sycl_invocation_id", "sycl_invocation_id", I64),
    Arg("memory opration id", "memory_operation_id", I64),  # Kineto's spelling
)
API_ARGUMENTS = (
    *EXTERNAL,
    Arg("cbid", "cbid", U32),
    Arg("correlation", "correlation", U32),
    Arg("external ts", "external_ts", I64),
    Arg("cid", "cid", I64),  # AMD's
    Arg("Ev Idx", "event_index", I64),
)
OP_ARGUMENTS = (
    *EXTERNAL,
    Arg("Record function id", "record_function_id", I64),
    Arg("Sequence number", "sequence", I64, -1),
    Arg("Fwd thread id", "forward_thread", U32),
    Arg("Ev Idx", "event_index", I64),
    Arg("finished", "finished", BOOL, 1),
    Arg("Profiler Event Index", "event_index", I64),  # the same under an older name
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivityTable:
    """One table, named after its category in Kineto's traces.

    categories: lower-case categories of the complete events that are read into it; *_text matches all categories with
        this ending. A category belongs to the first table that names it, in the order of ViewerRow.
    """

    name: str
    row: ViewerRow
    meaning: str
    columns: tuple[Column, ...]
    arguments: tuple[Arg, ...] = ()
    categories: tuple[str, ...] = ()


TABLES = (
    ActivityTable(
        name="kernel",
        row=ViewerRow.GPU,
        meaning="Kernels that ran on a GPU.",
        columns=(
            *GPU,
            *(Column(f"grid_{axis}", "int32", "blocks") for axis in "xyz"),
            *(Column(f"block_{axis}", "int32", "threads") for axis in "xyz"),
            Column("registers", "uint16", "registers per thread"),
            Column("static_shared_memory", "int32", "bytes per block"),
            Column("dynamic_shared_memory", "int32", "bytes per block"),
            Column("queued", "uint64", "Unix ns when it entered the command buffer; 0: not collected"),
            Column("priority", "int32", "launch priority; NO_PRIORITY: not recorded"),
            *QUEUE,
            Column(
                "hlo",
                "int32",
                "the HLO instruction that it ran, as JSON arguments hlo_op, hlo_module, op_name and source, each where "
                "it is known; -1: unknown",
                text=True,
            ),
        ),
        arguments=(
            *GPU_ARGUMENTS,
            Arg("queued", "queued", U64),
            Arg("registers per thread", "registers", U16),
            Arg("shared memory", "dynamic_shared_memory", I32),  # the sum of both kinds
            Arg("grid", "grid", I32X3),
            Arg("block", "block", I32X3),
            Arg("priority", "priority", I32, NO_PRIORITY),
        ),
        categories=("kernel",),
    ),
    ActivityTable(
        name="gpu_memcpy",
        row=ViewerRow.GPU,
        meaning="Copies on a GPU, between GPUs, or between host and GPU.",
        columns=(
            *GPU,
            Column("bytes", "uint64", "bytes copied"),
            Column("copy_kind", "uint8", "CUPTI's: 1 HtoD, 2 DtoH, 8 DtoD, 10 PtoP, …"),
            Column("src_kind", "uint8", "memory: 1 pageable, 2 pinned, 3 device, …"),
            Column("dst_kind", "uint8", "memory, numbered as in src_kind"),
            Column("peer", "uint8", "1: between two devices; the four columns below apply"),
            Column("src_device", "uint32", "device index"),
            Column("src_context", "uint32", "context id"),
            Column("dst_device", "uint32", "device index"),
            Column("dst_context", "uint32", "context id"),
            *QUEUE,
        ),
        arguments=(
            *GPU_ARGUMENTS,
            Arg("fromDevice", "src_device", U32),
            Arg("inDevice", "device", U32, UNKNOWN_NUMBER),
            Arg("toDevice", "dst_device", U32),
            Arg("fromContext", "src_context", U32),
            Arg("inContext", "context", U32),
            Arg("toContext", "dst_context", U32),
        ),
        categories=("gpu_memcpy", "memcpy"),
    ),
    ActivityTable(
        name="gpu_memset",
        row=ViewerRow.GPU,
        meaning="Memory fills on a GPU.",
        columns=(
            *GPU,
            Column("bytes", "uint64", "bytes set"),
            Column("memory_kind", "uint16", "memory: 1 pageable, 2 pinned, 3 device, …"),
            *QUEUE,
        ),
        arguments=GPU_ARGUMENTS,
        categories=("gpu_memset", "memset"),
    ),
    ActivityTable(
        name="cuda_runtime",
        row=ViewerRow.CALL,
        meaning="Calls of the CUDA runtime (or of another vendor's) on the host.",
        columns=API,
        arguments=API_ARGUMENTS,
        categories=("runtime", "*_runtime"),  # cuda_, hip_, xpu_, mtia_, glow_, privateuse1_, …
    ),
    ActivityTable(
        name="cuda_driver",
        row=ViewerRow.CALL,
        meaning="Calls of the CUDA driver on the host.",
        columns=API,
        arguments=API_ARGUMENTS,
        categories=("*_driver",),
    ),
    ActivityTable(
        name="cuda_sync",
        row=ViewerRow.SYNC,
        meaning="Synchronisation: waiting for events, streams and contexts.",
        columns=(
            *TIMED,
            Column("type", "uint32", "1 event, 2 stream waits for event, 3 stream, 4 context"),
            Column("device", "int32", "device of the context; -1: no other record names that context"),
            Column("context", "uint32", "context id"),
            Column("stream", "uint32", "stream id; UNKNOWN_STREAM: none"),
            Column("correlation", "uint32", "joins with the runtime call"),
            Column("event", "uint32", "CUDA event id (types 1 and 2)"),
            Column("wait_on_stream", "int64", "stream in which that event was last recorded; -1: unknown"),
            Column("wait_on_correlation", "int64", "correlation of that record call; -1: unknown"),
        ),
        arguments=(
            *EXTERNAL,
            Arg("device", "device", I32, -1),
            Arg("context", "context", U32),
            Arg("stream", "stream", SIGNED_U32, -1),
            Arg("correlation", "correlation", U32),
            Arg("wait_on_cuda_event_id", "event", U32),
            Arg("wait_on_stream", "wait_on_stream", I64, -1),
            Arg("wait_on_cuda_event_record_corr_id", "wait_on_correlation", I64, -1),
            Arg("Ev Idx", "event_index", I64),
        ),
        categories=("*_sync",),  # cuda_, xpu_, …
    ),
    ActivityTable(
        name="cpu_op",
        row=ViewerRow.OPERATOR,
        meaning="PyTorch's operators on the host.",
        columns=OP,
        arguments=OP_ARGUMENTS,
        categories=("cpu_op", "operator"),
    ),
    ActivityTable(
        name="user_annotation",
        row=ViewerRow.OPERATOR,
        meaning="Ranges that the program marked on the host (record_function, ProfilerStep#N).",
        columns=OP,
        arguments=OP_ARGUMENTS,
        categories=("user_annotation",),
    ),
    ActivityTable(
        name="op_tensor",
        row=ViewerRow.NONE,
        meaning="The tensors among the operators' inputs. This table has no times.",
        columns=(
            Column("op", "int64", "id of the op whose input it is"),
            Column("position", "uint32", "its position among the tensors of the op's inputs, from 0"),
            Column("impl", "uint64", "address of the TensorImpl"),
            Column("storage", "uint64", "address of the storage's data; 0: none"),
        ),
    ),
    ActivityTable(
        name="graph_node",
        row=ViewerRow.NONE,
        meaning="Nodes of the CUDA graphs that the agent saw being captured, before or during the trace. No times.",
        columns=(
            Column("graph", "int32", "number of the captured graph, from 0; not CUPTI's id"),
            Column("node", "int32", "number of the node in its graph, in the order of the capture, from 0"),
            Column("type", "int32", "CUgraphNodeType: 0 kernel, 1 copy, 2 fill, others"),
            Column("name", "int32", "name of the kernel; -1: none", text=True),
            Column("grid_x", "int32", "blocks; 0: not a kernel"),
            Column("grid_y", "int32", "blocks"),
            Column("grid_z", "int32", "blocks"),
            Column("block_x", "int32", "threads; 0: not a kernel"),
            Column("block_y", "int32", "threads"),
            Column("block_z", "int32", "threads"),
            Column("operator", "int32", "row of graph_op: the operator that added it; -1: unknown"),
        ),
    ),
    ActivityTable(
        name="graph_op",
        row=ViewerRow.NONE,
        meaning="Operators and annotations that added the nodes in graph_node during the capture. No times.",
        columns=(
            Column("graph", "int32", "number of the captured graph"),
            Column("name", "int32", "its name", text=True),
            Column("parent", "int32", "row of graph_op: the operator around it; -1: none"),
            Column("scope", "uint8", "at::RecordScope: 0 function, 1 backward function, 7 user"),
            Column("inputs", "int32", "its inputs as Kineto's JSON arguments; -1: unknown", text=True),
        ),
    ),
    ActivityTable(
        name="gpu_user_annotation",
        row=ViewerRow.ANNOTATION,
        meaning="Where and when the GPU work of annotations ran.",
        columns=(
            *TIMED,
            Column("device", "uint32", "device index"),
            Column("stream", "uint32", "CUPTI's stream id"),
            Column("external_id", "int64", "id of the user_annotation"),
        ),
        arguments=(
            *EXTERNAL,
            Arg("device", "device", U32, UNKNOWN_NUMBER),
            Arg("stream", "stream", U32, UNKNOWN_NUMBER),
            Arg("Ev Idx", "event_index", I64),
        ),
        categories=("gpu_user_annotation",),
    ),
    ActivityTable(
        name="cpu_instant_event",
        row=ViewerRow.MEMORY,
        meaning="Allocations and frees of memory.",
        columns=(
            *TIMED,
            Column("thread", "uint32", "system thread id; 0: unknown"),
            Column("bytes", "int64", "allocated; negative: freed"),
            Column("address", "uint64", "of the block"),
            Column("total_allocated", "int64", "bytes on the device after this event; -1: unknown"),
            Column("total_reserved", "int64", "bytes on the device after this event; -1: unknown"),
            Column("device_type", "int32", "0 CPU, 1 CUDA"),
            Column("device", "int32", "device index; -1: CPU"),
            Column("external_id", "int64", "id of the innermost op or annotation at that time; 0: none"),
        ),
        arguments=(
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
    ),
    ActivityTable(
        name="overhead",
        row=ViewerRow.OVERHEAD,
        meaning="The profiler's own work.",
        columns=(*TIMED, Column("kind", "uint32", "CUPTI's overhead kind")),
        arguments=(Arg("External id", "external_id", I64), Arg("Ev Idx", "event_index", I64)),
        categories=("overhead",),
    ),
    ActivityTable(
        name="flow",
        row=ViewerRow.FILE,
        meaning="Ends of the arrows between events, in traces read from files.",
        columns=(
            *TIMED,
            Column("thread", "uint32", "system thread id of this end; GPU rows: number of the stream"),
            Column("category", "int32", "ac2g, fwdbwd, …", text=True),
            Column("phase", "uint8", "as ASCII: s start, t step, f end"),
            Column("id", "int64", "id that both ends share"),
        ),
        arguments=(Arg("Ev Idx", "event_index", I64),),
    ),
    ActivityTable(
        name="other",
        row=ViewerRow.FILE,
        meaning="Events of trace files that fit no other table: metadata, counters, instants, foreign categories.",
        columns=(
            *TIMED,
            Column("thread", "uint32", "thread as in the table flow"),
            Column("category", "int32", "the category in the file; -1: none", text=True),
            Column("phase", "uint8", "as ASCII: X complete, i instant, C counter, M metadata, …"),
        ),
        arguments=(
            *EXTERNAL,
            Arg("device", "device", I64, -1),
            Arg("context", "context", I64),
            Arg("stream", "stream", I64, -1),
            Arg("correlation", "correlation", I64),
            Arg("event_id", "event_id", I64),  # cuda_event
            Arg("Ev Idx", "event_index", I64),
            Arg("bytes", "bytes", I64),
            Arg("Bytes", "memory_bytes", I64),
            Arg("Addr", "address", U64),
            Arg("k_work_ptr", "k_work_ptr", U64),  # this argument and those below belong to mtia_ccp_events
            Arg("seq_num", "seq_num", I64),
            Arg("size", "size", I64),
        ),
    ),
    ActivityTable(
        name="counter",
        row=ViewerRow.COUNTER,
        meaning="Samples of hardware counters. A value covers the whole GPU over its sampling interval.",
        columns=(
            *TIMED[:2],
            Column("name", "int32", "what is measured, in the same words for every vendor, such as DRAM", text=True),
            Column("device", "uint32", "device index as the process sees it"),
            Column("metric", "int32", "the vendor's name for it; -1: unknown", text=True),
            Column("unit", "int32", "%, B/s, Hz, W or the vendor's unit; -1: none", text=True),
            Column(
                "value", "float64", "mean over the sample, with the precision of a float32; NaN: the sample has none"
            ),
        ),
        arguments=(Arg("", "value", F64, NAN_BITS),),
        categories=("*,hardware_counter", "*,hardware_counter_none"),  # formats/counter_series.py
    ),
    ActivityTable(
        name="python_function",
        row=ViewerRow.PYTHON,
        meaning="Python functions and calls of nn.Module on the host, recorded or sampled.",
        columns=(
            *TIMED,
            Column("thread", "uint32", "system thread id"),
            Column("depth", "int32", "0: outermost frame"),
            Column("parent", "int32", "row of the calling frame's slice; NO_ROW: none"),
            Column("samples", "int32", "samples in which this slice was on the stack"),
            Column("self_samples", "int32", "samples in which it was the innermost frame"),
            Column(
                "running",
                "int32",
                "self samples in which the thread was on a CPU most of the time since its last sample",
            ),
            Column("waiting", "int32", "self samples in which the thread waited for the GIL"),
            Column(
                "idle",
                "int32",
                "self samples in which the thread did not run for another reason: it slept or waited",
            ),
            Column("line", "int32", "line that was executing in most of its samples; 0: unknown"),
            Column("lines", "int32", "its self samples by line and state; -1: unknown", text=True),
            Column("callees", "int32", "its self samples at calls by line, callee and state; -1: unknown", text=True),
            Column("module", "int32", "rows of nn.Module calls: the module's number; -1: a plain function"),
            Column("call_line", "int32", "line of the caller at which it was called; 0: unknown"),
            Column("idle_sleep", "int32", "idle samples in which the thread was sleeping"),
            Column("idle_lock", "int32", "idle samples in which it waited for a lock, a condition or a semaphore"),
            Column("idle_poll", "int32", "idle samples in which it waited for a socket, a pipe or another event"),
            Column("idle_io", "int32", "idle samples in which it waited in a read or write"),
            Column("idle_child", "int32", "idle samples in which it waited for a child process"),
            Column("idle_driver", "int32", "idle samples in which it waited in a driver (ioctl)"),
            Column("idle_memory", "int32", "idle samples in which it waited for a page or to map memory"),
            Column("ready", "int32", "running samples in which it was waiting for a CPU"),
            Column("collecting", "int32", "running samples in which Python's garbage collector ran on it"),
            Column(
                "gil_holder",
                "int32",
                "system thread id that held the GIL in most samples in which this slice waited for it; 0: unknown",
            ),
        ),
        arguments=(
            Arg("Python id", "python_id", I64, -1),
            Arg("Python parent id", "python_parent_id", I64, -1),
            Arg("Python thread", "python_thread", I64),
            Arg("Python module id", "module", I32, -1),
            Arg("Ev Idx", "event_index", I64),
            Arg("External id", "external_id", I64),
            Arg("samples", "samples", I32),
            Arg("self samples", "self_samples", I32),
            Arg("finished", "finished", BOOL),
            Arg("line", "line", I32),
            Arg("running samples", "running", I32),
            Arg("samples waiting for the GIL", "waiting", I32),
            Arg("idle samples", "idle", I32),
            Arg("called at line", "call_line", I32),
            Arg("samples asleep", "idle_sleep", I32),
            Arg("samples waiting for a lock", "idle_lock", I32),
            Arg("samples polling", "idle_poll", I32),
            Arg("samples in I/O", "idle_io", I32),
            Arg("samples waiting for a child", "idle_child", I32),
            Arg("samples in a driver", "idle_driver", I32),
            Arg("samples waiting for memory", "idle_memory", I32),
            Arg("samples ready for a CPU", "ready", I32),
            Arg("samples collecting garbage", "collecting", I32),
            Arg("GIL held by thread", "gil_holder", I32),
            Arg(START_MOVED, "start_moved", I64),
            Arg(END_MOVED, "end_moved", I64),
        ),
        categories=("python_function",),
    ),
)
# Arguments of the tables that events are read into. The tables of files come last: they get the remaining events.
KINDS = {
    table.name: table.arguments
    for table in sorted(TABLES, key=lambda table: table.row is ViewerRow.FILE)
    if table.row is not ViewerRow.NONE
}
# Categories of complete events and of counters: (text, whether it is only the ending of one, table). The first match
# counts.
CATEGORIES = tuple(
    (text.removeprefix("*"), text.startswith("*"), table.name)
    for table in sorted(TABLES, key=lambda table: table.row.value)
    for text in table.categories
)
# Arguments of sampled slices that are written if they are not 0, by column.
SAMPLED_ARGUMENTS = {
    arg.column: arg.key for arg in KINDS["python_function"] if arg.column in ("call_line", *WAITS[1:], "gil_holder")
}


def table_of(category: str) -> str:
    """Returns the table of complete events of a category; the category itself if it is not one of Kineto's."""
    fits = (table for text, ends, table in CATEGORIES if (category.endswith(text) if ends else category == text))
    return next(fits, category)


def tables_on(*rows: ViewerRow) -> tuple[str, ...]:
    """Returns the names of the tables on these rows, row by row."""
    return tuple(table.name for row in rows for table in TABLES if table.row is row)


def numbers_of(name: str) -> dict[str, str]:
    """Returns the columns of a GPU table that are arguments, with the first name of each, but without external_id.

    Many rows have no external id.
    """
    (table,) = (table for table in TABLES if table.name == name)
    columns = {column.name for column in table.columns} - {"external_id"}
    found: dict[str, str] = {}
    for arg in table.arguments:
        if arg.column in columns:
            found.setdefault(arg.column, arg.key)
    return found


def arguments_of(table: ActivityTable) -> tuple[Column, ...]:
    """Returns the columns of such a table that are arguments of its rows in files."""
    return tuple(column for column in table.columns if column.name not in _NO_ARGUMENTS)


def vendor_columns(table: ActivityTable) -> frozenset[str]:
    """Returns the columns of such a table that the vendor has declared: their names have no common meaning."""
    return frozenset(column.name for column in table.columns) - ROW_COLUMNS[table.row].keys()


def declared_to_json(table: ActivityTable) -> dict[str, Any]:
    """Returns the declaration of a table for json.dumps."""
    columns = [column._asdict() for column in table.columns]
    return {"row": table.row.name, "meaning": table.meaning, "columns": columns}


def declared_from_json(name: str, value: Any) -> ActivityTable:
    """Returns the checked table of this name from the output of declared_to_json. Raises ValueError."""
    _need(OWN_NAME.fullmatch(name) is not None, f"{name!r:.80} is not a valid name of an activity type")
    _need(isinstance(value, Mapping), "it is not a JSON object")
    row = {row.name: row for row in OWN_ROWS}.get(value.get("row"))
    _need(row is not None and _is_meaning(value.get("meaning")), "row or meaning")
    entries = value.get("columns")
    _need(isinstance(entries, list) and all(_is_column(entry) for entry in entries), "columns")
    columns = tuple(Column(**entry) for entry in entries)
    types = {column.name: column.dtype for column in columns}
    assert row is not None
    _need(not types.keys() & _ADDED_COLUMNS, "columns")
    _need(len(types) == len(columns) and ROW_COLUMNS[row].items() <= types.items(), "columns")
    _need(next(column for column in columns if column.name == "name").text, "columns")
    return ActivityTable(name=name, row=row, meaning=value["meaning"], columns=columns)


def _is_column(entry: Any) -> bool:
    if not isinstance(entry, Mapping) or set(entry) != set(Column._fields):
        return False
    name, dtype, meaning, text = (entry[field] for field in Column._fields)
    return (
        isinstance(name, str)
        and _COLUMN.fullmatch(name) is not None
        and isinstance(dtype, str)
        and _DTYPE.fullmatch(dtype) is not None
        and _is_meaning(meaning)
        and isinstance(text, bool)
        and (not text or dtype == "int32")
    )


def _is_meaning(text: Any) -> bool:
    return isinstance(text, str) and len(text) <= _MAX_MEANING and text.isprintable()


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"the declaration of its columns has an invalid value: {what}")
