"""The GPUs of this host at one moment, as values, and what reads them.

Theory of operation
    gpu_reader.py (in the daemon)   asks the process for a snapshot, with a deadline; everybody shares a fresh one
    reader_process.py (the process)    asks each vendor's library in turn and answers one line of JSON
    a library                   one file per vendor: nvml.py, amd.py, intel.py; and the kernel's drivers: drm.py
    nvml_gpm.py                 counts what the units of an NVIDIA GPU do; gpu_activity.py has the totals

    A vendor's library may hang in the driver, crash, or hold the devices open; so it is loaded in that process only,
    which is started when somebody asks and ends when nobody has asked for a while.
"""

from enum import StrEnum
from typing import Protocol

import msgspec

from kinetod.gpus.gpu_activity import GpuActivity


class GpuQuestion(StrEnum):
    """A question to the reader process: one byte."""

    EVERYTHING = "?"
    PROCESSES = "p"  # only which are on which GPU: NVML alone measures PCIe for 40 ms of each GPU otherwise


class LibraryState(StrEnum):
    """How it stands with a vendor's library."""

    OK = "ok"
    ABSENT = "absent"  # it, or its Python binding, is not installed
    FAILED = "failed"  # it is there, but does not work
    LATE = "late"  # it did not answer in time


class VendorLibrary(msgspec.Struct, frozen=True, kw_only=True):
    """A vendor's library as it was asked."""

    name: str  # "nvml", "amdsmi", "sysman"; "drm": the kernel's drivers for AMD and Intel
    state: LibraryState
    detail: str = ""  # for people, empty when OK
    driver_version: str = ""
    seconds: float = 0.0  # what asking took


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process on a GPU. None: the driver does not tell."""

    pid: int  # in this PID namespace
    memory_bytes: int | None = None
    utilization: float | None = None  # of the multiprocessors, 0 to 1


class GpuState(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU. None: it does not have that, or the driver does not tell. Ratios are 0 to 1; counters only grow."""

    vendor: str  # "nvidia", "amd", "intel"
    index: int
    uuid: str
    name: str
    pci_bus_id: str = ""
    device: str = ""  # "nvidia0", which lies in /dev, or "renderD128" in /dev/dri
    works: bool = True  # False: it has fallen off the bus or must be reset; nothing else is known of it
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    utilization: float | None = None
    memory_utilization: float | None = None  # time in which memory was read or written
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
    xid_errors: dict[int, int] = {}  # Xid -> how often since the library was loaded
    activity: GpuActivity | None = None  # None, with the reason in activity_note: its units are not counted
    activity_note: str = ""
    processes: tuple[GpuProcess, ...] = ()


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All GPUs by all libraries."""

    gpus: tuple[GpuState, ...] = ()
    libraries: tuple[VendorLibrary, ...] = ()
    time_ns: int = 0  # Unix; 0: nothing was read
    monotonic_ns: int = 0  # the same moment by a clock that nobody sets, for rates


class LibraryError(Exception):
    """A vendor's library cannot be used: not installed (`state` ABSENT) or out of order."""

    def __init__(self, state: LibraryState, detail: str) -> None:
        super().__init__(detail)
        self.state = state
        self.detail = detail


class GpuLibrary(Protocol):
    """A vendor's library. Blocking; used in the process of reader_process.py only."""

    name: str

    def open(self) -> str:
        """Loads it; the driver's version. Raises LibraryError."""

    def read(self) -> list[GpuState]:
        """Every GPU now. Raises LibraryError if the library does not work any more; it is then opened anew."""

    def read_processes(self) -> list[GpuState]:
        """Every GPU with its identity and processes only; none if the library does not tell. Raises as `read` does."""

    def close(self) -> None:
        """Lets go of the devices. Raises nothing."""
