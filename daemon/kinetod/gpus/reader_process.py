"""`python -m kinetod.gpus.reader_process`: answers each byte on its standard input, a Question, with one line, a
Snapshot as JSON.

Ends when its standard input does, and when nobody has asked for IDLE_S: then the devices are free again, for a
reset or another driver.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Sequence

import msgspec

from kinetod.gpus.amd import AmdSmi
from kinetod.gpus.drm import DrmGpus
from kinetod.gpus.gpu_types import (
    GpuLibrary,
    GpuQuestion,
    GpuState,
    LibraryError,
    LibraryState,
    Snapshot,
    VendorLibrary,
)
from kinetod.gpus.intel import IntelSysman
from kinetod.gpus.nvml import Nvml

IDLE_S = 120.0  # longer than most scrape periods
REOPEN_S = 30.0  # how long a library that failed is left alone


class OpenLibrary:
    """A library that is opened when it is first read, and again after it failed."""

    def __init__(self, library: GpuLibrary) -> None:
        self._library = library
        self._version: str | None = None
        self._failure: LibraryError | None = None
        self._failed_at = 0.0

    def read(self, question: GpuQuestion = GpuQuestion.EVERYTHING) -> tuple[list[GpuState], VendorLibrary]:
        """The GPUs, and how it stands with the library."""
        began = time.monotonic()
        gpus: list[GpuState] = []
        try:
            gpus = self._read(began, question)
            state, detail = LibraryState.OK, ""
        except LibraryError as exc:
            state, detail = exc.state, exc.detail
        took = time.monotonic() - began
        return gpus, VendorLibrary(
            name=self._library.name, state=state, detail=detail, driver_version=self._version or "", seconds=took
        )

    def _read(self, now: float, question: GpuQuestion) -> list[GpuState]:
        if self._failure is not None and now - self._failed_at < REOPEN_S:
            raise self._failure
        try:
            if self._version is None:
                self._version = self._library.open()
            self._failure = None
            return self._library.read() if question is GpuQuestion.EVERYTHING else self._library.read_processes()
        except LibraryError as exc:
            if self._version is not None:
                self._library.close()
            self._version, self._failure, self._failed_at = None, exc, now
            raise


def snapshot(opened: Sequence[OpenLibrary], question: GpuQuestion) -> Snapshot:
    """A snapshot of all GPUs."""
    answers = [library.read(question) for library in opened]
    return Snapshot(
        gpus=joined([gpu for gpus, _ in answers for gpu in gpus]),
        libraries=tuple(library for _, library in answers),
        time_ns=time.time_ns(),
        monotonic_ns=time.monotonic_ns(),
    )


def joined(gpus: Sequence[GpuState]) -> tuple[GpuState, ...]:
    """Each GPU once: of those that two libraries have, the later one's values where the earlier one tells none.

    Number, device file and processes are those of the kernel's drivers, which are read last.
    """
    found: dict[tuple[str, str], GpuState] = {}
    for place, gpu in enumerate(gpus):
        key = (gpu.vendor, gpu.pci_bus_id or f"#{place}")
        known = found.get(key)
        found[key] = gpu if known is None else _completed(known, gpu)
    return tuple(found.values())


def _completed(gpu: GpuState, kernel: GpuState) -> GpuState:
    missing = {name: getattr(kernel, name) for name in gpu.__struct_fields__ if getattr(gpu, name) is None}
    return msgspec.structs.replace(
        gpu, **missing, index=kernel.index, device=kernel.device, processes=kernel.processes or gpu.processes
    )


def libraries() -> list[OpenLibrary]:
    """All that this version knows, the kernel's drivers last."""
    return [OpenLibrary(library) for library in (Nvml(), AmdSmi(), IntelSysman(), DrmGpus())]


def main() -> int:
    """Serves until nobody asks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the daemon
    opened = libraries()
    while select.select([0], [], [], IDLE_S)[0] and (asked := os.read(0, 1)):
        sys.stdout.buffer.write(msgspec.json.encode(snapshot(opened, GpuQuestion(asked.decode()))) + b"\n")
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
