import os
import shutil
import subprocess
from pathlib import Path

import pytest
from kinetod.attach.inject import injection, trampoline
from kinetod.attach.inspect.target_image import Mapping, TargetImage

SOURCES = Path(trampoline.__file__).parent
TOOLS = {"x86_64": "", "aarch64": "aarch64-linux-gnu-"}
TABLES = {"trampoline": trampoline.TRAMPOLINE}


def tool(machine: str, name: str) -> str:
    prefix = "" if os.uname().machine == machine else TOOLS.get(machine) or f"{machine}-linux-gnu-"
    found = shutil.which(prefix + name)
    if found is None:
        pytest.skip(f"no {prefix}{name}")
    return found


@pytest.mark.parametrize("machine", TOOLS)
@pytest.mark.parametrize("name", TABLES)
def test_the_table_is_what_the_source_assembles_to(tmp_path: Path, machine: str, name: str) -> None:
    binary = tmp_path / "code.bin"
    subprocess.run([tool(machine, "gcc"), "-c", SOURCES / f"{name}_{machine}.S", "-o", tmp_path / "code.o"], check=True)
    subprocess.run([tool(machine, "objcopy"), "-O", "binary", "-j", ".text", tmp_path / "code.o", binary], check=True)
    assert TABLES[name][machine] == binary.read_bytes()


@pytest.mark.parametrize("code", [code for table in TABLES.values() for code in table.values()], ids=len)
def test_code_does_not_end_with_zeros_which_would_look_unused(code: bytes) -> None:
    assert code[-1] != 0
    assert len(code) <= 400


def test_a_place_lies_behind_the_code_of_a_lasting_module() -> None:
    image = TargetImage(os.getpid())
    code = trampoline.TRAMPOLINE["x86_64"]
    place = trampoline.find_place(image, code)
    mapping = image.mapping_at(place.address)
    assert mapping is not None
    assert mapping.permissions == "r-xp"
    assert mapping.path in {*image.loader_modules, image.exe, image.python.path if image.python else ""}
    assert place.address % 16 == 0
    assert place.address + len(code) <= mapping.end


def test_codes_that_are_not_written_yet_do_not_lie_in_the_same_place() -> None:
    image = TargetImage(os.getpid())
    placed: list[trampoline.Placed] = []
    for filler in (0xC1, 0xC2, 0xC3):
        placed.append(trampoline.find_place(image, bytes([filler]) * 100, placed))
    ends = [(place.address, place.address + len(place.code)) for place in placed]
    assert all(place.missing for place in placed)
    assert all(end <= start for (_, end), (start, _) in zip(ends, ends[1:], strict=False))


def test_regions_lie_side_by_side_and_off_everything_else() -> None:
    page = trampoline.PAGE
    maps = [Mapping(0x1000, 0x2000, "rw-p", 0, ""), Mapping(0x7F0000000000, 0x7F0000001000, "rw-p", 0, "")]
    first = injection.free_address(maps, 5 * page)
    maps.insert(1, Mapping(first, first + page, "rw-p", 0, ""))
    second = injection.free_address(maps, 5 * page)
    maps.insert(2, Mapping(second, second + page, "rw-p", 0, ""))
    assert second == first + page
    assert injection.free_address(maps, 5 * page) == second + page


def test_a_small_address_space_gets_the_middle_of_its_largest_hole() -> None:
    maps = [Mapping(0x1000, 0x2000, "rw-p", 0, ""), Mapping(0x7F00000000, 0x7F00001000, "rw-p", 0, "")]
    assert injection.free_address(maps, trampoline.PAGE) == (0x2000 + (0x7F00000000 - 0x2000) // 2) & -trampoline.PAGE
