"""The memory that a source writes and the daemon reads: layout of an arena. No I/O.

Theory of operation
    An arena is one memfd, sealed against shrinking and growing (the daemon maps it and checks the
    seals first, so that a target can never make it fault). The agent's side writes everything but one
    transition: the daemon sets a READY buffer back to FREE once it has copied it. What is READY
    survives the target's death.

    header (4096 bytes) | descriptors (64 bytes each) | string table | buffers (page aligned)

    Buffer states:  FREE -> LOANED (a producer writes) -> COMPLETED (valid_bytes set) -> READY (names
    of its records are in the string table; sequence set) -> FREE (the daemon copied it).
    State words are stored with release and loaded with acquire order (natural-width stores on the
    Python side). The string table only grows; `strings_used` is published after the bytes.

    String table entry: u64 key, u32 space, u32 length, bytes padded to a multiple of 8.

    agent/native/common/arena.h says the same in C; tests/unit/agent/protocol/test_arena.py compares the two.

Formats
    "cupti/1"          raw CUPTI activity records, as CUPTI wrote them (layout by cuptiGetVersion in
                       the metadata, observed record sizes in the header).
    "python_stacks/2"  STACK_SAMPLE records: a thread at one time; its stack is a node of a tree in the string table.
    "python_calls/1"   PYTHON_CALL records: each call of Python, in the order of time, and each return.
    "torch_ops/1"      OP, OP_TENSORS and OP_COMMS records of 64 bytes, told apart by the byte at OP_KIND. What the
                       others say of an op is found by its thread and number.
    "kineto_json/1"    the bytes of one Chrome trace as Kineto writes it, in the order of the buffers' sequence.
    "file/1"           likewise the bytes of one file that is kept as it is; metadata["file"] names its kind.
    "memory_events/1"  MEMORY_EVENT records: what torch's caching allocator for CUDA did, from torch's own history.
"""

import struct

MAGIC = b"KINETOA1"
HEADER_BYTES = 4096
DESCRIPTOR_BYTES = 64
PAGE_BYTES = 4096

# header, constant after creation: magic, header bytes, buffer count, buffer bytes, offsets and sizes
FIXED = struct.Struct("<8sIIQQQQQQ")
FIXED_FIELDS = (
    "magic", "header_bytes", "buffer_count", "buffer_bytes", "descriptors_offset",
    "strings_offset", "strings_bytes", "buffers_offset", "total_bytes",
)  # fmt: skip

# header, written while recording: byte offsets of u64 words
STRINGS_USED = 64
RECORDS = 72  # in READY buffers, cumulative
DROPPED = 80  # records lost, cumulative
VALID_BYTES = 88  # in READY buffers, cumulative
SEQUENCE = 96  # READY buffers so far; the next one gets this number
CLOSED = 112  # 1: the source has stopped and every buffer with records is READY
RECORD_BYTES = 512  # u32[128]: observed size of one record by CUPTI activity kind, 0: none seen
RECORD_KINDS = 128
# "cupti/1": when recording began and at its latest flush, u64 each: Unix ns, the processor's time stamp counter (0: it
# has none), CLOCK_MONOTONIC ns. Times of records may be of any of these clocks (agent/native/cupti/clock_samples.c).
CLOCKS_FIRST = 1024
CLOCKS_LAST = 1048

# descriptor: byte offsets in its 64 bytes
STATE = 0  # u32
BUFFER_VALID_BYTES = 8  # u64
BUFFER_SEQUENCE = 16  # u64
BUFFER_RECORDS = 24  # u64

FREE, LOANED, COMPLETED, READY = range(4)

STRING_ENTRY = struct.Struct("<QII")  # key, space, length
SPACE_KERNEL_NAME = 0  # key: the name pointer in kernel records
SPACE_DRIVER_API = 1  # key: callback id
SPACE_RUNTIME_API = 2  # key: callback id
SPACE_PYTHON_CODE = 3  # key: code number (> 0); PYTHON_CODE, file, name, the raw line table (maybe cut or empty)
SPACE_STACK_NODE = 4  # key: node number (> 0); STACK_NODE; a parent has the smaller number
SPACE_THREAD_NAME = 5  # key: system thread id; a later entry replaces an earlier one
SPACE_OP_NAME = 6  # key: hash of the text, as in OP
SPACE_OP_INPUTS = 7  # key: hash of the entry, as in OP; what the inputs of an op look like (sources/torch/operators.py)
SPACE_TORCH_THREAD = 8  # key: system thread id; u64: torch's own number of that thread
SPACE_PYTHON_CALL = 10  # key: number, as in PYTHON_CALL; what is called (sources/python/call_tracing.py)
SPACE_OP_COMMS = (
    9  # key: hash of the entry, as in OP_COMMS; what torch says about a collective (sources/torch/operators.py)
)

# time ns, system thread id, stack node (0: no Python frame), state and STACK_HOLDS_GIL, CPU time in us since the
# thread's previous sample
STACK_SAMPLE = struct.Struct("<qIIII")
STACK_UNKNOWN, STACK_RUNNING, STACK_WAITS_FOR_GIL, STACK_IDLE = range(4)  # states, at the moment of the sample
STACK_HOLDS_GIL = 256
PYTHON_CODE = struct.Struct("<IBII")  # first line, LINES_*, bytes of the file's name, bytes of the qualified name
LINES_NONE, LINES_LNOTAB, LINES_310, LINES_311 = 0, 9, 10, 11  # co_lnotab of 3.9, co_linetable of 3.10, and of later
STACK_NODE = struct.Struct("<IIi")  # parent node (0: root), code number, offset in the bytecode (-1: unknown)

# time ns, thread id, name: one of CALL_… or the number of a SPACE_PYTHON_CALL entry
PYTHON_CALL = struct.Struct("<QII")
PYTHON_CALL_BYTES = PYTHON_CALL.size
CALL_RETURN = 0  # of the innermost Python function of the thread
CALL_C_RETURN = 1  # of what that one has called
CALL_CUT = 2  # the thread is no longer recorded: all its calls end here
CALL_UNKNOWN = 4  # a call whose name found no room; 5: in C
CALL_FIRST = 16  # of the numbers; odd ones are of functions in C

# start ns, end ns (0: had not ended), name, sequence number (-1: none), torch's number of the forward thread (0: none),
# inputs (0: not recorded), system thread id, number of the op in its thread, kind, scope, flags, reserved
OP = struct.Struct("<qqQqQQIIBBBBI")
# three tensors: address of the TensorImpl, address of the storage's data; thread, op's number, kind, tensors in here,
# position of the first one among the op's tensors
OP_TENSORS = struct.Struct("<QQQQQQIIBBBBI")
# the entry (0: lost), sequence number in the process group (-1: none), reserved; thread, op's number, kind, 1 if the
# number counts transfers between two ranks, reserved
OP_COMMS = struct.Struct("<QqQQQQIIBBBBI")
OP_KIND = 56  # byte offset in all
KIND_OP, KIND_OP_TENSORS, KIND_OP_COMMS = 0, 1, 2
SCOPE_FUNCTION, SCOPE_BACKWARD_FUNCTION, SCOPE_USER = 0, 1, 7  # at::RecordScope
OP_UNFINISHED, OP_ENDED_ELSEWHERE = 1, 2  # flags: still running when recording ended; ended on another thread

# time ns, address, bytes, stream, device, action
MEMORY_EVENT = struct.Struct("<qQQQiI")
MEMORY_ALLOCATED, MEMORY_FREED, MEMORY_RESERVED, MEMORY_RELEASED, MEMORY_OUT_OF_MEMORY = range(1, 6)  # actions
