"""Dynamic symbols of a module, read from the memory of the process that loaded it.

Theory of operation
    No file is opened: deleted and replaced files and files of other mount namespaces make no difference. The
    program headers lead to PT_DYNAMIC, that to the symbol and string tables and to a hash table. DT_GNU_HASH
    finds a name in four or five small reads; DT_HASH, the older table, is used where it is the only one.
"""

import struct
from dataclasses import dataclass
from typing import Protocol

PT_LOAD, PT_DYNAMIC = 1, 2
PF_X = 1
_DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_GNU_HASH = 4, 5, 6, 0x6FFFFEF5
_EHDR_SIZE, _DYN_SIZE, _SYM_SIZE = 64, 16, 24
_SYM = struct.Struct("<IBBHQQ")  # st_name, st_info, st_other, st_shndx, st_value, st_size
_PHDR = struct.Struct("<IIQQQQQQ")  # p_type, p_flags, p_offset, p_vaddr, p_paddr, p_filesz, p_memsz, p_align
_MAX_DYNAMIC_BYTES = 1 << 16
_MAX_CHAIN = 1 << 12  # about ten are usual; an endless chain would keep a helper busy and others waiting
_PAGE = 4096


class Reader(Protocol):
    """The part of a process's memory interface that this module needs."""

    def read(self, address: int, size: int) -> bytes:
        """Exactly `size` bytes; OSError where nothing is mapped."""

    def u32(self, address: int) -> int:
        """An unsigned 32-bit number."""


class NotElfError(Exception):
    """There is no 64-bit little-endian ELF image with dynamic symbols at this address."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One PT_LOAD."""

    address: int  # in the process
    file_size: int  # bytes
    memory_size: int  # bytes
    executable: bool


class Elf:
    """One loaded module, by the address of its ELF header. Raises NotElfError, and OSError where nothing is mapped."""

    def __init__(self, memory: Reader, base: int) -> None:
        self._memory = memory
        header = memory.read(base, _EHDR_SIZE)
        if header[:4] != b"\x7fELF":
            raise NotElfError("no ELF header")
        self.is_64_bit = header[4] == 2
        if not self.is_64_bit or header[5] != 1:
            raise NotElfError("not a 64-bit little-endian image")
        (table,) = struct.unpack_from("<Q", header, 32)
        entry_size, count = struct.unpack_from("<HH", header, 54)
        if entry_size != _PHDR.size:
            raise NotElfError("unknown program headers")
        entries = list(_PHDR.iter_unpack(memory.read(base + table, entry_size * count)))
        loads = [entry for entry in entries if entry[0] == PT_LOAD]
        if not loads:
            raise NotElfError("no loadable segment")
        self.bias = base - (loads[0][3] & -_PAGE)
        self.segments = tuple(
            Segment(self.bias + vaddr, file_size, memory_size, bool(flags & PF_X))
            for _type, flags, _offset, vaddr, _paddr, file_size, memory_size, _align in loads
        )
        dynamic = next((entry for entry in entries if entry[0] == PT_DYNAMIC), None)
        if dynamic is None:
            raise NotElfError("no dynamic section")
        self._read_dynamic(self.bias + dynamic[3], min(dynamic[6], _MAX_DYNAMIC_BYTES))

    def _read_dynamic(self, address: int, size: int) -> None:
        tags: dict[int, int] = {}
        for tag, value in struct.iter_unpack("<qQ", self._memory.read(address, size // _DYN_SIZE * _DYN_SIZE)):
            if tag == 0:
                break
            # glibc has relocated these in place, musl has not.
            tags.setdefault(tag, value if value >= self.bias else value + self.bias)
        if _DT_SYMTAB not in tags or _DT_STRTAB not in tags:
            raise NotElfError("no dynamic symbols")
        self._symbols, self._strings = tags[_DT_SYMTAB], tags[_DT_STRTAB]
        self._gnu_hash, self._sysv_hash = tags.get(_DT_GNU_HASH), tags.get(_DT_HASH)
        self._found: dict[str, tuple[int, int] | None] = {}

    def lookup(self, name: str) -> tuple[int, int] | None:
        """Address and size (bytes) of a defined symbol; for an ifunc, those of its resolver."""
        if name not in self._found:
            self._found[name] = self._search(name.encode())
        return self._found[name]

    def _search(self, name: bytes) -> tuple[int, int] | None:
        if self._gnu_hash is not None:
            return self._search_gnu(self._gnu_hash, name)
        if self._sysv_hash is not None:
            return self._search_sysv(self._sysv_hash, name)
        return None

    def _search_gnu(self, table: int, name: bytes) -> tuple[int, int] | None:
        buckets, first, bloom_words, _shift = struct.unpack("<IIII", self._memory.read(table, 16))
        if not buckets:
            return None
        wanted = 5381
        for character in name:
            wanted = (wanted * 33 + character) & 0xFFFFFFFF
        bucket_table = table + 16 + bloom_words * 8
        start = self._memory.u32(bucket_table + 4 * (wanted % buckets))
        if start < first:
            return None
        chain = bucket_table + 4 * buckets
        for index in range(start, start + _MAX_CHAIN):
            value = self._memory.u32(chain + 4 * (index - first))
            if value | 1 == wanted | 1 and (found := self._match(index, name)):
                return found
            if value & 1:
                return None
        return None

    def _search_sysv(self, table: int, name: bytes) -> tuple[int, int] | None:
        buckets, _chains = struct.unpack("<II", self._memory.read(table, 8))
        if not buckets:
            return None
        wanted = 0
        for character in name:
            wanted = (wanted << 4) + character
            high = wanted & 0xF0000000
            wanted = (wanted ^ (high >> 24)) & ~high & 0xFFFFFFFF
        index = self._memory.u32(table + 8 + 4 * (wanted % buckets))
        for _step in range(_MAX_CHAIN):
            if index == 0:
                return None
            if found := self._match(index, name):
                return found
            index = self._memory.u32(table + 8 + 4 * (buckets + index))
        return None

    def _match(self, index: int, name: bytes) -> tuple[int, int] | None:
        entry = self._memory.read(self._symbols + index * _SYM_SIZE, _SYM_SIZE)
        name_offset, _info, _other, section, value, size = _SYM.unpack(entry)
        if section == 0:
            return None
        try:
            same = self._memory.read(self._strings + name_offset, len(name) + 1) == name + b"\0"
        except OSError:  # a shorter name at the very end of the mapping
            return None
        return (self.bias + value, size) if same else None
