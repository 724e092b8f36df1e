"""Layouts of rocprofiler-sdk's records and callback payloads, and the versions that have them.

From AMD's public headers: daemon/native/generate_rocprofiler_layouts.py compares them. The fields have the vendor's
names. Each record begins with its own size, which must be one of those known here. Between 1.0.0 and 1.4.1 one record
has changed: kernel dispatches got a field at their end, after 1.3.5.
"""

from typing import NamedTuple


class StructureLayout(NamedTuple):
    """One vendor structure: its name, all its sizes in bytes so far, and the offsets of its fields."""

    structure: str
    sizes: tuple[int, ...]
    offsets: dict[str, int]


_ASYNC = {"size": 0, "kind": 8, "operation": 12, "correlation_id.internal": 16, "correlation_id.external": 24}

# By the number of the buffer tracing kind.
RECORDS: dict[int, StructureLayout] = {
    1: StructureLayout(
        "rocprofiler_buffer_tracing_hsa_api_record_t",
        (64,),
        _ASYNC | {"correlation_id.ancestor": 32, "start_timestamp": 40, "end_timestamp": 48, "thread_id": 56},
    ),
    10: StructureLayout(
        "rocprofiler_buffer_tracing_memory_copy_record_t",
        (96,),
        _ASYNC
        | {"thread_id": 32, "start_timestamp": 40, "end_timestamp": 48, "dst_agent_id": 56, "src_agent_id": 64}
        | {"bytes": 72, "dst_address": 80, "src_address": 88},
    ),
    11: StructureLayout(
        "rocprofiler_buffer_tracing_kernel_dispatch_record_t",
        (184, 192),
        _ASYNC
        | {"thread_id": 32, "start_timestamp": 40, "end_timestamp": 48, "dispatch_info.size": 56}
        | {"dispatch_info.agent_id": 64, "dispatch_info.queue_id": 72, "dispatch_info.kernel_id": 80}
        | {"dispatch_info.dispatch_id": 88, "dispatch_info.private_segment_size": 96}
        | {"dispatch_info.group_segment_size": 100, "dispatch_info.workgroup_size.x": 104}
        | {"dispatch_info.workgroup_size.y": 108, "dispatch_info.workgroup_size.z": 112}
        | {"dispatch_info.grid_size.x": 116, "dispatch_info.grid_size.y": 120, "dispatch_info.grid_size.z": 124},
    ),
    12: StructureLayout(
        "rocprofiler_buffer_tracing_scratch_memory_record_t",
        (96,),
        _ASYNC
        | {"correlation_id.ancestor": 32, "agent_id": 40, "queue_id": 48, "thread_id": 56, "start_timestamp": 64}
        | {"end_timestamp": 72, "flags": 80, "allocation_size": 88},
    ),
    16: StructureLayout(
        "rocprofiler_buffer_tracing_memory_allocation_record_t",
        (88,),
        _ASYNC
        | {"correlation_id.ancestor": 32, "thread_id": 40, "start_timestamp": 48, "end_timestamp": 56, "agent_id": 64}
        | {"address": 72, "allocation_size": 80},
    ),
}
RECORDS[2] = RECORDS[1]  # HSA's core functions and AMD's extensions

# Structures that the collector reads in callbacks (agent/native/rocprofiler/rocprofiler_api.h).
CALLBACKS: dict[str, StructureLayout] = {
    "record": StructureLayout(
        "rocprofiler_callback_tracing_record_t",
        (64,),
        {"context_id": 0, "thread_id": 8, "correlation_id.internal": 16, "correlation_id.ancestor": 32, "kind": 40}
        | {"operation": 44, "phase": 48, "payload": 56},
    ),
    "header": StructureLayout("rocprofiler_record_header_t", (16,), {"category": 0, "kind": 4, "payload": 8}),
    "kernel_symbol": StructureLayout(
        "rocprofiler_callback_tracing_code_object_kernel_symbol_register_data_t",
        (88,),
        {"size": 0, "kernel_id": 8, "code_object_id": 16, "kernel_name": 24},
    ),
    "agent": StructureLayout(
        "rocprofiler_agent_v0_t",
        (312, 376),  # later ones end with firmware versions
        {"size": 0, "id": 8, "type": 16, "lds_size_in_kb": 52, "wave_front_size": 64, "num_xcc": 68, "cu_count": 72}
        | {"simd_per_cu": 92, "gfx_target_version": 100, "vendor_id": 104, "device_id": 106, "location_id": 108}
        | {"domain": 112, "max_engine_clk_fcompute": 140, "max_waves_per_cu": 160, "workgroup_max_size": 168}
        | {"local_mem_size": 176, "name": 248, "product_name": 264, "node_id": 280, "logical_node_type_id": 288},
    ),
}

# Minor versions whose records are these, and the ROCm releases that carry them.
RELEASES: dict[tuple[int, int], str] = {
    (1, 0): "7.0",
    (1, 1): "7.1, 7.2",
    (1, 2): "7.2",
    (1, 3): "7.2.4, 7.13, 7.14, 10.0.0",
    (1, 4): "10.0.1",
}


def releases_of(version: str) -> str:
    """Returns the ROCm releases of a version such as "1.3.5". Raises ValueError if its records are unknown."""
    numbers = tuple(int(part) for part in version.split("."))
    if numbers[:2] not in RELEASES:
        known = ", ".join(f"{major}.{minor}" for major, minor in RELEASES)
        raise ValueError(f"the records of rocprofiler-sdk {version} are not supported; supported versions: {known}")
    return RELEASES[numbers[0], numbers[1]]
