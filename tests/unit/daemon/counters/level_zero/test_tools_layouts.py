"""The structures and numbers of Level Zero's tools as Intel's headers have them."""

import struct
import subprocess
from pathlib import Path

from kinetod.counters import level_zero_backend, level_zero_library
from support.accelerators import sysman

TYPES = {
    "ze_device_properties_t": "ZE_STRUCTURE_TYPE_DEVICE_PROPERTIES_1_2",
    "ze_pci_ext_properties_t": "ZE_STRUCTURE_TYPE_PCI_EXT_PROPERTIES",
    "zet_metric_group_properties_t": "ZET_STRUCTURE_TYPE_METRIC_GROUP_PROPERTIES",
    "zet_metric_properties_t": "ZET_STRUCTURE_TYPE_METRIC_PROPERTIES",
    "zet_metric_streamer_desc_t": "ZET_STRUCTURE_TYPE_METRIC_STREAMER_DESC",
    "zet_metric_global_timestamps_resolution_exp_t": "ZET_STRUCTURE_TYPE_METRIC_GLOBAL_TIMESTAMPS_RESOLUTION_EXP",
    "zet_typed_value_t": "0",
}
NUMBERS = {
    "ZE_STRUCTURE_TYPE_CONTEXT_DESC": level_zero_library.CONTEXT_DESC,
    "ZE_INIT_FLAG_GPU_ONLY": level_zero_library.GPU_ONLY,
    "ZE_DEVICE_TYPE_GPU": level_zero_library.TYPE_GPU,
    "ZET_METRIC_GROUP_SAMPLING_TYPE_FLAG_TIME_BASED": level_zero_library.TIME_BASED,
    "ZE_RESULT_WARNING_DROPPED_DATA": level_zero_library.DROPPED_DATA,
    "ZE_RESULT_ERROR_UNSUPPORTED_FEATURE": level_zero_library.UNSUPPORTED,
    "ZE_RESULT_ERROR_INSUFFICIENT_PERMISSIONS": level_zero_backend.NOT_PERMITTED,
    "ZE_RESULT_ERROR_NOT_AVAILABLE": level_zero_backend.NOT_AVAILABLE,
    "ZE_RESULT_ERROR_DEPENDENCY_UNAVAILABLE": level_zero_backend.DEPENDENCY_UNAVAILABLE,
    "ZE_RESULT_ERROR_UNSUPPORTED_VERSION": level_zero_backend.UNSUPPORTED_VERSION,
    "ZE_RESULT_ERROR_HANDLE_OBJECT_IN_USE": level_zero_backend.IN_USE,
    "ZE_RESULT_ERROR_UNKNOWN": level_zero_backend.UNKNOWN,
    "ZET_METRIC_TYPE_EVENT": level_zero_backend.EVENT,
    "ZET_METRIC_TYPE_EVENT_WITH_RANGE": level_zero_backend.EVENT_WITH_RANGE,
    "ZET_METRIC_TYPE_THROUGHPUT": level_zero_backend.THROUGHPUT,
    "ZET_METRIC_TYPE_TIMESTAMP": level_zero_backend.TIMESTAMP,
    **{f"ZET_VALUE_TYPE_{name}": getattr(level_zero_backend, name) for name in
       ("UINT32", "UINT64", "FLOAT32", "FLOAT64", "BOOL8", "STRING", "UINT8", "UINT16")},
}  # fmt: skip


def test_offsets_and_numbers_are_those_of_the_headers(tmp_path: Path) -> None:
    lines = ["#include <level_zero/zet_api.h>", "#include <stddef.h>", "#include <stdio.h>", "int main(void) {"]
    expected = []
    for name, layout in level_zero_library.STRUCTURES.items():
        lines.append(f'printf("%d %zu", (int){TYPES[name]}, sizeof({name}));')
        found = [str(layout.type), str(layout.size)]
        for member, (code, offset) in layout.fields.items():
            lines.append(f'printf(" %zu %zu", offsetof({name}, {member}), sizeof((({name} *)0)->{member}));')
            found += [str(offset), str(struct.calcsize(f"={code}"))]
        lines.append(r'printf("\n");')
        expected.append(" ".join(found))
    for name, number in NUMBERS.items():
        lines.append(f'printf("%u\\n", (unsigned){name});')
        expected.append(str(number))
    source, program = tmp_path / "offsets.c", tmp_path / "offsets"
    source.write_text("\n".join([*lines, "return 0; }"]))
    subprocess.run(["cc", "-isystem", str(sysman.headers()), str(source), "-o", str(program)], check=True)
    told = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    assert told.splitlines() == expected
