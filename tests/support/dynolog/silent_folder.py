"""A folder on a file system that never answers, as one whose server is gone. Needs root and /dev/fuse."""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

_MNT_DETACH = 2


@contextlib.contextmanager
def silent_folder(path: Path) -> Iterator[None]:
    """Mounts it there for the block: whoever looks for something in it waits until killed. Skips without FUSE."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        server = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as exc:
        pytest.skip(f"no FUSE here: {exc}")
    options = f"fd={server},rootmode=40777,user_id=0,group_id=0,allow_other".encode()
    if libc.mount(b"silent", os.fsencode(path), b"fuse", 0, options):
        os.close(server)
        pytest.skip(f"FUSE cannot be mounted here: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        libc.umount2(os.fsencode(path), _MNT_DETACH)
        os.close(server)
