"""Record formats of arenas: the one table, shared by sources and decoders. No I/O.

A record is little-endian and packed. A dictionary lists its fields in order, each with its `struct` code; the decoders
build columns from the same dictionary. agent/native/common/arena.h has the numbers in C;
tests/unit/agent/protocol/test_arena.py compares them.

Formats
    CUPTI              Raw CUPTI activity records, as CUPTI wrote them: layout by cuptiGetVersion in the metadata,
                       observed record sizes in the arena's header.
    PTI                Raw records of Intel's PTI, as PTI wrote them: layout by the version in the metadata. Names of
                       kernels are keys of the string table instead of pointers.
    ROCPROFILER        Records of rocprofiler-sdk, each behind a kit_header, and HIP calls beside them: layouts are in
                       daemon/kineto_trace/decode/rocprofiler_records.py, rocprofiler_version in the metadata.
    PYTHON_STACKS      STACK_SAMPLE records: a thread at one time. Its stack is a node of a tree in the string table.
    PYTHON_CALLS       PYTHON_CALL records: every call of Python and every return, in the order of time.
    TORCH_OPS          OP, OP_TENSORS and OP_COMMS records of 64 bytes, distinguished by the byte at OP_KIND. Thread and
                       number link the other two to their OP.
    TORCH_PROFILER     The bytes of one Chrome trace as Kineto writes it, in the order of the buffers' sequence.
    FILE               Likewise the bytes of one file that is kept unchanged; metadata["file"] names its kind.
    MEMORY_EVENTS      MEMORY_EVENT records: actions of torch's caching allocator for CUDA, from torch's own history.
    STEP_MARKS         STEP_MARK records: the start of each training iteration, first of all the running one.
    GRAPH_NODES        The bytes of captured CUDA graphs, one after the other, in the order of the buffers' sequence.
    DECLARED           Records whose schema (schema.py) is in metadata["schema"].
    XPLANE             The bytes of XLA's profiles (tensorflow.profiler.XSpace, serialised), in the order of the
                       buffers' sequence, each behind a PART_HEAD.
    HLO_MODULES        Likewise those of XLA's compiled modules (xla.HloModuleProto).

Called functions (SPACE_PYTHON_CALL)
    "F", then file, line and name of a Python function, separated by line breaks; "C" and the name of any other; "M",
    then class and number of a torch.nn.Module. Modules of a class are numbered in the order in which they are seen.

Inputs (SPACE_OP_INPUTS)
    One entry describes the inputs of an op. An op whose inputs were not recorded, or whose entry did not get into the
    string table, has the number 0.

        entry        u8 n, u8 flags, n inputs                  INPUTS_CUT: there were more inputs
        input        u8 kind, then by kind
            INPUT_OTHER        -                               strings, devices, complex numbers, symbols, objects
            INPUT_TENSOR       tensor
            INPUT_TENSOR_LIST  u8 n, u8 flags, n tensors       INPUTS_CUT: there were more elements
            INPUT_INT          i64
            INPUT_DOUBLE       f64
            INPUT_BOOL         u8
            INPUT_SCALAR_LIST  u8 n, u8 flags, n inputs        int, double and bool only; also any empty list
            INPUT_NONE         -
        tensor       u8 dtype, u8 d, u8 flags, i64 sizes[d], i64 strides[d]
            dtype    index into metadata["dtypes"], names as Kineto writes them; 255: an undefined tensor
            flags    TENSOR_NO_SIZES: the sizes are not the tensor's own (nested, symbolic, defined in Python); d is 0
                     TENSOR_NO_STRIDES: likewise the strides (sparse); the entry has none
                     TENSOR_CUT: it has more dimensions than the 16 of the entry

    At most 32 inputs, 32 tensors or 30 scalars of a list, and 4 KiB in all. OP_TENSORS records count the tensors of the
    entry in its order, those in lists too, without undefined ones; 64 at most.

Captured graphs (GRAPH_NODES)
    A graph is a GRAPH_HEAD, its nodes (GRAPH_NODE) in the order of their creation, the operators in which they were
    added (GRAPH_OP), and texts: u32 length, bytes. Nodes and operators refer to texts by offset, and to operators by
    number; GRAPH_NONE: none. The inputs of an operator are a SPACE_OP_INPUTS entry. metadata["dtypes"] as in TORCH_OPS;
    metadata["left_out"]: number of graphs that could not be kept, by reason.

Collectives (SPACE_OP_COMMS)
    One entry describes the collective for which an op "record_param_comms" stands, from torch::ParamCommsDebugInfo. An
    OP_COMMS record, written before that of the op, has its number.

        entry        COMMS_NUMBERS, then text name, text process group, text description of the group, and
                     numbers split sizes in, numbers split sizes out, numbers global ranks
        text         u8 n, n bytes                             at most 200
        numbers      u32 n, i64 values                         of more than 30 the first 29 and the last
"""

import struct
from typing import Dict

CUPTI_FORMAT = "cupti/1"
PTI_FORMAT = "pti/1"
PYTHON_STACKS_FORMAT = "python_stacks/2"
PYTHON_STACKS_1_FORMAT = "python_stacks/1"  # of earlier agents; only read
PYTHON_CALLS_FORMAT = "python_calls/1"
TORCH_OPS_FORMAT = "torch_ops/1"
TORCH_PROFILER_FORMAT = "kineto_json/1"
FILE_FORMAT = "file/1"
MEMORY_EVENTS_FORMAT = "memory_events/1"
STEP_MARKS_FORMAT = "step_marks/1"
GRAPH_NODES_FORMAT = "graph_nodes/1"
DECLARED_FORMAT = "declared/1"
ROCPROFILER_FORMAT = "rocprofiler/1"
XPLANE_FORMAT = "xplane/1"
HLO_MODULES_FORMAT = "hlo_modules/1"


def packed(fields: Dict[str, str]) -> struct.Struct:
    """The layout of a record with these fields."""
    return struct.Struct("<" + "".join(fields.values()))


# ------------------------------------------------------------ entries of the string table: their spaces and keys

SPACE_KERNEL_NAME = 0  # the name pointer in kernel records
SPACE_DRIVER_API = 1  # callback id
SPACE_RUNTIME_API = 2  # callback id
SPACE_PYTHON_CODE = 3  # code number (> 0); PYTHON_CODE, file, name, the raw line table (maybe cut or empty)
SPACE_STACK_NODE = 4  # node number (> 0); STACK_NODE; a parent has the smaller number
SPACE_THREAD_NAME = 5  # system thread id; a later entry replaces an earlier one
SPACE_OP_NAME = 6  # hash of the text, as in OP
SPACE_OP_INPUTS = 7  # hash of the entry, as in OP
SPACE_TORCH_THREAD = 8  # system thread id; u64: torch's own number of that thread
SPACE_OP_COMMS = 9  # hash of the entry, as in OP_COMMS
SPACE_PYTHON_CALL = 10  # number, as in PYTHON_CALL
SPACE_PYTHON_BYTECODE = 11  # number of SPACE_PYTHON_CODE; PYTHON_BYTECODE, bytecode, co_names, names of variables
SPACE_CLOCK_PAIR = 12  # Unix ns; CLOCK_PAIR: what the clock of the records showed at that time
FIRST_VENDOR_SPACE = 16  # from here on each format has its own spaces

# ------------------------------------------------------------ records of the collector kit (agent/native/kit/vendor.h)

CLOCK_PAIR = struct.Struct("<Q")
HEADED_RECORD = struct.Struct("<II")  # before each record that a vendor pushes: kind, bytes to the next header
HEADED_ALIGNMENT = 8  # bytes: what a record is padded to
KIND_TEXT = 0xFFFFFFFF  # not a record: a text for the string table, to be skipped

# ------------------------------------------------------------ Python's stacks and calls

STACK_SAMPLE_FIELDS = {
    "time": "q",  # Unix ns
    "thread": "I",  # system thread id
    "node": "I",  # 0: no Python frame
    "state": "I",  # STACK_…, perhaps STACK_HOLDS_GIL, and from STACK_WAIT_SHIFT on one of WAIT_…
    "cpu_us": "I",  # CPU time since the thread's previous sample
}
STACK_SAMPLE = packed(STACK_SAMPLE_FIELDS)
STACK_UNKNOWN, STACK_RUNNING, STACK_WAITS_FOR_GIL, STACK_IDLE = range(4)  # states, at the moment of the sample
STACK_STATE_MASK, STACK_HOLDS_GIL, STACK_WAIT_SHIFT, STACK_WAIT_MASK = 0xFF, 0x100, 16, 0xFF
# What an idle thread waits for, from its system call. For running ones, WAIT_CPU: it has no CPU now; WAIT_COLLECTOR: it
# runs the garbage collector, and its function waits for that.
(
    WAIT_UNKNOWN, WAIT_SLEEP, WAIT_LOCK, WAIT_POLL, WAIT_IO, WAIT_CHILD, WAIT_DRIVER, WAIT_MEMORY, WAIT_CPU,
    WAIT_COLLECTOR,
) = range(10)  # fmt: skip
PYTHON_CODE = struct.Struct("<IBII")  # first line, LINES_…, bytes of the file's name, bytes of the qualified name
PYTHON_BYTECODE = struct.Struct("<II")  # bytes of bytecode as it runs, bytes of co_names; a NUL ends each name
LINES_NONE, LINES_LNOTAB, LINES_310, LINES_311 = 0, 9, 10, 11  # co_lnotab of 3.9, co_linetable of 3.10, and of later
STACK_NODE = struct.Struct("<IIi")  # parent node (0: root), code number, offset in the bytecode (-1: unknown)

# PYTHON_STACKS_1: the line of the innermost frame is in the sample. Code is file, first line and name, separated by
# NUL.
STACK_SAMPLE_1_FIELDS = {"time": "q", "thread": "I", "node": "I", "line": "I", "reserved": "I"}
STACK_NODE_1 = struct.Struct("<II")  # parent node, code number

PYTHON_CALL_FIELDS = {
    "time": "q",  # Unix ns
    "thread": "I",  # system thread id
    "name": "I",  # one of CALL_…, or the key of a SPACE_PYTHON_CALL entry
}
PYTHON_CALL = packed(PYTHON_CALL_FIELDS)
PYTHON_CALL_BYTES = PYTHON_CALL.size
CALL_RETURN = 0  # from the innermost Python function of the thread
CALL_C_RETURN = 1  # from a C function called by that one
CALL_CUT = 2  # the thread is no longer recorded: all its calls end here
CALL_UNKNOWN = 4  # a call whose name did not fit; 5: in C
CALL_FIRST = 16  # of the numbers; odd ones are functions in C

# ------------------------------------------------------------ torch

OP_FIELDS = {
    "start": "q",  # Unix ns
    "end": "q",  # Unix ns; 0: had not ended
    "name": "Q",
    "sequence": "q",  # -1: none
    "forward_thread": "Q",  # torch's number of it; 0: none
    "inputs": "Q",  # 0: not recorded
    "thread": "I",  # system thread id
    "number": "I",  # of the op in its thread
    "kind": "B",
    "scope": "B",
    "flags": "B",
    "reserved": "B",
    "reserved_2": "I",
}
OP = packed(OP_FIELDS)
TENSORS_PER_RECORD = 3
OP_TENSORS_FIELDS = {
    "tensors": "6Q",  # for each: address of the TensorImpl, address of the storage's data
    "thread": "I",
    "number": "I",
    "kind": "B",
    "count": "B",  # tensors in here
    "position": "B",  # of the first one among the op's tensors
    "reserved": "B",
    "reserved_2": "I",
}
OP_TENSORS = packed(OP_TENSORS_FIELDS)
OP_COMMS_FIELDS = {
    "text": "Q",  # the entry; 0: lost
    "sequence": "q",  # in the process group; -1: none
    "reserved": "4Q",
    "thread": "I",
    "number": "I",
    "kind": "B",
    "transfer": "B",  # 1: the sequence number counts transfers between two ranks
    "reserved_2": "2B",
    "reserved_3": "I",
}
OP_COMMS = packed(OP_COMMS_FIELDS)
OP_KIND = 56  # byte offset in all three
KIND_OP, KIND_OP_TENSORS, KIND_OP_COMMS = 0, 1, 2
SCOPE_FUNCTION, SCOPE_BACKWARD_FUNCTION, SCOPE_USER = 0, 1, 7  # at::RecordScope
OP_UNFINISHED, OP_ENDED_ELSEWHERE = 1, 2  # flags: still running when recording ended; ended on another thread

(
    INPUT_OTHER, INPUT_TENSOR, INPUT_TENSOR_LIST, INPUT_INT, INPUT_DOUBLE, INPUT_BOOL, INPUT_SCALAR_LIST, INPUT_NONE,
) = range(8)  # fmt: skip
INPUTS_CUT = 1
TENSOR_NO_SIZES, TENSOR_NO_STRIDES, TENSOR_CUT = 1, 2, 4
# rank in the group, size of the group, first global rank, stride of global ranks, elements in, elements out,
# at::ScalarType
COMMS_NUMBERS = struct.Struct("<iiiiqqb")

MEMORY_EVENT_FIELDS = {"time": "q", "address": "Q", "bytes": "Q", "stream": "Q", "device": "i", "action": "I"}
MEMORY_EVENT = packed(MEMORY_EVENT_FIELDS)
MEMORY_ALLOCATED, MEMORY_FREED, MEMORY_RESERVED, MEMORY_RELEASED, MEMORY_OUT_OF_MEMORY = range(1, 6)  # actions

# ------------------------------------------------------------ training iterations

STEP_MARK_FIELDS = {
    "time": "q",  # Unix ns at which it began
    "number": "q",
    "thread": "I",  # system id of the thread that steps
    "reserved": "I",
}
STEP_MARK = packed(STEP_MARK_FIELDS)

# ------------------------------------------------------------ captured CUDA graphs

GRAPH_MAGIC = b"KGRAPH01"
GRAPH_NONE = 0xFFFFFFFF
GRAPH_HEAD_FIELDS = {"magic": "8s", "bytes": "Q", "nodes": "I", "ops": "I", "text_bytes": "I", "flags": "I"}
GRAPH_HEAD = packed(GRAPH_HEAD_FIELDS)
GRAPH_NODE_FIELDS = {
    "type": "I",  # CUgraphNodeType: 0 kernel, 1 copy, 2 fill
    "op": "I",
    "name": "I",  # of the kernel, mangled
    "grid": "3I",
    "block": "3I",
}
GRAPH_NODE = packed(GRAPH_NODE_FIELDS)
GRAPH_OP_FIELDS = {
    "parent": "I",  # the enclosing operator, whose number is smaller
    "name": "I",
    "inputs": "I",
    "scope": "I",  # SCOPE_…
}
GRAPH_OP = packed(GRAPH_OP_FIELDS)

# ------------------------------------------------------------ XLA

PART_HEAD = struct.Struct("<Q")  # bytes of the serialised message that follows
