"""Values that describe the GPUs of this host at one moment, and the interface of libraries that read them.

Theory of operation
    gpu_reader.py (in the daemon)   asks the process for a snapshot, with a deadline; shares fresh ones
    reader_process.py (the process)    asks each vendor's library in turn and answers one line of JSON
    a library                   one file per vendor: nvml.py, amd.py, intel.py; and the kernel's drivers: drm.py

    A vendor's library may hang in the driver, crash, or hold the devices open; so it is loaded in that process only,
    which is started on demand and ends when idle.
"""

from enum import StrEnum
from typing import Protocol

import msgspec

SHARES = (
    "graphics_active",
    "sm_active",
    "sm_occupancy",
    "tensor_active",
    "dram_active",
    "fp64_active",
    "fp32_active",
    "fp16_active",
)
BYTES = ("pcie_transmit", "pcie_receive", "nvlink_transmit", "nvlink_receive")
NAMES = (*SHARES, *BYTES)


# Activity of a GPU's units as totals that only grow, and their differences between two readings. Pure. Theory of
# operation Several clients read the same GPU at their own intervals: a scraper every 15 s, `kinetoctl top` every 2 s,
# lines of JSON every 10 s. So there are totals since a beginning, as for NVLinks and energy, and each client compares
# two of them: no interval shortens another, and nothing in between is missed. A share is counted as seconds of the
# whole GPU: 0.25 s are a quarter of the multiprocessors for a second, or all of them for 0.25 s. Totals can be compared
# only if they have the same beginning (`since_ns`). Counting restarts after any failure, so that a difference never
# spans a time without counting.
class GpuActivity(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of one GPU.

    totals: by NAMES, in seconds of the whole GPU for SHARES, in bytes for BYTES; without those that the GPU does not
    count.
    """

    since_ns: int  # monotonic; the beginning of the totals
    seconds: float = 0.0  # seconds observed since then
    totals: dict[str, float] = {}


def between(before: GpuActivity | None, now: GpuActivity | None) -> dict[str, float]:
    """Shares, 0 to 1, and bytes per second between two readings, by NAMES.

    Empty if a reading is missing, they have different beginnings, or nothing was observed in between.
    """
    if before is None or now is None or before.since_ns != now.since_ns or now.seconds <= before.seconds:
        return {}
    seconds = now.seconds - before.seconds
    rates = {name: (total - before.totals.get(name, 0.0)) / seconds for name, total in now.totals.items()}
    return {name: min(max(rate, 0.0), 1.0) if name in SHARES else max(rate, 0.0) for name, rate in rates.items()}


class GpuQuestion(StrEnum):
    """A question to the reader process: one byte."""

    EVERYTHING = "?"
    PROCESSES = "p"  # only the processes on each GPU: otherwise NVML measures PCIe for 40 ms on each GPU


class LibraryState(StrEnum):
    """State of a vendor's library."""

    OK = "ok"
    ABSENT = "absent"  # it, or its Python binding, is not installed
    FAILED = "failed"  # it is installed, but does not work
    LATE = "late"  # it did not answer in time


class VendorLibrary(msgspec.Struct, frozen=True, kw_only=True):
    """Result of querying a vendor's library."""

    name: str  # "nvml", "amdsmi", "sysman"; "drm": the kernel's drivers for AMD and Intel
    state: LibraryState
    detail: str = ""  # for people, empty when OK
    driver_version: str = ""
    seconds: float = 0.0  # duration of the query


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process on a GPU. None: not reported by the driver."""

    pid: int  # in this PID namespace
    memory_bytes: int | None = None
    utilization: float | None = None  # of the multiprocessors, 0 to 1


class GpuState(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU. None: it lacks that value, or the driver does not report it. Ratios are 0 to 1; counters only grow."""

    vendor: str  # "nvidia", "amd", "intel"
    index: int
    uuid: str
    name: str
    pci_bus_id: str = ""
    device: str = ""  # "nvidia0" in /dev, or "renderD128" in /dev/dri
    works: bool = True  # False: it has fallen off the bus or must be reset; nothing else is known about it
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    utilization: float | None = None
    memory_utilization: float | None = None  # share of time in which memory was read or written
    power_watts: float | None = None
    power_limit_watts: float | None = None
    energy_joules: float | None = None  # a counter
    temperature_celsius: float | None = None
    memory_temperature_celsius: float | None = None
    sm_clock_hertz: float | None = None
    memory_clock_hertz: float | None = None
    pcie_transmit_bytes_per_second: float | None = None
    pcie_receive_bytes_per_second: float | None = None
    nvlink_transmit_bytes: int | None = None  # a counter
    nvlink_receive_bytes: int | None = None  # a counter
    ecc_corrected: int | None = None  # a counter
    ecc_uncorrected: int | None = None  # a counter
    xid_errors: dict[int, int] = {}  # Xid -> number of occurrences since the library was loaded
    activity: GpuActivity | None = None  # None: not counted, for the reason in activity_note
    activity_note: str = ""
    processes: tuple[GpuProcess, ...] = ()


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All GPUs of all libraries."""

    gpus: tuple[GpuState, ...] = ()
    libraries: tuple[VendorLibrary, ...] = ()
    time_ns: int = 0  # Unix; 0: nothing was read
    monotonic_ns: int = 0  # the same moment on a clock that is never set, for rates


class LibraryError(Exception):
    """A vendor's library cannot be used: not installed (`state` ABSENT) or broken."""

    def __init__(self, state: LibraryState, detail: str) -> None:
        super().__init__(detail)
        self.state = state
        self.detail = detail


class GpuLibrary(Protocol):
    """A vendor's library. Blocking; used in the process of reader_process.py only."""

    name: str

    def open(self) -> str:
        """Loads it and returns the driver's version. Raises LibraryError."""

    def read(self) -> list[GpuState]:
        """The current state of every GPU. Raises LibraryError if the library fails; it is then opened anew."""

    def read_processes(self) -> list[GpuState]:
        """Every GPU with identity and processes only; none if the library does not report them. Raises like `read`."""

    def close(self) -> None:
        """Releases the devices. Raises nothing."""
