"""The structures of Sysman as Intel's headers have them, and the binding under Debian's real loader."""

import json
import re
import struct
import subprocess
from pathlib import Path

import pytest
from kinetod.gpus import level_zero
from support.accelerators import sysman

READ = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("level_zero", sys.argv[1])
level_zero = importlib.util.module_from_spec(spec)
sys.modules["level_zero"] = level_zero
spec.loader.exec_module(level_zero)
found = level_zero.Sysman()
answers = []
for device in found.devices():
    properties = found.read("zesDeviceGetProperties", device, "zes_device_properties_t")
    memories = found.handles("zesDeviceEnumMemoryModules", device)
    answers.append([
        properties["core.name"].partition(b"\\0")[0].decode(),
        found.read("zesDevicePciGetProperties", device, "zes_pci_properties_t")["address.bus"],
        [found.read("zesMemoryGetState", each, "zes_mem_state_t")["free"] for each in memories],
        len(found.handles("zesDeviceEnumFans", device)),
    ])
print(json.dumps(answers))
"""


def test_offsets_and_types_are_those_of_the_headers(tmp_path: Path) -> None:
    lines = ["#include <level_zero/ze_api.h>", "#include <level_zero/zes_api.h>", "#include <stddef.h>"]
    lines += ["#include <stdio.h>", "int main(void) {"]
    expected = []
    for name, layout in level_zero.STRUCTURES.items():
        enum = "ZES_STRUCTURE_TYPE_" + name.removeprefix("zes_").removesuffix("_t").upper()
        kind = enum if layout.type else "0"
        lines.append(f'printf("%d %zu", (int){kind}, sizeof({name}));')
        found = [str(layout.type), str(layout.size)]
        for member, (code, offset) in layout.fields.items():
            lines.append(f'printf(" %zu %zu", offsetof({name}, {member}), sizeof((({name} *)0)->{member}));')
            found += [str(offset), str(struct.calcsize(f"={code}"))]
        lines.append(r'printf("\n");')
        expected.append(" ".join(found))
    source = tmp_path / "offsets.c"
    source.write_text("\n".join([*lines, "return 0; }"]))
    program = tmp_path / "offsets"
    subprocess.run(["cc", "-isystem", str(sysman.headers()), str(source), "-o", str(program)], check=True)
    told = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    assert told.splitlines() == expected


def test_the_real_loader_finds_the_gpus_of_a_driver(tmp_path: Path) -> None:
    loader, python = sysman.real_loader()
    environ = {"LD_LIBRARY_PATH": str(loader.parent), "ZE_ENABLE_ALT_DRIVERS": str(sysman.fake_driver())}
    answer = subprocess.run(
        [str(python), "-c", READ, level_zero.__file__], env=environ, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    name, free = "Intel(R) Data Center GPU Max 1550", 60 << 30
    assert json.loads(answer.stdout) == [[name, 0x29, [free] * 3, 0], [name, 0x39, [free] * 3, 0]]


def test_a_function_that_the_library_lacks_is_unsupported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = level_zero.Sysman(str(sysman.fake_loader()))
    (first, _) = library.devices()
    with pytest.raises(level_zero.SysmanError, match=re.escape("zesDeviceGetState returned 0x78000003")):
        library.read("zesDeviceGetState", first, "zes_pci_properties_t")
    assert library.handles("zesDeviceEnumFans", first) == []
