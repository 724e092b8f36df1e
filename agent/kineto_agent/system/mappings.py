"""Reads /proc/self/maps without waiting for the GIL at every page.

The kernel returns at most one page at a time. Python releases the GIL for each read and may wait 5 ms to get it back:
0.2 s for the 300 KB of a PyTorch process whose main thread is busy. So the pages are read by a call that keeps the GIL,
about 20 us each, and the GIL is released from time to time.
"""

import os
from typing import List

from kineto_agent.system.descriptors import close_ours, identity, open_kept, read_on

_PAGE_BYTES = 4096
_READS_AT_A_TIME = 32  # under a millisecond with the GIL


def read(path: str = "/proc/self/maps") -> bytes:
    """The whole text. Raises OSError."""
    descriptor = open_kept(path)
    ours = identity(descriptor)
    pieces: List[bytes] = []
    try:
        while not pieces or pieces[-1]:
            pieces += read_on(descriptor, ours, _READS_AT_A_TIME, _PAGE_BYTES)
    finally:
        close_ours(descriptor, ours)
    return b"".join(pieces)


def mapped_files(stem: str, maps: str = "/proc/self/maps") -> List[str]:
    """Paths of the mapped files whose name begins with `stem` (such as "libcupti.so"), each once, in order."""
    found: List[str] = []
    needle = b"/" + stem.encode()
    try:
        content = read(maps)
    except OSError:
        return found
    if needle not in content:
        return found
    for line in content.split(b"\n"):  # a path may contain \r, at which bytes.splitlines() would split
        if needle not in line:
            continue
        path = os.fsdecode(line[line.index(b"/") :])
        if path.endswith(" (deleted)"):
            path = path[: -len(" (deleted)")]
        if os.path.basename(path).startswith(stem) and path not in found:
            found.append(path)
    return found
