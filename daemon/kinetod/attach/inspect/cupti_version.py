"""The version of a libcupti, without loading it: from the code of its cuptiGetVersion.

That function stores a constant (`mov dword [rdi], imm32` on x86-64), in every release since CUDA 12.0. It is read
from the memory of the process that has the library loaded, or from its file.
"""

import contextlib
import os
import re
import stat
import struct
from pathlib import Path

from kinetod.attach.inspect.elf_symbols import PT_LOAD, Elf, NotElfError, Reader

FUNCTION = "cuptiGetVersion"
_STORES_CONSTANT = re.compile(rb"\xc7\x07(.{4})\x31\xc0", re.DOTALL)
_CODE_BYTES = 64
_HEADER_BYTES = 4096  # the ELF header and the program headers behind it


def in_memory(memory: Reader, function: tuple[int, int]) -> int | None:
    """The version from the function's address and size (bytes); None if its code looks otherwise."""
    address, size = function
    with contextlib.suppress(OSError):
        match = _STORES_CONSTANT.search(memory.read(address, min(size or _CODE_BYTES, _CODE_BYTES)))
        return int.from_bytes(match[1], "little") if match else None
    return None


def in_file(path: Path) -> int | None:
    """The version of a library file; None if it cannot be told."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        reader = _File(descriptor)
        function = Elf(reader, 0).lookup(FUNCTION)
        return in_memory(reader, function) if function else None
    except (OSError, NotElfError, struct.error):
        return None
    finally:
        os.close(descriptor)


class _File:
    """The addresses of an ELF file as if it were loaded at 0."""

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
        raise OSError(f"nothing lies at {address:#x}")

    def u32(self, address: int) -> int:
        """An unsigned 32-bit number."""
        return int.from_bytes(self.read(address, 4), "little")
