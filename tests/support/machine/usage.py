"""What a process and its children use: CPU time, memory."""

import contextlib
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

PROC = Path("/proc")
SAMPLE_PERIOD_S = 0.5


def cpu_ns(pid: int) -> int:
    """CPU time of all threads of a process, ended ones included; 0 if the process has ended."""
    with contextlib.suppress(OSError):
        return time.clock_gettime_ns(~pid << 3 | 2)  # the kernel's number of the process's CPU clock
    return 0


def children(pid: int) -> list[int]:
    """Children of all threads of a process."""
    found = []
    for path in (PROC / str(pid) / "task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(text) for text in path.read_text().split()]
    return found


def _kb(pid: int, file: str, field: str) -> int:
    """A field in KiB, as bytes; 0 if the process has ended."""
    with contextlib.suppress(OSError):
        for line in (PROC / str(pid) / file).read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return 0


def rss_bytes(pid: int) -> int:
    """Resident memory of a process now."""
    return _kb(pid, "status", "VmRSS")


def peak_rss_bytes(pid: int) -> int:
    """The most that was ever resident."""
    return _kb(pid, "status", "VmHWM")


def pss_bytes(pid: int) -> int:
    """Proportional set size of a process now: what n processes share counts 1/n."""
    return _kb(pid, "smaps_rollup", "Pss")


class Sampler:
    """Looks at a process's children, and at all together, every SAMPLE_PERIOD_S."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler")
        self.workers_rss_peak = 0
        self.pss_peak = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(SAMPLE_PERIOD_S):
            others = children(self._pid)
            self.workers_rss_peak = max(self.workers_rss_peak, sum(map(rss_bytes, others)))
            self.pss_peak = max(self.pss_peak, sum(map(pss_bytes, [self._pid, *others])))
