"""Descriptors in a foreign process: the program may close numbers that it did not open, and use them anew."""

import os
from time import perf_counter
from typing import Tuple

Identity = Tuple[int, int]
NOBODY: Identity = (0, 0)
_SHORT_S = 0.0001  # without a wait for the GIL
_MOST_LOOKS = 50


def identity(descriptor: int) -> Identity:
    """Device and inode of what the number names now; NOBODY if it is closed.

    A look gives the GIL away, and comes back 5 ms later if the program takes it: by then it may be past. So it is
    repeated until one was short.
    """
    for _ in range(_MOST_LOOKS):
        began = perf_counter()
        try:
            status = os.fstat(descriptor)
        except OSError:
            return NOBODY
        if perf_counter() - began < _SHORT_S:
            break
    return (status.st_dev, status.st_ino)


def close_ours(descriptor: int, ours: Identity) -> None:
    """Close the number if it still names what it named for us."""
    if identity(descriptor) == ours:
        os.close(descriptor)
