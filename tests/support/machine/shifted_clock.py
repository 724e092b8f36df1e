"""A wall clock that a test sets, for the processes of one host: their libc's, not this machine's."""

import ctypes
import mmap
import os
from pathlib import Path

from support.machine.native import FAKES, build


class ShiftedClock:
    """Seconds that processes started with `environ` see added to CLOCK_REALTIME, from now on."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "shifted-clock"
        self._path.write_bytes(bytes(mmap.PAGESIZE))
        descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        self._map = mmap.mmap(descriptor, mmap.PAGESIZE)
        os.close(descriptor)
        self._seconds = ctypes.c_int64.from_buffer(self._map)

    def environ(self) -> dict[str, str]:
        """Variables that make processes use this clock."""
        library = build("shifted_clock.so", [FAKES / "shifted_clock.c"], ("-shared", "-fPIC", "-O2"))
        return {"LD_PRELOAD": str(library), "SHIFTED_CLOCK": str(self._path)}

    def set_forward(self, seconds: int) -> None:
        """Shift the clock from the machine's own time by that much; back if it is negative."""
        self._seconds.value = seconds
