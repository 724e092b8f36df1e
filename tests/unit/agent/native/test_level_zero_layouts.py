"""agent/native/pti/level_zero.h declares structures of Level Zero anew: are they those of the public headers?"""

import subprocess
from pathlib import Path

import pytest
from support.machine import native
from support.xpu import level_zero

PAIRS = {
    ("ze_properties", "ze_device_properties_t"): {
        "type_of_structure": "stype", "type": "type", "core_clock_mhz": "coreClockRate",
        "allocation_most": "maxMemAllocSize", "eus_per_subslice": "numEUsPerSubslice",
        "subslices_per_slice": "numSubslicesPerSlice", "slices": "numSlices", "uuid": "uuid", "name": "name",
    },
    ("ze_pci", "ze_pci_ext_properties_t"): {
        "type_of_structure": "stype", "domain": "address.domain", "bus": "address.bus", "device": "address.device",
        "function": "address.function",
    },
    ("ze_memory", "ze_device_memory_properties_t"): {"type_of_structure": "stype", "bytes": "totalSize"},
}  # fmt: skip
NUMBERS = {
    "DEVICE_PROPERTIES": "ZE_STRUCTURE_TYPE_DEVICE_PROPERTIES",
    "MEMORY_PROPERTIES": "ZE_STRUCTURE_TYPE_DEVICE_MEMORY_PROPERTIES",
    "CONTEXT_DESCRIPTION": "ZE_STRUCTURE_TYPE_CONTEXT_DESC",
    "EVENT_POOL_DESCRIPTION": "ZE_STRUCTURE_TYPE_EVENT_POOL_DESC",
    "PCI_PROPERTIES": "ZE_STRUCTURE_TYPE_PCI_EXT_PROPERTIES",
    "TYPE_GPU": "ZE_DEVICE_TYPE_GPU",
}


def program() -> str:
    lines = [
        "#define _GNU_SOURCE",
        "#include <level_zero/ze_api.h>",
        "#include <stddef.h>",
        '#include "pti/level_zero.c"',
    ]
    for (ours, theirs), fields in PAIRS.items():
        lines.append(f'_Static_assert(sizeof(struct {ours}) == sizeof({theirs}), "{ours}");')
        for own, vendor in fields.items():
            lines.append(f'_Static_assert(offsetof(struct {ours}, {own}) == offsetof({theirs}, {vendor}), "{own}");')
    lines += [f'_Static_assert({own} == {vendor}, "{own}");' for own, vendor in NUMBERS.items()]
    lines.append(
        '_Static_assert(offsetof(struct description, count) == offsetof(ze_event_pool_desc_t, count), "count");'
    )
    lines.append('_Static_assert(sizeof(struct description) >= sizeof(ze_context_desc_t), "context");')
    return "\n".join(lines)


def test_structures_and_numbers_are_those_of_the_public_headers(tmp_path: Path) -> None:
    if not level_zero.is_made():
        pytest.skip(f"no headers of Level Zero: {level_zero.MAKE}")
    source = tmp_path / "layouts.c"
    source.write_text(program())
    include = level_zero.FOLDER / "root" / "usr" / "include"
    command = [
        native.compiler(),
        "-std=c11",
        "-fsyntax-only",
        "-iquote",
        str(native.COLLECTOR),
        "-isystem",
        str(include),
    ]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
