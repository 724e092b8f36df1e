"""Columns of tables, and arguments of their rows in Chrome traces, that several tables share."""

from kineto_trace.model.activity_table import Column
from kineto_trace.model.event_kinds import BOOL, F64, I64, U32, U64, Arg

NAN_BITS = 0x7FF8 << 48
UNKNOWN_NUMBER = 0xFFFFFFFF  # missing among the arguments: formats/chrome/chrome_tables.py takes it from pid or tid

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
    Column("torch_thread", "uint32", "torch's own number of the thread; 0: unknown"),
    Column("forward_thread", "uint32", "backward ops: torch's number of the forward op's thread; 0: none"),
    Column("scope", "uint8", "at::RecordScope: 0 function, 1 backward function, 7 user"),
    Column("finished", "uint8", "0: it was still running when the recording ended"),
    Column("inputs", "int32", "its inputs as Kineto's JSON arguments; -1: not recorded", text=True),
)
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
