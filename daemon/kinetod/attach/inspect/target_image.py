"""The mappings, modules and Python interpreter of a target process. Reads, changes nothing.

Theory of operation
    The dynamic symbols of a module are read from the memory of the process that loaded it. No file is opened: deleted
    and replaced files and files of other mount namespaces make no difference. The program headers lead to PT_DYNAMIC,
    that to the symbol and string tables and to a hash table. DT_GNU_HASH finds a name in four or five small reads;
    DT_HASH, the older table, is used where it is the only one.
"""

import contextlib
import os
import re
import struct
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Protocol

from kinetod.attach.attach_types import AttachCode, AttachError
from kinetod.attach.inspect.target_memory import TargetMemory, gone, not_permitted
from kinetod.processes import credentials
from kinetod.processes.credentials import Credentials

PROC = Path("/proc")
OLDEST_PYTHON = (3, 9)
# All that the methods call; every CPython that exports symbols at all has them.
PYTHON_SYMBOLS = (
    "Py_AddPendingCall",
    "PyRun_StringFlags",
    "Py_IsInitialized",
    "PyInterpreterState_Main",
    "PyThreadState_New",
)
_LIBPYTHON = re.compile(r"libpython(\d)\.(\d+)[a-z]*\.(so|dylib)")
_PYTHON_NAME = re.compile(r"python(\d)\.(\d+)")
_INTERPRETER_NAME = re.compile(r"(python|pypy)[\d.]*[a-z]*(-[a-z]+)?( \(deleted\))?")
_C_LIBRARY = re.compile(r"(libc|libpthread|libdl)[-.]|ld-musl-")
_LOADER = re.compile(r"ld[-.]|ld-")
_OLD_VERSION = re.compile(rb"(?<![\d.])(2\.7\.\d+|3\.(?:[5-9]|10)\.\d+)\+?\0")
_OURS, _MOST_OURS = "kineto-", 16  # thread names of the agent, and how many threads it has at most
_MAX_TEXT_SCAN_BYTES = 16 << 20
PT_LOAD, PT_DYNAMIC = 1, 2
PF_X = 1
_DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_GNU_HASH = 4, 5, 6, 0x6FFFFEF5
_EHDR_SIZE, _DYN_SIZE, _SYM_SIZE = 64, 16, 24
_SYM = struct.Struct("<IBBHQQ")  # st_name, st_info, st_other, st_shndx, st_value, st_size
_PHDR = struct.Struct("<IIQQQQQQ")  # p_type, p_flags, p_offset, p_vaddr, p_paddr, p_filesz, p_memsz, p_align
_MAX_DYNAMIC_BYTES = 1 << 16
_MAX_SYMBOLS, _MAX_NAME_BYTES, _STT_FUNC = 1 << 16, 64, 2
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

    def functions(self) -> list[tuple[int, int, str]]:
        """Address, size (bytes) and name of the defined functions, by rising address. Raises OSError."""
        count = min(self._symbol_count(), _MAX_SYMBOLS)
        found = list[tuple[int, int, str]]()
        for name, info, _other, section, value, size in _SYM.iter_unpack(
            self._memory.read(self._symbols, count * _SYM_SIZE)
        ):
            if section and info & 0xF == _STT_FUNC:
                text = self._memory.read(self._strings + name, _MAX_NAME_BYTES).partition(b"\0")[0]
                found.append((self.bias + value, size, text.decode("ascii", "replace")))
        return sorted(found)

    def _symbol_count(self) -> int:
        if self._sysv_hash is not None:
            return self._memory.u32(self._sysv_hash + 4)
        if self._gnu_hash is None:
            return 0
        buckets, first, bloom_words, _shift = struct.unpack("<IIII", self._memory.read(self._gnu_hash, 16))
        if not 0 < buckets <= _MAX_SYMBOLS:
            return 0
        table = self._gnu_hash + 16 + bloom_words * 8
        last = max(struct.unpack(f"<{buckets}I", self._memory.read(table, 4 * buckets)))
        for index in range(last, last + _MAX_CHAIN if last >= first else 0):
            if self._memory.u32(table + 4 * (buckets + index - first)) & 1:
                return index + 1
        return 0

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


@dataclass(frozen=True, slots=True)
class Mapping:
    """One line of /proc/PID/maps."""

    start: int
    end: int
    permissions: str  # "r-xp"
    offset: int  # bytes into the file
    path: str  # "" for anonymous memory

    @property
    def is_file(self) -> bool:
        """Whether the mapping has a file."""
        return self.path.startswith("/")


@dataclass(frozen=True, slots=True)
class PythonImage:
    """The module that holds the interpreter."""

    path: str
    version: tuple[int, int, int]  # major, minor, micro; micro is 0 if unknown
    elf: Elf

    def symbol(self, name: str) -> tuple[int, int] | None:
        """Address and size (bytes) of an exported symbol; None if there is none."""
        return self.elf.lookup(name)

    def address(self, name: str) -> int:
        """The address of an exported symbol. Raises AttachError if there is none."""
        found = self.symbol(name)
        if found is None:
            raise AttachError(AttachCode.UNSUPPORTED, f"{self.path} does not export {name}")
        return found[0]


def _found(pid: int, proc: Path) -> Credentials:
    try:
        return credentials.read(pid, proc=proc)
    except ProcessLookupError:
        raise gone(pid) from None


def read_maps(pid: int, proc: Path = PROC) -> list[Mapping]:
    """Returns all mappings by rising address. Raises AttachError."""
    try:
        text = os.fsdecode((proc / str(pid) / "maps").read_bytes())
    except PermissionError:
        raise not_permitted(pid) from None
    except (FileNotFoundError, ProcessLookupError):
        raise gone(pid) from None
    maps = []
    for line in text.split("\n")[:-1]:  # a path may contain what str.splitlines would take for the end of a line
        fields = line.split(None, 5)
        path = fields[5] if len(fields) > 5 else ""
        try:
            start, end = (int(address, 16) for address in fields[0].split("-"))
            maps.append(Mapping(start, end, fields[1], int(fields[2], 16), path))
        except (ValueError, IndexError):
            raise AttachError(
                AttachCode.UNSUPPORTED, f"the memory mappings of process {pid} cannot be parsed"
            ) from None
    if not maps:
        raise gone(pid)
    return maps


class TargetImage:
    """A process at one moment. `python` is None if it has no interpreter.

    Raises AttachError: GONE, NOT_PERMITTED, or UNSUPPORTED for an interpreter that cannot be used.
    """

    def __init__(self, pid: int, proc: Path = PROC, *, approved: Credentials | None = None) -> None:
        """approved: the credentials that every stop requires; None: those it had before its memory was opened."""
        self.pid = pid
        self.approved = approved or _found(pid, proc)
        self.proc = proc / str(pid)
        self.memory = TargetMemory(pid)
        self.maps = read_maps(pid, proc)
        try:
            self.exe = str((self.proc / "exe").readlink())
        except PermissionError:
            raise not_permitted(pid) from None
        except OSError:
            raise gone(pid) from None
        self.modules = _modules(self.maps)
        self._elves: dict[str, Elf | None] = {}
        self._refuse_32_bit()
        self.python = self._find_python()

    def refresh(self) -> None:
        """Reads the mappings again."""
        self.maps = read_maps(self.pid, self.proc.parent)

    def elf(self, path: str) -> Elf | None:
        """Returns the module's image; None if it is not a module or has no dynamic symbols."""
        if path not in self._elves:
            self._elves[path] = None
            if path in self.modules:
                try:
                    self._elves[path] = Elf(self.memory, self.modules[path])
                except (NotElfError, OSError):
                    self._elves[path] = None
        return self._elves[path]

    def mapping_at(self, address: int) -> Mapping | None:
        """The mapping that holds this address."""
        low, high = 0, len(self.maps)
        while low < high:
            middle = (low + high) // 2
            if self.maps[middle].end <= address:
                low = middle + 1
            else:
                high = middle
        found = self.maps[low] if low < len(self.maps) else None
        return found if found is not None and found.start <= address else None

    def symbol_in(self, path_prefixes: tuple[str, ...], name: str) -> tuple[int, int] | None:
        """Address and size of a symbol of the first module whose file name starts with one of the prefixes."""
        for path in self.modules:
            if PurePosixPath(path).name.startswith(path_prefixes) and (found := self._lookup(path, name)):
                return found
        return None

    def libc_symbol(self, name: str) -> int:
        """Address of a symbol of the C library (or libpthread, libdl beside it); raises AttachError."""
        for path in self.modules:
            if _C_LIBRARY.match(PurePosixPath(path).name) and (found := self._lookup(path, name)):
                return found[0]
        found = self._lookup(self.exe, name)  # linked statically, its symbols exported
        if found is not None:
            return found[0]
        raise AttachError(AttachCode.UNSUPPORTED, f"process {self.pid} has no C library that exports {name}")

    @cached_property
    def one_threaded(self) -> bool:
        """Whether all of its threads but one are ours, as of the first call."""
        names = list[str]()
        with contextlib.suppress(OSError):
            for tid in os.listdir(self.proc / "task")[: _MOST_OURS + 2]:  # noqa: PTH208 -- in a hurry
                with contextlib.suppress(OSError):  # a thread has ended
                    names.append((self.proc / "task" / tid / "comm").read_text(errors="replace"))
        return sum(not name.startswith(_OURS) for name in names) == 1

    @cached_property
    def loader_modules(self) -> frozenset[str]:
        """Paths of the C library and the dynamic loader."""
        names = {path: PurePosixPath(path).name for path in self.modules}
        return frozenset(path for path, name in names.items() if _C_LIBRARY.match(name) or _LOADER.match(name))

    def exports(self, path: str, name: str) -> bool:
        """Whether that module defines the symbol."""
        return self._lookup(path, name) is not None

    def _lookup(self, path: str, name: str) -> tuple[int, int] | None:
        image = self.elf(path)
        try:
            return image.lookup(name) if image is not None else None
        except OSError:  # unloaded since
            return None

    def _refuse_32_bit(self) -> None:
        base = self.modules.get(self.exe)
        if base is not None and self.memory.read(base, 5)[4] != 2:
            raise AttachError(
                AttachCode.UNSUPPORTED, f"process {self.pid} is a 32-bit program; only 64-bit programs are supported"
            )

    def _find_python(self) -> PythonImage | None:
        named = [path for path in self.modules if _LIBPYTHON.search(path)]
        embedding = [path for path in self.modules if path.startswith("/") and path not in (self.exe, *named)]
        for path in (self.exe, *named, *embedding):
            image = self.elf(path)
            if image is None or not all(self._lookup(path, name) for name in PYTHON_SYMBOLS[:2]):
                continue
            return self._usable_python(path, image)
        name = PurePosixPath(self.exe).name
        if named or _INTERPRETER_NAME.fullmatch(name):
            raise AttachError(
                AttachCode.UNSUPPORTED,
                f"process {self.pid} runs {name}, which is not a CPython interpreter with exported symbols (it is "
                "stripped, or is PyPy); start it with the agent, see 'kinetoctl run --help'",
            )
        return None

    def _usable_python(self, path: str, image: Elf) -> PythonImage:
        version = self._python_version(path, image)
        if version[:2] < OLDEST_PYTHON:
            raise AttachError(
                AttachCode.UNSUPPORTED,
                f"process {self.pid} runs Python {version[0]}.{version[1]}; the agent needs"
                f" {OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} or later",
            )
        for name in PYTHON_SYMBOLS:
            if not self._lookup(path, name):
                raise AttachError(
                    AttachCode.UNSUPPORTED, f"the interpreter {path} of process {self.pid} does not export {name}"
                )
        return PythonImage(path, version, image)

    def _python_version(self, path: str, image: Elf) -> tuple[int, int, int]:
        found = image.lookup("Py_Version")  # from 3.11 on
        if found is not None:
            packed = self.memory.u64(found[0])
            return packed >> 24 & 0xFF, packed >> 16 & 0xFF, packed >> 8 & 0xFF
        match = _LIBPYTHON.search(path) or _PYTHON_NAME.search(PurePosixPath(path).name)
        if match:
            return int(match[1]), int(match[2]), 0
        text = self._find_text(path, _OLD_VERSION)  # linked into a program with another name
        if text is None:
            return 0, 0, 0
        major, minor, micro = text.split(".")
        return int(major), int(minor), int(micro)

    def _find_text(self, path: str, pattern: re.Pattern[bytes]) -> str | None:
        for mapping in self.maps:
            if mapping.path == path and mapping.end - mapping.start <= _MAX_TEXT_SCAN_BYTES:
                try:
                    match = pattern.search(self.memory.read(mapping.start, mapping.end - mapping.start))
                except OSError:
                    continue
                if match:
                    return match[1].decode()
        return None


def _modules(maps: list[Mapping]) -> dict[str, int]:
    """Maps path -> address of the ELF header, for every file that is mapped from its start and has code."""
    modules: dict[str, int] = {}
    start: Mapping | None = None
    for mapping in maps:
        if not mapping.path:
            continue
        if start is None or mapping.path != start.path or mapping.offset == 0:
            start = mapping if mapping.offset == 0 else None
        if start is not None and "x" in mapping.permissions:
            modules.setdefault(start.path, start.start)
    return modules


if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("live attach supports little-endian machines only")
