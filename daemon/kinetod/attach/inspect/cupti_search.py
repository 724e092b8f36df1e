"""Finds the libcupti that a process without Python should load, by paths as that process sees them, and its version.

A compiled program has rarely loaded libcupti itself. Its file system is read through /proc/PID/root, where links to
absolute paths lead elsewhere; so the folders that such links usually name are searched as well.

The version is known without loading it, from the code of cuptiGetVersion: that function stores a constant
(`mov dword [rdi], imm32` on x86-64) in every release since CUDA 12.0. It is read from the memory of the process that
has the library loaded, or from its file.
"""

import contextlib
import glob
import os
import re
import stat
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from kineto_agent.system import env
from kineto_agent.system.mappings import mapped_files

from kinetod.attach.inspect.target_image import PT_LOAD, Elf, NotElfError, Reader

_PROC = Path("/proc")
_FILES = "libcupti.so.[0-9]*"
# Below a CUDA toolkit.
_TOOLKIT_FOLDERS = ("extras/CUPTI/lib64", "targets/*/lib", "lib64")
_TOOLKIT_VARIABLES = ("CUDA_HOME", "CUDA_PATH")
_TOOLKITS = ("usr/local/cuda", "usr/local/cuda-*", "opt/cuda")
_SYSTEM_FOLDERS = ("usr/lib/*-linux-gnu", "usr/lib64", "usr/lib")
# If one of these is in a folder, its toolkit or wheel is near.
_NEIGHBOURS = ("libcudart.so", "libcublas.so", "libcudnn.so", "libnvrtc.so")
_NEAR = (".", "../extras/CUPTI/lib64", "../../cuda_cupti/lib")
FUNCTION = "cuptiGetVersion"
_STORES_CONSTANT = re.compile(rb"\xc7\x07(.{4})\x31\xc0", re.DOTALL)
_CODE_BYTES = 64
_HEADER_BYTES = 4096  # the ELF header and the program headers behind it


def find_cupti(pid: int, environ: Mapping[str, str], proc: Path = _PROC) -> str | None:
    """Returns the path of the libcupti to use; None if there is nothing to trace, or no libcupti."""
    explicit = environ.get(env.CUPTI_LIBRARY)
    if explicit:
        return explicit
    maps = str(proc / str(pid) / "maps")
    loaded = mapped_files("libcupti.so", maps)
    if loaded:
        return loaded[0]
    if not mapped_files("libcuda.so", maps):
        return None
    root = proc / str(pid) / "root"
    for folder in _folders(maps, environ):
        hits = sorted(root.glob(f"{folder}/{_FILES}"))
        if hits:
            return "/" + str(hits[-1].relative_to(root))
    return None


def _folders(maps: str, environ: Mapping[str, str]) -> Iterator[str]:
    """Yields glob patterns below the root, the likeliest first."""
    for stem in _NEIGHBOURS:
        for path in mapped_files(stem, maps):
            yield from (_below_root(os.path.normpath(PurePosixPath(path).parent / near)) for near in _NEAR)
    named = [_below_root(environ[name]) for name in _TOOLKIT_VARIABLES if environ.get(name, "").startswith("/")]
    for toolkit in (*filter(None, named), *_TOOLKITS):
        yield from (f"{toolkit}/{folder}" for folder in _TOOLKIT_FOLDERS)
    for entry in environ.get("LD_LIBRARY_PATH", "").split(":"):
        if entry.startswith("/") and _below_root(entry):
            yield _below_root(entry)
    yield from _SYSTEM_FOLDERS


def _below_root(path: str) -> str:
    """Returns a folder named by the process, unless it is a pattern: one like **/** would search everywhere."""
    return glob.escape(os.path.normpath(path).lstrip("/"))


def version_in_memory(memory: Reader, function: tuple[int, int]) -> int | None:
    """Returns the version, from the function's address and size (bytes); None if its code looks different."""
    address, size = function
    with contextlib.suppress(OSError):
        match = _STORES_CONSTANT.search(memory.read(address, min(size or _CODE_BYTES, _CODE_BYTES)))
        return int.from_bytes(match[1], "little") if match else None
    return None


def version_in_file(path: Path) -> int | None:
    """Returns the version of a library file; None if it cannot be determined."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        reader = _File(descriptor)
        function = Elf(reader, 0).lookup(FUNCTION)
        return version_in_memory(reader, function) if function else None
    except (OSError, NotElfError, struct.error):
        return None
    finally:
        os.close(descriptor)


class _File:
    """Addresses of an ELF file as if it were loaded at 0."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        head = os.pread(descriptor, _HEADER_BYTES, 0)
        (table,) = struct.unpack_from("<Q", head, 32)
        size, count = struct.unpack_from("<HH", head, 54)
        self._segments: list[tuple[int, int, int]] = []  # address, offset, size
        for index in range(count):
            kind, _flags, offset, address, _physical, length = struct.unpack_from("<IIQQQQ", head, table + size * index)
            if kind == PT_LOAD:
                self._segments.append((address, offset, length))

    def read(self, address: int, size: int) -> bytes:
        """Exactly `size` bytes. Raises OSError."""
        for start, offset, length in self._segments:
            if start <= address and address + size <= start + length:
                data = os.pread(self._descriptor, size, address - start + offset)
                if len(data) == size:
                    return data
        raise OSError(f"nothing is mapped at {address:#x}")

    def u32(self, address: int) -> int:
        """Reads an unsigned 32-bit number."""
        return int.from_bytes(self.read(address, 4), "little")
