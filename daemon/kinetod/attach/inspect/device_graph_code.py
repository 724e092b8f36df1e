"""Finds a file of a process with device code that launches CUDA graphs.

While CUPTI records such a program, it fails or hangs once it has created graphs for launch from the device
(docs/harm.md). Only the files reveal such code; only the driver knows whether such graphs exist.

Theory of operation
    Device code that launches graphs is relocatable and linked with cudadevrt. nvlink leaves the result in the section
    .nv_fatbin, uncompressed: a chain of containers, each a chain of entries with headers of their own; the entries of
    kind "cubin" are ELF files for the machine EM_CUDA. The driver provides `cudaGraphLaunch`, so that it is an
    undefined symbol there. (The same name in the host's symbol tables means the host's call.)

    Only headers, symbol tables and names are read, each in one bounded read. The file is not trusted: anything
    truncated, too large or inconsistent ends the search.
"""

import os
import re
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kinetod.attach.inspect.process_inspection import PROC, mapped_paths

MAX_FILE_BYTES = 512 << 20
_SECTION = b".nv_fatbin"
_SYMBOL = b"cudaGraphLaunch\0"
_EM_CUDA = 190
_SHT_SYMTAB = 2
_HEADER_BYTES = 64
_ROW = struct.Struct("<II16xQQI20x")  # sh_name, sh_type, sh_offset, sh_size, sh_link
_SYMBOL_ROW = struct.Struct("<I2xH16x")  # st_name, st_shndx
_MAX_NAMES_BYTES, _MAX_TABLE_BYTES = 1 << 20, 8 << 20
_MAX_ENTRIES = 4096  # and containers, about 4 us each
_CONTAINER = struct.Struct("<IHHQ")  # magic, version, header bytes, bytes behind the header
_CONTAINER_MAGIC = 0xBA55ED50
_ENTRY = struct.Struct("<HHIQ")  # kind, attributes, header bytes, bytes behind the header
_ENTRY_CUBIN = 2
_GAP_BYTES = 64  # between containers of several objects: the linker's alignment
# CPU time, which does not grow on a busy host: 70 files of a torch process take 2 ms when they are new, 0.7 ms
# afterwards. The caller has its own deadline for files that do not answer.
BUDGET_S = 0.2
# Folders of vendors and frameworks, which launch no graph from the device: libtorch_cuda alone has thousands of cubins.
_LEFT_OUT_FOLDERS = frozenset(
    ("torch", "nvidia", "jax", "jaxlib", "jax_plugins", "jax_cuda12_plugin", "jax_cuda13_plugin", "tensorflow")
)
# Whole names, so that a program's own libcustom_kernels.so is checked.
_LEFT_OUT_NAMES = re.compile(
    r"lib(cuda|cudart|cudadebugger|cublas|cublasLt|cudnn\w*|cufft|cufftw|cufile\w*|cupti|curand|cusolver|cusolverMg"
    r"|cusparse|cusparseLt|cutensor\w*|nccl|npp\w+|nvinfer\w*|nvJitLink|nvjpeg|nvonnxparser|nvrtc|nvrtc-builtins"
    r"|nvToolsExt|nvidia-[\w-]+|c|m|python[\w.]*)(-[\d.]+)?\.so\b"
)
_MAX_KNOWN = 8192
_known: dict[tuple[int, int, int, int], bool] = {}  # by device, inode, size and time of change


class _Damaged(Exception):
    """The file is truncated or not what it seems."""


def launches_graphs(descriptor: int) -> bool:
    """Whether an open file launches graphs; False also if that cannot be determined. Raises OSError."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_BYTES:
        return False
    try:
        file = _Elf(descriptor, 0, status.st_size)
        found = (section for section in file.sections() if file.name(section) == _SECTION)
        return any(
            _imports_launch(_Elf(descriptor, start, size))
            for section in found
            for start, size in _cubins(descriptor, section.offset, min(section.offset + section.size, status.st_size))
        )
    except (_Damaged, struct.error):
        return False


class _Section(NamedTuple):
    """The fields of one row of the section table that are needed."""

    name: int
    kind: int
    offset: int
    size: int
    link: int


class _Elf:
    """A 64-bit little-endian ELF image within a file. Raises _Damaged."""

    def __init__(self, descriptor: int, start: int, size: int) -> None:
        self._descriptor, self._start, self._size = descriptor, start, size
        header = self.read(0, _HEADER_BYTES)
        if header[:4] != b"\x7fELF" or header[4:6] != b"\x02\x01":
            raise _Damaged
        (self.machine,) = struct.unpack_from("<H", header, 18)
        (self._table,) = struct.unpack_from("<Q", header, 40)
        row_bytes, self._count, self._names_index = struct.unpack_from("<HHH", header, 58)
        if row_bytes != _ROW.size:
            raise _Damaged
        self._names = b""

    def read(self, offset: int, size: int, limit: int = _MAX_TABLE_BYTES) -> bytes:
        """Reads exactly `size` bytes of it."""
        if size > limit or offset + size > self._size:
            raise _Damaged
        data = os.pread(self._descriptor, size, self._start + offset)
        if len(data) != size:
            raise _Damaged
        return data

    def sections(self) -> list[_Section]:
        """Returns all sections; afterwards name() works."""
        rows = list(map(_Section._make, _ROW.iter_unpack(self.read(self._table, self._count * _ROW.size))))
        if self._names_index < len(rows):
            names = rows[self._names_index]
            self._names = self.read(names.offset, names.size, _MAX_NAMES_BYTES)
        return rows

    def name(self, section: _Section) -> bytes:
        """Returns the section's name; empty if it has none."""
        return self._names[section.name : section.name + len(_SECTION) + 1].partition(b"\0")[0]


def _cubins(descriptor: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yields offset and size of each uncompressed cubin between two offsets of the file."""
    left = _MAX_ENTRIES
    while left > 0 and (container := _next_container(descriptor, start, end)) is not None:
        entry, start = container
        left -= 1
        while left > 0 and entry + _ENTRY.size <= start:
            kind, _, header, size = _ENTRY.unpack(_exactly(descriptor, entry, _ENTRY.size))
            if header < _ENTRY.size or entry + header + size > start:
                raise _Damaged
            # compressed ones have no ELF header
            if kind == _ENTRY_CUBIN and size > 4 and _exactly(descriptor, entry + header, 4) == b"\x7fELF":
                yield entry + header, size
            entry += header + size
            left -= 1


def _next_container(descriptor: int, start: int, end: int) -> tuple[int, int] | None:
    """Returns where the entries of the next container begin and end; None: there are no more."""
    if start >= end:
        return None
    head = os.pread(descriptor, min(_GAP_BYTES + _CONTAINER.size, end - start), start)
    at = head.find(_CONTAINER_MAGIC.to_bytes(4, "little"))
    if at < 0 or at + _CONTAINER.size > len(head):
        return None
    _, _, header, size = _CONTAINER.unpack_from(head, at)
    begin = start + at + header
    if header < _CONTAINER.size or begin + size > end:
        raise _Damaged
    return begin, begin + size


def _exactly(descriptor: int, offset: int, size: int) -> bytes:
    data = os.pread(descriptor, size, offset)
    if len(data) != size:
        raise _Damaged
    return data


def _imports_launch(cubin: _Elf) -> bool:
    """Whether one of its symbols is an undefined cudaGraphLaunch."""
    if cubin.machine != _EM_CUDA:
        return False
    sections = cubin.sections()
    for table in sections:
        if table.kind != _SHT_SYMTAB or table.link >= len(sections):
            continue
        strings = sections[table.link]
        wanted = _offsets(cubin.read(strings.offset, strings.size), _SYMBOL)
        symbols = cubin.read(table.offset, table.size) if wanted else b""
        whole = len(symbols) // _SYMBOL_ROW.size * _SYMBOL_ROW.size
        if any(section == 0 and name in wanted for name, section in _SYMBOL_ROW.iter_unpack(symbols[:whole])):
            return True
    return False


def _offsets(strings: bytes, wanted: bytes) -> set[int]:
    """Returns the offsets of a name. They need not be whole names, since a name may be the end of a longer one."""
    found, at = set[int](), strings.find(wanted)
    while at >= 0 and len(found) < 1000:
        found.add(at)
        at = strings.find(wanted, at + 1)
    return found


def find(pid: int, proc: Path = PROC) -> str:
    """Returns the path of such a file as the process sees it; empty: none found. Skips unreadable files."""
    end = time.thread_time() + BUDGET_S
    for path, place in _files(proc / str(pid)):
        if time.thread_time() > end:
            break
        try:
            if _launches(place):
                return path
        except OSError:
            continue
    return ""


def _files(folder: Path) -> Iterator[tuple[str, str]]:
    """Yields the mapped files, the program itself first: the path as the process sees it, and the one we can open."""
    try:
        program = os.readlink(folder / "exe")  # noqa: PTH115 - the text, with " (deleted)"
        paths = mapped_paths(folder)
    except OSError:
        return
    yield program.removesuffix(" (deleted)"), f"{folder}/exe"
    for path in paths:
        *folders, name = path.split("/")
        if ".so" in name and not _LEFT_OUT_NAMES.match(name) and _LEFT_OUT_FOLDERS.isdisjoint(folders):
            yield path, f"{folder}/root{path}"


def _launches(place: str) -> bool:
    """Whether a file has such code. Raises OSError."""
    descriptor = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        key = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        if key not in _known:
            if len(_known) >= _MAX_KNOWN:
                _known.clear()
            _known[key] = launches_graphs(descriptor)
        return _known[key]
    finally:
        os.close(descriptor)
