"""The call of CUDA's driver in which a thread waits for the GPU, read from its stack while it goes on.

Theory of operation
    A thread that waits for the GPU usually spins: the kernel says that it runs, and the line where its Python stands
    may as well compute. But the return addresses on its stack lie in the driver. Return addresses of calls that are
    long over lie there, too, so the question is which part of the stack is in use.

    The kernel tells the stack pointer of a thread that is in the kernel. The stack of one that runs is read LOOKS
    times, and up to MOST_LOOKS times if nothing changes: what lies outside of all that changes belongs to calls that
    have not returned in that time. If still nothing changes, nothing is told.

    From there outwards, the first return addresses must be the driver's, but for those of the C library that it calls:
    a thread that computes elsewhere has those of another library there. Further out, between the driver's own, there
    may be any, since its functions use little of the room that they take. The first one in an exported function is that
    of the call. Those functions call the ones that do the work, and do not jump to them (580, on an H200).
"""

import array
import os
import re
import struct
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import PurePosixPath

from kinetod.attach.attach_types import AttachError
from kinetod.attach.inspect.target_image import Elf, Mapping, NotElfError, read_maps
from kinetod.stacks.python_frames import PythonThread, read_memory
from kinetod.stacks.thread_facts import ThreadTable

LOOKS, MOST_LOOKS, PAUSE_S = 6, 20, 0.02
MAX_THREADS = 16
_MAX_STACK_BYTES = 1 << 20
_WORD, _MAX_WORDS = 8, 1024  # of the part in use
_SURE = 2  # so many return addresses of the driver
_DRIVER = re.compile(r"libcuda\.so(\.[\d.]+)?")
_CALLED_BY_IT = re.compile(r"(libc|libpthread|librt|ld-linux-[\w-]+)[-.].*|\[vdso\]")
_WAITS = re.compile(r"cu(\w*Synchronize|\w*Launch\w*|Mem\w+|ModuleUnload)\w*")
_X86_64 = os.uname().machine == "x86_64"
_CALL_BYTES = 7
_MODRM_CALLS = (2, 3, 4, 6, 7)  # lengths of `call *…`


class _Memory:
    """The memory of a process, as target_image.Elf reads it."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def read(self, address: int, size: int) -> bytes:
        found = read_memory(self._pid, address, size)
        if len(found) != size:
            raise OSError(f"{address:#x} of process {self._pid} cannot be read")
        return found

    def u32(self, address: int) -> int:
        return int(struct.unpack("<I", self.read(address, 4))[0])


class _Driver:
    """Where a process has CUDA's driver, and what else it executes. Raises NotElfError, OSError."""

    def __init__(self, memory: _Memory, maps: Sequence[Mapping], path: str) -> None:
        self._memory, self._path = memory, path
        self._code = [each for each in maps if "x" in each.permissions]
        self._starts = [each.start for each in self._code]
        self._elf = Elf(memory, next(each.start for each in maps if each.path == path))

    def call(self, stack: Sequence[int]) -> str:
        """The function that waits; empty: none. stack: words in use, innermost first. Raises OSError."""
        sure = 0
        for word in stack:
            path = self._module(word)
            if not path or not _follows_call(self._memory, word):
                continue
            if path == self._path:
                sure += 1
                name = self._function(word)
                if name:
                    return name if sure >= _SURE and _WAITS.fullmatch(name) else ""
            elif sure < _SURE and not _CALLED_BY_IT.fullmatch(PurePosixPath(path).name):
                return ""
        return ""

    @cached_property
    def _functions(self) -> list[tuple[int, int, str]]:
        return self._elf.functions()

    def _function(self, address: int) -> str:
        """The exported function that a call was made from; empty: it was another one."""
        place = bisect_left(self._functions, (address,)) - 1
        start, size, name = self._functions[place] if place >= 0 else (0, 0, "")
        return name if address <= start + size else ""

    def _module(self, address: int) -> str:
        """The file whose code is there; empty: there is none."""
        place = bisect_right(self._starts, address) - 1
        return self._code[place].path if place >= 0 and address < self._code[place].end else ""


def _follows_call(memory: _Memory, address: int) -> bool:
    """Whether a call may return there."""
    try:
        if not _X86_64:
            word = memory.u32(address - 4)
            return word & 0xFC000000 == 0x94000000 or word & 0xFFFFFC1F == 0xD63F0000
        code = memory.read(address - _CALL_BYTES, _CALL_BYTES)
    except OSError:
        return False
    return code[-5] == 0xE8 or any(code[-size] == 0xFF and code[1 - size] & 0x38 == 0x10 for size in _MODRM_CALLS)


def driver_calls(
    facts: ThreadTable, python: Sequence[PythonThread], *, sleep: Callable[[float], object] = time.sleep
) -> dict[int, str]:
    """By thread, the function of the driver in which it waits. Takes 0.1 to 0.4 s if any of them runs."""
    pid, of = facts.pid, {thread.thread: thread for thread in python}
    try:
        maps = read_maps(pid)
        path = next((each.path for each in maps if _DRIVER.fullmatch(PurePosixPath(each.path).name)), "")
        if not path:
            return {}
        driver = _Driver(_Memory(pid), maps, path)
        stacks = dict[int, bytes]()
        running = dict[int, range]()
        for each in [each for each in facts.threads if each.inner in of][:MAX_THREADS]:
            if each.stack_pointer:
                used = _to_end_of_mapping(maps, each.stack_pointer)
                stacks[each.thread] = read_memory(pid, used.start, len(used))
            else:
                running[each.thread] = _stack(maps, 0 if each.thread == pid else of[each.inner].address)
        stacks.update(_standing(pid, running, sleep))
        found = {thread: driver.call(_words(stack)) for thread, stack in stacks.items()}
    except (AttachError, NotElfError, OSError):
        return {}
    return {thread: name for thread, name in found.items() if name}


def _to_end_of_mapping(maps: Sequence[Mapping], address: int) -> range:
    end = next((each.end for each in maps if each.start <= address < each.end), address)
    return range(address, min(end, address + _MAX_STACK_BYTES))


def _stack(maps: Sequence[Mapping], thread: int) -> range:
    """The stack below a thread's own structure, or that of the main thread; empty: it is elsewhere."""
    for each in maps:
        if each.path == "[stack]" if not thread else each.start <= thread < each.end:
            end = thread or each.end
            return range(max(each.start, end - _MAX_STACK_BYTES), end)
    return range(0)


def _standing(pid: int, stacks: dict[int, range], sleep: Callable[[float], object]) -> dict[int, bytes]:
    """For each of these threads, what lies outside of all that changes in its stack; empty if nothing changes."""
    first, inner = dict[int, bytes](), dict.fromkeys(stacks, 0)
    for look in range(MOST_LOOKS if stacks else 0):
        if look >= LOOKS and all(inner.values()):
            break
        if look:
            sleep(PAUSE_S)
        for thread, stack in stacks.items():
            read = read_memory(pid, stack.start, len(stack))
            before = first.setdefault(thread, read)
            changed = int.from_bytes(before, "little") ^ int.from_bytes(read, "little")
            inner[thread] = max(inner[thread], -(-changed.bit_length() // (8 * _WORD)) * _WORD)
    return {thread: first[thread][end:] if end else b"" for thread, end in inner.items()}


def _words(stack: bytes) -> Sequence[int]:
    """The innermost words of a stack."""
    return array.array("Q", stack[: min(len(stack), _MAX_WORDS * _WORD) // _WORD * _WORD])
