"""Waits for the GPU by the stacks of real programs, with a library in place of CUDA's driver."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kinetod.stacks.driver_calls import driver_calls
from kinetod.stacks.python_frames import open_spy, read_frames
from kinetod.stacks.thread_facts import read_process
from support.waiting import until

DRIVER = """
#include <unistd.h>
static int __attribute__((noinline)) works(int how) {
    volatile long round = 0;
    while (how == 1) round++;
    while (how == 2) pause();
    return (int)round;
}
static int __attribute__((noinline)) enters(int how) { return works(how) + 1; }
int cuStreamSynchronize(int how) { return enters(how) + 1; }
int cuModuleGetFunction(int how) { return enters(how) + 1; }
"""
OTHER = """
static int __attribute__((noinline)) works(void) {
    volatile long round = 0;
    while (round >= 0) round++;
    return (int)round;
}
int computes(void) {
    volatile char room[16384];  /* in which what was there before remains */
    return works() + room[0];
}
"""
LOADS = """
import ctypes, threading
driver, other = (ctypes.CDLL("{folder}/" + name) for name in ("libcuda.so.1", "libother.so"))
for _ in range(3):
    driver.cuStreamSynchronize(0)
print("begun", flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("driver")
    for name, source in (("libcuda.so.1", DRIVER), ("libother.so", OTHER)):
        command = ["cc", "-O2", "-shared", "-fPIC", "-x", "c", "-o", str(made / name), "-"]
        subprocess.run(command, input=source, text=True, check=True)
    return made


@contextmanager
def program(folder: Path, does: str) -> Iterator[Callable[[], set[str]]]:
    """A function that looks at a running program and returns the calls in which its threads wait."""
    with subprocess.Popen(
        [sys.executable, "-c", LOADS.replace("{folder}", str(folder)) + does], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        spy = open_spy()

        def looked() -> set[str]:
            facts = read_process(process.pid, 9)
            return set(driver_calls(facts, read_frames(process.pid, spy, process.pid)).values())

        yield looked
        process.kill()


@pytest.mark.parametrize(
    "does",
    [
        "driver.cuStreamSynchronize(1)",
        "driver.cuStreamSynchronize(2)",
        "threading.Thread(target=driver.cuStreamSynchronize, args=(1,)).start()",
        "threading.Thread(target=driver.cuStreamSynchronize, args=(2,)).start()",
        "def f(n): return max([n - 1], key=f) if n else driver.cuStreamSynchronize(1)\nf(100)",
    ],
    ids=["spins", "sleeps", "a thread spins", "a thread sleeps", "deep in the program"],
)
def test_a_thread_that_waits_in_the_driver_is_found(folder: Path, does: str) -> None:
    with program(folder, does) as looked:
        until(lambda: looked() == {"cuStreamSynchronize"}, "it is found")


@pytest.mark.parametrize(
    "does",
    [
        "while True: pass",
        "while True: sorted(range(100), key=lambda each: -each)",
        "other.computes()",
        "threading.Thread(target=other.computes).start()",
        "driver.cuModuleGetFunction(1)",
        "while True: driver.cuStreamSynchronize(0)",
        "import time\ntime.sleep(1000)",
    ],
    ids=["runs", "calls", "computes", "a thread computes", "is elsewhere in the driver", "comes and goes", "sleeps"],
)
def test_a_thread_that_has_been_in_the_driver_is_not_found_there(folder: Path, does: str) -> None:
    with program(folder, does) as looked:
        assert [looked() for _ in range(5)] == [set()] * 5


def test_a_process_without_the_driver_or_that_has_ended_has_no_such_calls() -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        facts = read_process(process.pid, 9)
        assert driver_calls(facts, []) == {}
        process.kill()
    assert driver_calls(facts, []) == {}
