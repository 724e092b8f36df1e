import ctypes
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz.targets.processes.image import small_image
from kinetod.attach.attach_types import AttachCode, AttachError
from kinetod.attach.inspect.target_image import Elf, Mapping, NotElfError, TargetImage, _modules, read_maps
from kinetod.attach.inspect.target_memory import TargetMemory
from support.service import subjects
from support.targets.engine_target import PYENV, engine_target, pythons, version_of
from support.targets.python_versions import other_versions_slow
from support.waiting import until

BASE = 0x10000
SYSV_CHAINS = 600 + 8 + 4  # behind the numbers of buckets and chains, and the only bucket
READS_MOST = 20_000


class Counted:
    """Memory that counts how often it is read."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.reads = 0

    def read(self, address: int, size: int) -> bytes:
        self.reads += 1
        data = self._data[address - BASE : address - BASE + size] if address >= BASE else b""
        if len(data) != size:
            raise OSError("unmapped")
        return data

    def u32(self, address: int) -> int:
        return int(struct.unpack("<I", self.read(address, 4))[0])


def test_a_chain_without_an_end_is_given_up_soon() -> None:
    data = bytearray(small_image(4))
    struct.pack_into("<I", data, SYSV_CHAINS + 4, 1)  # the first symbol's next one is itself
    memory = Counted(bytes(data))
    assert Elf(memory, BASE).lookup("no_such_name") is None
    assert memory.reads < READS_MOST


def test_an_image_of_the_fuzzer_is_a_good_one() -> None:
    for tag in (4, 0x6FFFFEF5):
        elf = Elf(Counted(small_image(tag)), BASE)
        assert elf.lookup("Py_Version") == (BASE + 0x100, 8)
        assert elf.functions() == [(BASE + 0x100, 8, "Py_Version")]


@pytest.mark.parametrize("address", [-1, 1 << 63, (1 << 64) + 5])
def test_an_address_beyond_all_memory_is_unmapped(address: int) -> None:
    with pytest.raises(OSError, match="Unmapped"):
        TargetMemory(os.getpid()).read(address, 8)


@pytest.fixture(scope="module")
def image() -> TargetImage:
    return TargetImage(os.getpid())


def test_a_symbol_of_the_c_library_is_where_the_loader_finds_it(image: TargetImage) -> None:
    own = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value
    assert image.libc_symbol("getpid") == own


def test_all_functions_of_a_library_are_found_by_rising_address(image: TargetImage) -> None:
    libc = image.elf(next(path for path in image.modules if "libc.so" in path or "libc-" in path))
    assert libc is not None
    found = libc.functions()
    assert found == sorted(found)
    names = {name: (address, size) for address, size, name in found}
    assert len(names) > 1000
    assert all(names[name] == libc.lookup(name) for name in ("getpid", "read", "qsort"))


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


@pytest.mark.parametrize("executable", other_versions_slow(pythons()), ids=version_of)
def test_the_interpreter_and_its_version_are_found(tmp_path: Path, executable: str) -> None:
    command = [executable, "-c", "import sys; print(*sys.version_info[:2])"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    with engine_target(tmp_path, executable=executable) as target:
        python = TargetImage(target.pid).python
    assert python is not None
    assert python.version[:2] == tuple(map(int, said))
    assert "python" in python.path


def test_a_program_without_python_has_none() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            until(lambda: subjects.state(process.pid) == "S", "it sleeps: it is loaded")
            image = TargetImage(process.pid)
            assert image.exe.endswith(("sleep", "coreutils"))
            assert image.python is None
            assert image.libc_symbol("pthread_create") > 0
        finally:
            process.kill()


@pytest.mark.skipif(not (PYENV / "3.8.18").exists(), reason="no Python 3.8 on this machine")
def test_an_old_interpreter_is_refused(tmp_path: Path) -> None:
    with engine_target(tmp_path, executable=str(PYENV / "3.8.18" / "bin" / "python")) as target:
        with pytest.raises(AttachError, match=r"runs Python 3\.8; the agent needs 3\.9 or later") as failure:
            TargetImage(target.pid)
        assert failure.value.code is AttachCode.UNSUPPORTED


def test_a_process_that_ended_is_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with pytest.raises(AttachError) as failure:
        TargetImage(process.pid)
    assert failure.value.code is AttachCode.GONE


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become someone else")
def test_another_users_process_is_not_permitted() -> None:
    script = """
import os, sys
sys.path[:0] = sys.argv[2:]
from kinetod.attach.inspect.target_image import TargetImage
from kinetod.attach.attach_types import AttachError
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    TargetImage(int(sys.argv[1]))
except AttachError as error:
    print(error.code, error)
"""
    command = [sys.executable, "-c", script, str(os.getpid()), *sys.path]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.startswith("ATTACH_NOT_PERMITTED the kernel does not permit")
    assert "CAP_SYS_PTRACE" in said


def test_every_address_of_a_mapping_leads_to_it() -> None:
    image = TargetImage(os.getpid())
    for mapping in image.maps[:-1]:
        assert image.mapping_at(mapping.start) == mapping
        assert image.mapping_at(mapping.end - 1) == mapping
    assert image.mapping_at(0x1000) is None


def test_a_file_that_is_only_read_is_no_module() -> None:
    image = TargetImage(os.getpid())
    image.maps = [
        Mapping(0x1000, 0x2000, "r--p", 0, "/lib/a.so"),
        Mapping(0x5000, 0x6000, "r--p", 0, "/lib/a.so"),
        Mapping(0x6000, 0x7000, "r-xp", 0x1000, "/lib/a.so"),
    ]
    assert _modules(image.maps) == {"/lib/a.so": 0x5000}
