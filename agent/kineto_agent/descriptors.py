"""Descriptors in a foreign process: the program may close numbers that it did not open, and use them anew."""

import os
from typing import Tuple

Identity = Tuple[int, int]
NOBODY: Identity = (0, 0)


def identity(descriptor: int) -> Identity:
    """Device and inode of what the number names now; NOBODY if it is closed."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return NOBODY
    return (status.st_dev, status.st_ino)


def close_ours(descriptor: int, ours: Identity) -> None:
    """Close the number if it still names what it named for us."""
    if identity(descriptor) == ours:
        os.close(descriptor)
