from typing import List

import pytest
from kineto_agent.system.memory_use import Growth, anonymous_bytes, give_memory_back
from support.agent.python_child import run_python

MIB = 1 << 20


class Process:
    """A process of which the test says how large it is."""

    def __init__(self, mib: int = 1000) -> None:
        self.mib = mib
        self.trims: List[int] = []
        self.growth = Growth(256 * MIB, 10, lambda: self.mib * MIB, lambda: self.trims.append(self.mib))

    def near(self, mib: int) -> bool:
        self.mib = mib
        return self.growth.is_near()

    def ended(self, peak: int, after: int) -> bool:
        self.mib = peak
        self.growth.ending()
        self.mib = after
        return self.growth.ended()


def test_a_session_ends_before_its_end_would_take_too_much() -> None:
    process = Process()
    assert [process.near(mib) for mib in (1010, 1015, 1020, 1025, 1025, 1026)] == [False] * 3 + [True, False, True]


def test_a_session_that_grows_fast_ends_at_once() -> None:
    process = Process()
    assert process.near(1013)  # and 26 at the next look


def test_what_an_end_took_counts_for_the_next_session() -> None:
    process = Process()
    assert process.near(1026)
    assert process.ended(peak=1520, after=1003)  # twenty times
    process.growth.begin()
    process.near(1003)
    assert [process.near(mib) for mib in (1006, 1009, 1012, 1014)] == [False] * 3 + [True]


def test_memory_that_stays_in_the_process_is_told() -> None:
    process = Process()
    process.near(1020)
    assert not process.ended(peak=1200, after=1195)
    assert process.ended(peak=1200, after=1021)


def test_a_session_that_took_little_is_not_worth_a_look_at_the_heap() -> None:
    process = Process()
    process.near(1001)
    assert process.ended(peak=1008, after=1008) and not process.trims
    assert process.ended(peak=1009, after=1009) and process.trims


@pytest.mark.parametrize(("heap_mib", "comes_back"), [(64, True), (192, False)])
def test_a_large_heap_is_not_looked_at(heap_mib: int, comes_back: bool) -> None:
    plan = """
import ctypes, sys
from kineto_agent.system.memory_use import anonymous_bytes, give_memory_back
c = ctypes.CDLL(None)
c.malloc.restype = ctypes.c_void_p
c.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD: everything in the heap
blocks = [c.malloc(ctypes.c_size_t(1 << 16)) for _ in range(%d * 16)]
for block in blocks:
    ctypes.memset(ctypes.c_void_p(block), 1, 1 << 16)
last = c.malloc(ctypes.c_size_t(1 << 16))
for block in blocks:
    c.free(ctypes.c_void_p(block))
before = anonymous_bytes()
give_memory_back()
print((before - anonymous_bytes()) >> 20)
"""
    done = run_python(["-c", plan % heap_mib])
    assert done.returncode == 0, done.stderr
    assert (int(done.stdout) > heap_mib // 2) == comes_back


def test_the_memory_of_this_process_is_known() -> None:
    assert anonymous_bytes() > MIB
    give_memory_back()
