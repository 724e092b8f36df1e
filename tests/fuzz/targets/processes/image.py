"""An ELF image in the memory of a process: the input is mapped in this one and read through /proc/PID/mem."""

import mmap
import os
import struct
from collections.abc import Iterator

import numpy as np
from kinetod.attach.attach_types import AttachError
from kinetod.attach.inspect.process_inspection import elf_kind
from kinetod.attach.inspect.target_image import Elf, NotElfError
from kinetod.attach.inspect.target_memory import TargetMemory

ROOM = 1 << 16
NAMES = ("Py_Version", "getpid", "no_such_name")
_memory = TargetMemory(os.getpid())
_map = mmap.mmap(-1, ROOM, prot=mmap.PROT_READ | mmap.PROT_WRITE)
_base = int(np.frombuffer(_map, np.uint8).ctypes.data)


def play(data: bytes) -> None:
    _map[:] = data[:ROOM].ljust(ROOM, b"\0")
    elf_kind(data[:20])
    try:
        image = Elf(_memory, _base)
        for name in NAMES:
            image.lookup(name)
        image.functions()
    except (NotElfError, OSError, AttachError):
        return


def small_image(hash_tag: int) -> bytes:
    """A small one: header, two program headers, dynamic section, one symbol, its hash table."""
    data = bytearray(1024)
    struct.pack_into("<4sBBB", data, 0, b"\x7fELF", 2, 1, 1)
    struct.pack_into("<Q", data, 32, 64)
    struct.pack_into("<HH", data, 54, 56, 2)
    struct.pack_into("<IIQQQQQQ", data, 64, 1, 5, 0, 0, 0, 1024, 1024, 4096)
    struct.pack_into("<IIQQQQQQ", data, 120, 2, 4, 256, 256, 256, 64, 64, 8)
    struct.pack_into("<8Q", data, 256, 6, 400, 5, 500, hash_tag, 600, 0, 0)
    struct.pack_into("<IBBHQQ", data, 424, 1, 18, 0, 1, 0x100, 8)
    data[501:512] = b"Py_Version\0"
    if hash_tag == 4:
        struct.pack_into("<5I", data, 600, 1, 2, 1, 0, 0)
    else:
        wanted = 5381
        for character in b"Py_Version":
            wanted = (wanted * 33 + character) & 0xFFFFFFFF
        struct.pack_into("<4IQII", data, 600, 1, 1, 1, 6, 0, 1, wanted | 1)
    return bytes(data)


def seeds() -> Iterator[bytes]:
    """One with each of the two hash tables."""
    yield small_image(4)
    yield small_image(0x6FFFFEF5)
