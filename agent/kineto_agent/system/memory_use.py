"""The memory of this process: how much it is, and giving back what malloc keeps."""

import contextlib
import os

from kineto_agent.system.c_functions import PROGRAM, FunctionWithoutGil, Long, symbol_address

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Resident memory of this process; 0 where /proc does not say."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0


def give_memory_back() -> None:
    """Return malloc's free memory: what it keeps of an ended session would hide how much the next one takes."""
    with contextlib.suppress(AttributeError):
        FunctionWithoutGil(symbol_address(PROGRAM, "malloc_trim"))(Long(0))
