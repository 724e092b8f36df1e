"""Recording with the real collector and the fake CUDA in the test's own process."""

from __future__ import annotations  # the agent's tests run under 3.9

import ctypes
import functools
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kineto_agent.sources import collector_library, native_interface
from kineto_agent.sources.cupti.activity_kinds import KINDS
from kineto_agent.sources.cupti.collector_binding import Collector
from kineto_agent.sources.cupti.gpu_activities import CuptiSession, CuptiSource
from kineto_agent.sources.interface import SourceRequest
from kineto_agent.system import env

from support.agent.arenas import ArenaReader
from support.machine.native import FakeCuda

MIB = 1 << 20
LONG_MS = 60_000  # a limit for the detach that `calling` meets on any machine
MARK = "kineto-cupti-stays-"  # agent/native/cupti/detach_safety.c
# A name that CuptiSource does not find by itself, so that other tests in the process are not affected.
_FAKE_NAME = "fake-cupti-in-process.so"
_FAULTS = (
    "subscribe_result", "refuse_kind", "refuse_result", "drop_next", "extra_kernel_bytes", "one_wide_kernel",
    "hold_a_buffer", "names_result", "flush_delay_ms", "enable_delay_ms", "finalize_result", "drop_at_finalize",
    "finalize_delay_ms", "subscribe_delay_ms", "return_at_finalize", "graph_recorded", "newer_than_driver",
    "per_thread",
)  # fmt: skip


@functools.cache
def _loaded() -> FakeCuda:
    return FakeCuda(_FAKE_NAME)


def _unmap_marks() -> None:
    libc = ctypes.CDLL(None)
    libc.munmap.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
    for line in Path("/proc/self/maps").read_text().splitlines():
        if MARK in line:
            begin, end = (int(address, 16) for address in line.split()[0].split("-"))
            libc.munmap(begin, end - begin)


def another_collector() -> None:
    """Make later recordings use another copy of the library, which knows nothing of what the first one did."""
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copy(collector_library.INSTALLED, str(Path(folder) / "collector.so"))
        native_interface._loaded[Collector] = Collector(copy)


def fake_cuda(**faults: int) -> FakeCuda:
    """The process's fake CUDA with exactly these faults; version 130001 unless one is given.

    CUPTI may have to stay attached for the life of a process: all that says so is forgotten.
    """
    cuda = _loaded()
    cuda.forget_users()
    _unmap_marks()
    another_collector()
    for key in _FAULTS:
        cuda.set(key, 0)
    cuda.set("version", 130001)
    for key, value in faults.items():
        cuda.set(key, value)
    return cuda


def source(detach_limit_ms: int = 20, maps: str = "/proc/self/maps") -> CuptiSource:
    """A source that uses the fake."""
    return CuptiSource({env.CUPTI_LIBRARY: str(_loaded().path)}, maps, detach_limit_ms)


def maps_with(folder: Path, *libraries: str) -> str:
    """A maps file that names these libraries."""
    path = folder / "maps"
    lines = [f"7f000000{n}000-7f000000{n}fff r-xp 0 00:00 0 /x/{name}\n" for n, name in enumerate(libraries)]
    path.write_text("".join(lines))
    return str(path)


def request(
    types: Sequence[str] = tuple(KINDS),
    *,
    limit_bytes: int = 64 * MIB,
    options: dict[str, Any] | None = None,
    named: bool = True,
) -> SourceRequest:
    """A request to record these activities."""
    return SourceRequest(frozenset(types), limit_bytes, options or {}, named)


@contextmanager
def recording(
    types: Sequence[str] = tuple(KINDS),
    *,
    limit_bytes: int = 64 * MIB,
    options: dict[str, Any] | None = None,
    detach_limit_ms: int = 20,
    named: bool = True,
    maps: str = "/proc/self/maps",
) -> Iterator[tuple[CuptiSession, ArenaReader]]:
    """A started session and a daemon's view of its arena; closed in any case."""
    wanted = request(types, limit_bytes=limit_bytes, options=options, named=named)
    session = source(detach_limit_ms, maps).prepare(wanted)
    try:
        with ArenaReader(session.arena_fd) as reader:
            session.start()
            yield session, reader
    finally:
        session.close()


def own_warnings(warnings: Sequence[str]) -> list[str]:
    """Those that do not depend on how full the addresses of the test's own process are.

    pyarrow and DuckDB map 2 GiB, and every collector of these tests leaves its stubs near the fake CUPTI.
    """
    return [warning for warning in warnings if "no free addresses left near" not in warning]


@contextmanager
def calling(cuda: FakeCuda) -> Iterator[None]:
    """Make CUDA calls on another thread all the time, so that a detach meets one."""
    ended = threading.Event()

    def call() -> None:
        while not ended.wait(0.0005):
            cuda.memset()

    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
