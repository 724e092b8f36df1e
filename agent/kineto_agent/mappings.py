"""The text of /proc/self/maps, without waiting for the GIL at every page of it.

The kernel gives at most one page of it at a time. Python gives the GIL up for each and may wait 5 ms to have it again:
0.2 s for the 300 KB of a PyTorch process whose main thread is busy. So the pages are read by a call that keeps the GIL,
each in some 20 us, and it is given up once in a while.
"""

import os
import sys
from typing import Any, List

_PAGE_BYTES = 4096
_READS_AT_A_TIME = 32  # under a millisecond with the GIL


def read(path: str = "/proc/self/maps") -> bytes:
    """The whole of it. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        keeping = _reader_that_keeps_the_gil()
        pieces: List[bytes] = []
        while True:
            at_a_time = _READS_AT_A_TIME if keeping is not None else 0
            piece = b"".join(keeping(descriptor) for _ in range(at_a_time)) or os.read(descriptor, _PAGE_BYTES)
            if not piece:
                return b"".join(pieces)
            pieces.append(piece)
    finally:
        os.close(descriptor)


def _reader_that_keeps_the_gil() -> Any:
    """None where ctypes has not been imported: then the process is small, and it would cost more than it saves."""
    if "ctypes" not in sys.modules:
        return None
    import ctypes

    library_read = ctypes.PyDLL(None).read
    library_read.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
    library_read.restype = ctypes.c_ssize_t
    page = ctypes.create_string_buffer(_PAGE_BYTES)

    def read_page(descriptor: int) -> bytes:
        size = library_read(descriptor, page, _PAGE_BYTES)
        return page.raw[: max(size, 0)]

    return read_page
