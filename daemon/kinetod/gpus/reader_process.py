"""`python -m kinetod.gpus.reader_process [--no-activity]`: answers each byte on its standard input, a GpuQuestion, with
one line, a Snapshot as JSON. In between it counts the activity of the GPUs' units every SAMPLE_S, unless disabled.

Ends with its standard input, or after IDLE_S without a question: then the devices are free again, for a reset or
another driver.
"""

import argparse
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence

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
SAMPLE_S = 1.0
REOPEN_S = 30.0  # how long to leave a failed library alone


class OpenLibrary:
    """A library that is opened when it is first read, and again after a failure.

    sample: regular work while it is open.
    """

    def __init__(self, library: GpuLibrary, *, sample: Callable[[], None] = lambda: None) -> None:
        self._library = library
        self._sample = sample
        self._version: str | None = None
        self._failure: LibraryError | None = None
        self._failed_at = 0.0

    def read(self, question: GpuQuestion = GpuQuestion.EVERYTHING) -> tuple[list[GpuState], VendorLibrary]:
        """Returns the GPUs and the state of the library."""
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

    def sample(self) -> None:
        """Does the library's regular work, if it is open."""
        if self._version is not None:
            self._sample()

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
    """Each GPU once: if two libraries list it, the later one's values fill gaps of the earlier one's.

    Number, device file and processes come from the kernel's drivers, which are read last, and so does the UUID of AMD's
    GPUs, which counters and captures use.
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
        gpu,
        **missing,
        uuid=kernel.uuid if gpu.vendor == "amd" else gpu.uuid,  # AMD SMI has a different one
        index=kernel.index,
        device=kernel.device,
        processes=kernel.processes or gpu.processes,
    )


def libraries(*, activity: bool = True) -> list[OpenLibrary]:
    """All libraries of this version, the kernel's drivers last. activity: whether to count the activity of the GPUs'
    units.
    """
    nvml = Nvml(activity=activity)
    others: tuple[GpuLibrary, ...] = (AmdSmi(), IntelSysman(), DrmGpus())
    return [OpenLibrary(nvml, sample=nvml.sample), *(OpenLibrary(library) for library in others)]


def _question(opened: Sequence[OpenLibrary]) -> bytes:
    """Waits for a question, taking samples in between; empty if none comes."""
    end = time.monotonic() + IDLE_S
    while (left := end - time.monotonic()) > 0:
        if select.select([0], [], [], min(left, SAMPLE_S))[0]:
            return os.read(0, 1)
        for library in opened:
            library.sample()
    return b""


def main(*, activity: bool = True) -> int:
    """Serves until it is idle. activity: whether to count the activity of the GPUs' units."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the daemon
    opened = libraries(activity=activity)
    while asked := _question(opened):
        sys.stdout.buffer.write(msgspec.json.encode(snapshot(opened, GpuQuestion(asked.decode()))) + b"\n")
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--no-activity", action="store_true")
    sys.exit(main(activity=not parser.parse_args().no_activity))
