import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from kinetod.attach.inspect.elf_symbols import Elf, NotElfError
from kinetod.attach.inspect.target_image import TargetImage, read_maps
from kinetod.attach.inspect.target_memory import TargetMemory


@pytest.fixture(scope="module")
def image() -> TargetImage:
    return TargetImage(os.getpid())


def test_a_symbol_of_the_c_library_is_where_the_loader_finds_it(image: TargetImage) -> None:
    own = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value
    assert image.libc_symbol("getpid") == own


def test_an_absent_symbol_is_none(image: TargetImage) -> None:
    libc = next(path for path in image.modules if "libc.so" in path or "libc-" in path)
    elf = image.elf(libc)
    assert elf is not None
    assert elf.lookup("no_such_function_at_all") is None


def test_a_module_begins_with_its_header(image: TargetImage) -> None:
    base = image.modules[image.exe]
    assert image.memory.read(base, 4) == b"\x7fELF"
    with pytest.raises(NotElfError):
        Elf(image.memory, base + 16)


def test_unmapped_memory_is_an_os_error() -> None:
    memory = TargetMemory(os.getpid())
    with pytest.raises(OSError, match=r"error|Unmapped"):
        memory.read(0x10, 8)


def test_maps_rise_and_do_not_overlap() -> None:
    maps = read_maps(os.getpid())
    assert all(before.end <= after.start for before, after in zip(maps, maps[1:], strict=False))


@pytest.fixture(scope="module", params=["gnu", "sysv"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("elf")
    source, path = folder / "many.c", folder / f"libmany_{request.param}.so"
    source.write_text("\n".join(f"int many_{i}(void) {{ return {i}; }}" for i in range(300)))
    flags = ["-shared", "-fPIC", f"-Wl,--hash-style={request.param}"]
    subprocess.run(["cc", *flags, "-o", str(path), str(source)], check=True)
    yield path


def test_both_hash_tables_find_every_symbol(library: Path) -> None:
    loaded = ctypes.CDLL(str(library))
    image = TargetImage(os.getpid())
    elf = image.elf(str(library))
    assert elf is not None
    for number in range(300):
        name = f"many_{number}"
        found = elf.lookup(name)
        assert found is not None
        assert found[0] == ctypes.cast(loaded[name], ctypes.c_void_p).value
        assert found[1] > 0
    assert elf.lookup("many_300") is None
