"""What an attach and a trace really take of a live program, against the table of budgets; and programs near a limit."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kinetod.processes.budgets import BUDGETS, stack_bytes
from support.agent.python_child import environment
from support.machine.cgroups import MIB, real_group
from support.machine.kernel import allowed_to_trace
from support.service.cli import Result, run_process
from support.service.daemon import Daemon

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not allowed_to_trace(), reason="the kernel does not let us trace (ptrace_scope?)"),
]

TRACES = 4
MOST_TIMES = 4
LOCK = "assert ctypes.CDLL(None).mlockall(3) == 0"  # MCL_CURRENT | MCL_FUTURE
TORCH = "import torch; torch.ones(3) + 1"
# Allocates and starts threads all the time; an error ends it, and what it prints at the end says that there was none.
WORK = """
import ctypes, mmap, sys, threading
%s
going = [True]
def wait():
    sys.stdin.readline()
    going[0] = False
threading.Thread(target=wait).start()
print("ready", flush=True)
while going[0]:
    thread = threading.Thread(target=sum, args=(range(1000),))
    thread.start()
    blocks = [bytes(300_000), mmap.mmap(-1, 8192)]
    thread.join()
print("right", flush=True)
"""
# Mappings that cannot be merged, up to so many below the limit.
FULL = """
import resource
page, most = resource.getpagesize(), int(open("/proc/sys/vm/max_map_count").read())
held = mmap.mmap(-1, page * (most + 2))
call = ctypes.CDLL(None, use_errno=True).mprotect
call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
begin = ctypes.addressof(ctypes.c_char.from_buffer(held))
left = lambda: most - open("/proc/self/maps", "rb").read().count(b"\\n")
place = 1
for _ in range(3):
    for _ in range(max(0, left() - %d) // 2):
        assert call(begin + place * page, page, 1) == 0
        place += 2
"""


@contextmanager
def program(*before: str) -> "Iterator[subprocess.Popen[str]]":
    """A program at work, which must end as it would have ended without us."""
    command = [sys.executable, "-c", WORK % "\n".join(before)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, env=environment(), text=True, **pipes)  # type: ignore[call-overload]
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
        assert (process.communicate("end\n"), process.returncode) == (("right\n", ""), 0)
    finally:
        process.kill()
        process.communicate()


def trace(daemon: Daemon, pid: int, folder: Path, *options: str) -> Result:
    arguments = ("trace", "--pid", str(pid), "--duration", "300ms", "--output-dir", str(folder), "-o", "json")
    return run_process((*arguments, *options), daemon.client_environ())


class Used:
    """What a process has of each budget: the most since it began, beyond what it had then."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")
        self._before: dict[str, int] = {}
        for _ in range(20):  # the program's own threads come and go
            self._before = self._now(self._before)
        self.most, self._ended = self._before, threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _now(self, most: dict[str, int]) -> dict[str, int]:
        before = self._buffers()
        status = dict(line.split(":", 1) for line in (self._folder / "status").read_text().splitlines() if ":" in line)
        kib = {name: int(status[name].split()[0]) << 10 for name in ("VmSize", "VmData", "RssAnon", "VmLck")}
        buffers = max(before, self._buffers())  # they come and go in between
        now = {
            "descriptors": len(list((self._folder / "fd").iterdir())),
            "mappings": (self._folder / "maps").read_bytes().count(b"\n"),
            "memory": kib["RssAnon"],
            "address space": kib["VmSize"] - buffers,
            "data segments": kib["VmData"],
            "locked memory": max(0, kib["VmLck"] - buffers),
            "threads": int(status["Threads"]),
        }
        return {name: max(value, most.get(name, 0)) for name, value in now.items()}

    def _buffers(self) -> int:
        lines = (line for line in (self._folder / "maps").read_text().splitlines() if "memfd:kineto" in line)
        return sum(
            int(end, 16) - int(begin, 16) for begin, _, end in (each.split()[0].partition("-") for each in lines)
        )

    def _watch(self) -> None:
        while not self._ended.is_set():
            self.most = self._now(self.most)

    def __enter__(self) -> "Used":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def taken(self) -> dict[str, int]:
        return {name: value - self._before[name] for name, value in self.most.items()}


def needed(pid: int, *, locked: bool) -> dict[str, int]:
    """The table's figures, by what `Used` calls them."""
    found = {}
    for row in BUDGETS:
        what = row.what.partition(",")[0].removeprefix(" of ")
        found[what or row.check] = row.needed(stack_bytes(pid), attached=False, locked=locked)
    return found


@pytest.mark.parametrize(
    "before",
    [
        pytest.param((), id="plain"),
        pytest.param((LOCK,), id="locked"),
        pytest.param((TORCH,), id="torch", marks=pytest.mark.torch),
        pytest.param((TORCH, LOCK), id="both", marks=pytest.mark.torch),
    ],
)
def test_the_table_asks_for_what_an_attach_takes(daemon: Daemon, tmp_path: Path, before: tuple[str, ...]) -> None:
    with program(*before) as process, Used(process.pid) as used:
        for options in ((), ("--with-stack=trace",)):
            result = trace(daemon, process.pid, tmp_path, *options)
            assert result.code == 0, result.stderr
        table = needed(process.pid, locked=LOCK in before)
    taken = used.taken()
    for name, size in taken.items():
        if name == "locked memory" and LOCK not in before:
            continue
        assert size <= table[name], (name, taken)
        if not before or before == (LOCK,):  # others have some of it already, or more to take
            assert table[name] <= MOST_TIMES * size, (name, taken)


@pytest.mark.parametrize("left", [40, 160])
def test_a_program_near_its_limit_of_mappings_lives(daemon: Daemon, tmp_path: Path, left: int) -> None:
    with program(FULL % left) as process:
        for _ in range(TRACES):
            result = trace(daemon, process.pid, tmp_path)
            assert (result.code == 0) == (left > 150), result.stderr
            if left < 150:
                assert "ATTACH_LIMIT" in result.stderr
                assert "mappings left within the host's vm.max_map_count" in result.stderr


@pytest.mark.parametrize("left", [48, 160])
def test_a_program_that_locks_its_memory_is_not_killed(daemon: Daemon, tmp_path: Path, left: int) -> None:
    with program(LOCK) as process, real_group("memory", f"kineto-locked-{process.pid}") as group:
        group.add(process.pid)
        group.write("memory.limit_in_bytes", group.number("memory.usage_in_bytes") + left * MIB)
        results = [trace(daemon, process.pid, tmp_path) for _ in range(TRACES)]
        assert all(result.code == 0 or "ATTACH_LIMIT" in result.stderr for result in results)
        assert (results[0].code == 0) == (left > 96), results[0].stderr
