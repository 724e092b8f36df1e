"""The text of /proc/self/maps, without waiting for the GIL at every page of it.

The kernel gives at most one page of it at a time. Python gives the GIL up for each and may wait 5 ms to have it again:
0.2 s for the 300 KB of a PyTorch process whose main thread is busy. So the pages are read by a call that keeps the GIL,
each in some 20 us, and it is given up once in a while.
"""

from typing import List

from kineto_agent.system.descriptors import close_ours, identity, open_kept, read_on

_PAGE_BYTES = 4096
_READS_AT_A_TIME = 32  # under a millisecond with the GIL


def read(path: str = "/proc/self/maps") -> bytes:
    """The whole of it. Raises OSError."""
    descriptor = open_kept(path)
    ours = identity(descriptor)
    pieces: List[bytes] = []
    try:
        while not pieces or pieces[-1]:
            pieces += read_on(descriptor, ours, _READS_AT_A_TIME, _PAGE_BYTES)
    finally:
        close_ours(descriptor, ours)
    return b"".join(pieces)
