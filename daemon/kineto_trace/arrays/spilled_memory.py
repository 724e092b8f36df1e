"""Puts large arrays in reused memory, and beyond that in a file: a decode of any size takes bounded memory.

numpy asks us for the memory of its arrays (NEP 49) from `begin` on, in this thread. See daemon/native/codec/codec.h.

* Below POOL_FROM_BYTES of raw records nothing changes.
* From there on arrays of a mebibyte and more share POOL_BYTES of memory. Freed memory is reused for the next array,
  already mapped, which is faster than fresh memory from the kernel.
* From SPILL_FROM_BYTES on, further arrays are in an unnamed file in the target's own folder. The kernel may keep its
  pages or write them out: when more than RESIDENT_BYTES are resident, pages of arrays and raw files are released,
  within a millisecond.
"""

import ctypes
import os
from pathlib import Path

import numpy as np

from kineto_trace.arrays import codec
from kineto_trace.base.array_types import UInts8
from kineto_trace.model.target_info import raw_bytes

POOL_FROM_BYTES = 32 << 20  # of raw records; below it a pool costs more than it saves
SPILL_FROM_BYTES = 96 << 20  # columns and temporary arrays take 1.3 to 2.5 times as much
LEAST_BYTES = 1 << 20
POOL_BYTES = 160 << 20
RESIDENT_BYTES = 176 << 20  # of files, 50 MiB of libraries among them; with Python and the pool less than 400 MiB
HUGE_FROM_BYTES = 2 << 30  # of raw records, where up to 64 MiB come between two checks, and Python takes 20 MiB more
HUGE_RESIDENT_BYTES = 112 << 20
_ROOM_BASE, _ROOM_FACTOR = 1 << 30, 16  # of the file, which is sparse
_SET_HANDLER = 304  # offset of PyDataMem_SetHandler in numpy's table of functions, which never changes
_CAPSULE = b"mem_handler"


class _Handler(ctypes.Structure):
    """PyDataMem_Handler."""

    _fields_ = (
        ("name", ctypes.c_char * 127),
        ("version", ctypes.c_uint8),
        *codec.members(ctypes.c_void_p, "context", "malloc", "calloc", "realloc", "free"),
    )


_kept: list[object] = []  # objects that numpy points to


def begin(target_dir: Path) -> bool:
    """Prepares memory for the target's records. Returns whether files are used. Called once per process."""
    raw = raw_bytes(target_dir)
    if raw < POOL_FROM_BYTES or _kept:
        return False
    library = codec.load()
    has_pool = library.kc_spill_pool(POOL_BYTES, LEAST_BYTES) == 0
    has_file = raw >= SPILL_FROM_BYTES and _open_file(library, target_dir, raw)
    if has_pool or has_file:
        _install(library)
    return has_file


def _open_file(library: ctypes.CDLL, target_dir: Path, raw: int) -> bool:
    try:
        file = os.open(target_dir, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False  # the file system has no unnamed files: decode in memory, as far as the limit allows
    room = _ROOM_BASE + _ROOM_FACTOR * raw
    resident = RESIDENT_BYTES if raw < HUGE_FROM_BYTES else HUGE_RESIDENT_BYTES
    return int(library.kc_spill_open(file, statm, room, LEAST_BYTES, resident)) == 0


def watch(mapping: UInts8) -> None:
    """Marks a mapped file that need not stay in memory. Its address range must stay mapped to it."""
    if _kept and mapping.nbytes and codec.load().kc_spill_watch(mapping.ctypes.data, mapping.nbytes):
        _kept.append(mapping)


def _install(library: ctypes.CDLL) -> None:
    names = ("malloc", "calloc", "realloc", "free")
    functions = {name: ctypes.cast(getattr(library, f"kc_spill_{name}"), ctypes.c_void_p) for name in names}
    handler = _Handler(b"kineto_spill", 1, None, *(functions[name] for name in names))
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    core = getattr(np, "_core", None) or np.core  # numpy 1 has it under the other name
    table = ctypes.cast(pointer(core._multiarray_umath._ARRAY_API, None), ctypes.POINTER(ctypes.c_void_p))
    address = table[_SET_HANDLER]
    assert address is not None
    set_handler = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(address)
    _kept.extend((handler, functions))
    set_handler(new(ctypes.addressof(handler), _CAPSULE, None))
