"""Whether the device code in an ELF file launches CUDA graphs.

Theory of operation
    Device code that launches graphs is relocatable and linked with cudadevrt. nvlink leaves the result in the section
    .nv_fatbin, uncompressed: a chain of containers, each a chain of entries with headers of their own, of which those
    of the kind "cubin" are ELF files for the machine EM_CUDA. The driver provides `cudaGraphLaunch`, so that it is an
    undefined symbol there. (The host's symbol tables have that name too, and mean the call of the host.)

    Only headers, symbol tables and names are read, each in one bounded read. The file is not trusted: whatever is cut,
    too large or inconsistent ends the search.
"""

import os
import stat
import struct
from collections.abc import Iterator
from typing import NamedTuple

MAX_FILE_BYTES = 512 << 20
_SECTION = b".nv_fatbin"
_SYMBOL = b"cudaGraphLaunch\0"
_EM_CUDA = 190
_SHT_SYMTAB = 2
_HEADER_BYTES = 64
_ROW = struct.Struct("<II16xQQI20x")  # sh_name, sh_type, sh_offset, sh_size, sh_link
_SYMBOL_ROW = struct.Struct("<I2xH16x")  # st_name, st_shndx
_MAX_NAMES_BYTES, _MAX_TABLE_BYTES = 1 << 20, 8 << 20
_MAX_ENTRIES = 4096  # and containers, some 4 us each
_CONTAINER = struct.Struct("<IHHQ")  # magic, version, header bytes, bytes behind the header
_CONTAINER_MAGIC = 0xBA55ED50
_ENTRY = struct.Struct("<HHIQ")  # kind, attributes, header bytes, bytes behind the header
_ENTRY_CUBIN = 2
_GAP_BYTES = 64  # between containers of several objects: the linker's alignment


class _Damaged(Exception):
    """The file is cut or not what it seems."""


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
    """One row of the section table, as far as it is needed."""

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
        """Exactly so many bytes of it."""
        if size > limit or offset + size > self._size:
            raise _Damaged
        data = os.pread(self._descriptor, size, self._start + offset)
        if len(data) != size:
            raise _Damaged
        return data

    def sections(self) -> list[_Section]:
        """All of them; afterwards name() works."""
        rows = list(map(_Section._make, _ROW.iter_unpack(self.read(self._table, self._count * _ROW.size))))
        if self._names_index < len(rows):
            names = rows[self._names_index]
            self._names = self.read(names.offset, names.size, _MAX_NAMES_BYTES)
        return rows

    def name(self, section: _Section) -> bytes:
        """Empty if it has none."""
        return self._names[section.name : section.name + len(_SECTION) + 1].partition(b"\0")[0]


def _cubins(descriptor: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Offset and size of those that lie uncompressed between two offsets of the file."""
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
    """Where its entries begin and end; None: there is no further one."""
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
    """Whether one of its symbols is cudaGraphLaunch, and undefined."""
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
    """Of whole names only as far as symbols point there: a name may be the end of a longer one."""
    found, at = set[int](), strings.find(wanted)
    while at >= 0 and len(found) < 1000:
        found.add(at)
        at = strings.find(wanted, at + 1)
    return found
