"""Targets that work all the time in one thread: in the eval loop, in every allocator. Nothing here has threading."""

import ctypes
import gc
import os
import time
from typing import Any, Callable, Dict

from campaign.attach_targets.control import Target, must_be


class _Node:
    def __init__(self, value: int) -> None:
        self.value = value
        self.me = self  # garbage in a cycle


def _generate(count: int) -> "Any":
    for number in range(count):
        try:
            if number % 7 == 3:
                raise KeyError(number)
            yield number * number
        except KeyError as error:
            yield int(error.args[0]) + 1


def _recurse(depth: int) -> int:
    return 1 if depth == 0 else depth + _recurse(depth - 1)


def python_work() -> int:
    """Some 0.2 ms of most kinds of bytecode. The result is always the same number."""
    total = 0
    words: Dict[str, int] = {}
    for number in _generate(150):
        words["k%d" % (number % 31)] = words.get("k%d" % (number % 31), 0) + number
        total = (total * 1103515245 + number) % 2147483648
    real = 1.0
    for number in range(60):
        real = real * 1.0000001 + number / 3.0
    total += sum(value for _key, value in sorted(words.items())) + int(real * 1e6) + _recurse(20)
    first, *rest = [number ^ total for number in range(20)]
    return (total ^ first) + sum(rest)


class MallocWork:
    """libc's malloc with and without the GIL, small objects, big bytes, garbage cycles, sorting."""

    def __init__(self) -> None:
        self._libraries = [ctypes.CDLL(None), ctypes.PyDLL(None)]
        for libc in self._libraries:
            libc.malloc.restype = libc.realloc.restype = ctypes.c_void_p
            libc.malloc.argtypes = [ctypes.c_size_t]
            libc.realloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
            libc.free.argtypes = [ctypes.c_void_p]

    def __call__(self) -> int:
        """Does the work. The result is always the same number."""
        total = 0
        for libc in self._libraries:
            blocks = []
            for size in (24, 200, 1032, 5000, 70000, 300000):
                block = libc.malloc(size)
                ctypes.memset(block, size % 251, size)
                blocks.append((libc.realloc(block, size * 2), size))
            for block, size in blocks:
                content = ctypes.string_at(block, size)
                total += content.count(bytes([size % 251]))
                libc.free(block)
        for number in range(40):
            total += len(b"x" * (number * 97)) + len(("y" * number + "z").encode())
            _Node(number)
        total += len(bytearray(1 << 17)) + gc.collect(0) * 0
        numbers = [(number * 7919) % 10007 for number in range(300)]
        numbers.sort()
        return total + numbers[150] + sum(numbers[::50])


class Loop(Target):
    """The same work again and again, whose result is known."""

    def __init__(self, work: Callable[[], int]) -> None:
        self._work = work
        self._wanted = work()

    def lap(self) -> None:
        must_be("the sum", self._work(), self._wanted)


_BRIEF_S = 0.001


def gives_briefly() -> Target:
    """A millisecond of work, and a call that lets go of the GIL for a microsecond: CPython serves nobody else."""
    null = os.open(os.devnull, os.O_RDONLY)

    def work() -> int:
        end = time.perf_counter() + _BRIEF_S
        while time.perf_counter() < end:
            pass
        return len(os.pread(null, 1, 0))

    return Loop(work)


KINDS: Dict[str, Callable[[], Target]] = {
    "python": lambda: Loop(python_work),
    "malloc": lambda: Loop(MallocWork()),
    "gives_briefly": gives_briefly,
}
