"""The collector, the fake and the decoder say the same of rocprofiler-sdk's structures, each by itself."""

from __future__ import annotations

import json
import subprocess

import pytest
from support.machine.native import CACHE, COLLECTOR, COLLECTOR_HEADERS, build
from support.rocm.fakes import ROCM

pytest.importorskip("kineto_trace", reason="the decoder is not for this Python")

from kineto_agent.sources.rocprofiler import gpu_activities
from kineto_trace.decode import rocprofiler_records
from kineto_trace.decode.rocprofiler_layouts import CALLBACKS, RECORDS, RELEASES, StructureLayout

# Structure, layout, and the vendor's field for each of ours.
Structure = tuple[str, StructureLayout, dict[str, str]]
FAKE: tuple[Structure, ...] = (
    ("api_record", RECORDS[1], {"correlation.internal": "correlation_id.internal", "start": "start_timestamp",
                                "end": "end_timestamp", "thread": "thread_id", "operation": "operation"}),
    ("copy_record", RECORDS[10], {"internal": "correlation_id.internal", "thread": "thread_id",
                                  "start": "start_timestamp", "end": "end_timestamp", "destination": "dst_agent_id",
                                  "source": "src_agent_id", "bytes": "bytes", "source_address": "src_address"}),
    ("dispatch_record", RECORDS[11], {"internal": "correlation_id.internal", "start": "start_timestamp",
                                      "end": "end_timestamp", "info.agent": "dispatch_info.agent_id",
                                      "info.queue": "dispatch_info.queue_id",
                                      "info.kernel_id": "dispatch_info.kernel_id",
                                      "info.group_segment": "dispatch_info.group_segment_size",
                                      "info.workgroup.x": "dispatch_info.workgroup_size.x",
                                      "info.grid.z": "dispatch_info.grid_size.z"}),
    ("scratch_record", RECORDS[12], {"agent": "agent_id", "queue": "queue_id", "start": "start_timestamp",
                                     "flags": "flags", "bytes": "allocation_size"}),
    ("allocation_record", RECORDS[16], {"thread": "thread_id", "start": "start_timestamp", "agent": "agent_id",
                                        "address": "address", "bytes": "allocation_size"}),
    ("callback_record", CALLBACKS["record"], {"thread": "thread_id", "correlation.internal": "correlation_id.internal",
                                              "kind": "kind", "phase": "phase", "payload": "payload"}),
    ("record_header", CALLBACKS["header"], {"category": "category", "kind": "kind", "payload": "payload"}),
    ("kernel_symbol", CALLBACKS["kernel_symbol"], {"kernel_id": "kernel_id", "name": "kernel_name"}),
    ("agent_v0", CALLBACKS["agent"], {"id": "id", "type": "type", "lds_kb": "lds_size_in_kb", "cus": "cu_count",
                                      "location_id": "location_id", "gpu_mhz": "max_engine_clk_fcompute",
                                      "memory_bytes": "local_mem_size", "product_name": "product_name",
                                      "logical_node_type_id": "logical_node_type_id"}),
)  # fmt: skip
OURS: tuple[Structure, ...] = (
    ("rocp_callback_record", CALLBACKS["record"], {"thread": "thread_id", "correlation": "correlation_id.internal",
                                                   "kind": "kind", "operation": "operation", "phase": "phase",
                                                   "payload": "payload"}),
    ("rocp_header", CALLBACKS["header"], {"category": "category", "kind": "kind", "payload": "payload"}),
    ("rocp_kernel_symbol", CALLBACKS["kernel_symbol"], {"size": "size", "kernel_id": "kernel_id",
                                                        "name": "kernel_name"}),
    ("rocp_agent", CALLBACKS["agent"], {"id": "id", "type": "type", "lds_kb": "lds_size_in_kb",
                                        "wavefront": "wave_front_size", "dies": "num_xcc",
                                        "compute_units": "cu_count", "simds_per_unit": "simd_per_cu",
                                        "gfx_version": "gfx_target_version", "vendor": "vendor_id",
                                        "device": "device_id", "location": "location_id", "domain": "domain",
                                        "clock_mhz": "max_engine_clk_fcompute",
                                        "waves_per_unit": "max_waves_per_cu",
                                        "workgroup_most": "workgroup_max_size", "memory_bytes": "local_mem_size",
                                        "name": "name", "product_name": "product_name", "node": "node_id",
                                        "ordinal": "logical_node_type_id"}),
)  # fmt: skip


def measured(header: str, structures: tuple[Structure, ...]) -> dict[str, dict[str, int]]:
    """What the C compiler says of these structures."""
    lines = ["#include <stdio.h>", f'#include "{header}"', 'int main(void) { printf("{");']
    for number, (name, _, fields) in enumerate(structures):
        comma = "," if number else ""
        lines.append(f'printf("{comma}\\"{name}\\": {{\\"sizeof\\": %zu", sizeof(struct {name}));')
        for field in fields:
            lines.append(f'printf(", \\"{field}\\": %zu", offsetof(struct {name}, {field}));')
        lines.append('printf("}");')
    lines.append('printf("}"); return 0; }')
    source = CACHE / "rocm" / f"measure_{header.replace('/', '_')}.c"
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text("\n".join(lines))
    program = build(source.stem, [source], [*COLLECTOR_HEADERS, f"-I{ROCM}"])
    found: dict[str, dict[str, int]] = json.loads(
        subprocess.run([str(program)], check=True, capture_output=True).stdout
    )
    return found


@pytest.mark.parametrize(
    ("header", "structures"), [("rocprofiler_abi.h", FAKE), ("rocprofiler/rocprofiler_api.h", OURS)]
)
def test_structures_lie_as_the_vendors_headers_say(header: str, structures: tuple[Structure, ...]) -> None:
    found = measured(header, structures)
    for name, layout, fields in structures:
        size = found[name].pop("sizeof")
        assert size in layout.sizes or name == "rocp_kernel_symbol", name  # of that one only the beginning
        assert found[name] == {field: layout.offsets[vendors] for field, vendors in fields.items()}


def test_the_collector_knows_the_sizes_of_records_that_the_decoder_knows() -> None:
    text = (COLLECTOR / "rocprofiler" / "rocprofiler_client.c").read_text()
    table = text[text.index("} RECORD_SIZES[] = {") : text.index("struct hsa_operations")]
    for layout in RECORDS.values():
        first, last = layout.sizes[0], layout.sizes[-1]
        assert f"{{{first}, {last}}}" in table
    assert table.count("ROCP_BUFFER_") == len(RECORDS)


def test_agent_and_decoder_know_the_same_versions() -> None:
    assert gpu_activities.RELEASES == RELEASES


def test_the_collector_knows_the_same_range_of_versions() -> None:
    text = (COLLECTOR / "rocprofiler" / "rocprofiler_api.h").read_text()
    (least_major, least_minor), (last_major, last_minor) = min(RELEASES), max(RELEASES)
    assert f"#define ROCP_VERSION_LEAST {least_major * 10000 + least_minor * 100}\n" in text
    assert f"#define ROCP_VERSION_BEYOND {last_major * 10000 + (last_minor + 1) * 100}\n" in text


def test_kinds_and_spaces_are_the_same_on_both_sides() -> None:
    text = (COLLECTOR / "rocprofiler" / "hip_calls.h").read_text()
    text += (COLLECTOR / "rocprofiler" / "rocprofiler_vendor.h").read_text()
    for name, value in (
        ("HIP_RUNTIME_CALL", rocprofiler_records.HIP_RUNTIME_CALL),
        ("HIP_COMPILER_CALL", rocprofiler_records.HIP_COMPILER_CALL),
        ("ROCPROFILER_ALL_ALLOCATIONS", gpu_activities.ALL_ALLOCATIONS),
        ("ROCPROFILER_SPACE_KERNEL", rocprofiler_records.SPACE_KERNEL),
        ("ROCPROFILER_SPACE_FUNCTION", rocprofiler_records.SPACE_FUNCTION),
        ("ROCPROFILER_SPACE_OPERATION", rocprofiler_records.SPACE_OPERATION),
    ):
        assert f"#define {name} {value}u" in text
    recorded = {kind for kinds in gpu_activities.KINDS.values() for kind in kinds}
    assert recorded | {rocprofiler_records.HSA_AMD_EXT} == set(rocprofiler_records.SCHEMA.records)
    assert set(gpu_activities.KINDS) == set(rocprofiler_records.SCHEMA.types)
