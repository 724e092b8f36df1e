"""The schema of "rocprofiler/1": rocprofiler-sdk's records and the calls that our collector records beside them.

The kinds of rocprofiler's records are its own numbers; those of calls, and the spaces of the string table, are those of
agent/native/rocprofiler/hip_calls.h and rocprofiler_vendor.h. What a schema cannot say (names of kernels, streams,
devices, blocks) is in rocprofiler_records.py, which fills the columns that are missing here.

HIP's calls are in Kineto's table "cuda_runtime" under this very name: Kineto writes it for them, too, in traces of
AMD's GPUs. HSA is the layer below, as the driver is CUDA's: its calls are "cuda_driver".
"""

from kineto_agent.protocol.schema import (
    BOOTTIME,
    DEVICE_TRACK,
    HEADED,
    THREAD_TRACK,
    Activity,
    Col,
    Record,
    Schema,
    Texts,
)

from kineto_trace.decode.rocprofiler.rocprofiler_layouts import RECORDS

HSA_CORE, HSA_AMD_EXT, MEMORY_COPY, KERNEL_DISPATCH, SCRATCH_MEMORY, MEMORY_ALLOCATION = 1, 2, 10, 11, 12, 16
HIP_RUNTIME_CALL, HIP_COMPILER_CALL = 60, 61
CALL_KINDS = (HIP_RUNTIME_CALL, HIP_COMPILER_CALL, HSA_CORE, HSA_AMD_EXT)

SPACE_KERNEL, SPACE_FUNCTION, SPACE_OPERATION = 16, 17, 18

_CODES = {
    "size": "Q", "kind": "i", "operation": "i", "correlation_id.internal": "Q", "thread_id": "Q",
    "start_timestamp": "Q", "end_timestamp": "Q", "dst_agent_id": "Q", "src_agent_id": "Q", "bytes": "Q",
    "dispatch_info.agent_id": "Q", "dispatch_info.queue_id": "Q", "dispatch_info.kernel_id": "Q",
    "dispatch_info.private_segment_size": "I", "dispatch_info.group_segment_size": "I",
    "dispatch_info.workgroup_size.x": "I", "dispatch_info.workgroup_size.y": "I", "dispatch_info.workgroup_size.z": "I",
    "dispatch_info.grid_size.x": "I", "dispatch_info.grid_size.y": "I", "dispatch_info.grid_size.z": "I",
    "agent_id": "Q", "queue_id": "Q", "flags": "I", "allocation_size": "Q", "address": "Q",
}  # fmt: skip
_SHORT = {
    "correlation_id.internal": "correlation", "thread_id": "thread", "start_timestamp": "start", "end_timestamp": "end",
    "dst_agent_id": "destination", "src_agent_id": "source", "agent_id": "agent", "queue_id": "queue",
    "workgroup_size.x": "block_x", "workgroup_size.y": "block_y", "workgroup_size.z": "block_z",
    "grid_size.x": "items_x", "grid_size.y": "items_y", "grid_size.z": "items_z",
    "private_segment_size": "private_bytes", "group_segment_size": "group_bytes", "allocation_size": "bytes",
}  # fmt: skip


def _fields(kind: int) -> dict[str, tuple[str, int]]:
    """The fields of one of rocprofiler's records that we read, by shorter names."""
    found = {}
    for name, offset in RECORDS[kind].offsets.items():
        if name in _CODES:
            short = name.removeprefix("dispatch_info.")
            found[_SHORT.get(short, short)] = (_CODES[name], offset)
    return found


def _record(kind: int, activity: str, *, thread: bool = False, otherwise: str = "?") -> Record:
    return Record(
        activity,
        min(RECORDS[kind].sizes),
        _fields(kind),
        texts=Texts(otherwise=otherwise),
        correlation="correlation",
        thread="thread" if thread else "",
    )


_HIP_CALL = Record(
    "cuda_runtime",
    48,
    {
        "start": ("Q", 0), "end": ("Q", 8), "correlation": ("Q", 16), "stream": ("Q", 24), "function": ("Q", 32),
        "thread": ("I", 40), "operation": ("I", 44),
    },
    texts=Texts(otherwise="?"),
    correlation="correlation",
    thread="thread",
)  # fmt: skip

_ALLOCATIONS = {1: "Allocate", 2: "Allocate virtual memory", 3: "Free", 4: "Free virtual memory"}
_SCRATCH = {1: "Scratch allocated", 2: "Scratch freed", 3: "Scratch reclaimed"}

SCHEMA = Schema(
    name="rocm",
    framing=HEADED,
    clock=BOOTTIME,
    types={
        "kernel": Activity(),
        "gpu_memcpy": Activity(columns=(Col("bytes"),)),
        "cuda_runtime": Activity(columns=(Col("cbid", field="operation"),)),
        "cuda_driver": Activity(columns=(Col("cbid", field="operation"),)),
        "rocm_memory": Activity(
            track=THREAD_TRACK,
            meaning="Device and host memory that HSA allocates and frees.",
            columns=(
                Col("bytes", "u64", "bytes allocated; 0 when memory is freed"),
                Col("address", "u64", "where the memory begins"),
                Col("device", "u32", "GPU whose memory it is; 4294967295: the host's, or unknown"),
            ),
        ),
        "rocm_scratch": Activity(
            track=DEVICE_TRACK,
            meaning="Scratch memory of a queue, in which kernels spill registers.",
            columns=(
                Col("bytes", "u64", "bytes allocated"),
                Col("flags", "u32", "rocprofiler_scratch_alloc_flag_t: 1 for one dispatch only, 2 alternating"),
            ),
        ),
    },
    records={
        HSA_CORE: _record(HSA_CORE, "cuda_driver", thread=True),
        HSA_AMD_EXT: _record(HSA_AMD_EXT, "cuda_driver", thread=True),
        MEMORY_COPY: _record(MEMORY_COPY, "gpu_memcpy"),
        KERNEL_DISPATCH: _record(KERNEL_DISPATCH, "kernel"),
        SCRATCH_MEMORY: _record(SCRATCH_MEMORY, "rocm_scratch")._replace(
            name="operation", texts=Texts(values=_SCRATCH, otherwise="Scratch memory, operation {}")
        ),
        MEMORY_ALLOCATION: _record(MEMORY_ALLOCATION, "rocm_memory", thread=True)._replace(
            name="operation", texts=Texts(values=_ALLOCATIONS, otherwise="Memory, operation {}")
        ),
        HIP_RUNTIME_CALL: _HIP_CALL,
        HIP_COMPILER_CALL: _HIP_CALL,
    },
)
