"""A file system on which one file can be opened and never be read, as on a server that does not answer.

It speaks the kernel's protocol for FUSE (linux/fuse.h) itself, in a thread that answers all but FUSE_READ.
"""

import contextlib
import ctypes
import errno
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

DEVICE = "/dev/fuse"
_LIBC = ctypes.CDLL(None, use_errno=True)
_MNT_DETACH = 2
_REQUEST = struct.Struct("=IIQQ16x")  # fuse_in_header: len, opcode, unique, nodeid
_REPLY = struct.Struct("=IiQ")  # fuse_out_header: len, error, unique
_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _RELEASE, _INIT, _INTERRUPT, _BATCH_FORGET = 1, 2, 3, 14, 15, 18, 26, 36, 42
_UNANSWERED = {_READ, _FORGET, _BATCH_FORGET, _INTERRUPT}
_ROOT, _FILE = 1, 2  # numbers of nodes
_MAX_REQUEST_BYTES = 1 << 18
_FILE_BYTES = 1 << 16
_ASYNC_READ = 1


def _attributes(node: int) -> bytes:
    """fuse_attr of the folder or of the file; both are root's, and all may read them."""
    mode = 0o040755 if node == _ROOT else 0o100644
    return struct.pack("=QQQ36xIIIIIII", node, _FILE_BYTES, 128, mode, 1, 0, 0, 0, 4096, 0)


def _answer(opcode: int, node: int) -> bytes | None:
    """What follows the header; None: there is no such operation."""
    if opcode == _INIT:  # fuse_init_out: who reads waits for the kernel's reading ahead, in state D
        return struct.pack("=IIIIHHIIHHI28x", 7, 31, _FILE_BYTES, _ASYNC_READ, 12, 9, 4096, 1, 0, 0, 0)
    if opcode == _LOOKUP:
        return struct.pack("=QQQQII", _FILE, 0, 60, 60, 0, 0) + _attributes(_FILE)
    if opcode == _GETATTR:
        return struct.pack("=QII", 60, 0, 0) + _attributes(node)
    return {_OPEN: bytes(16), _RELEASE: b""}.get(opcode)


def _serve(device: int) -> None:
    with contextlib.suppress(OSError):  # it has been unmounted
        while True:
            _, opcode, unique, node = _REQUEST.unpack_from(os.read(device, _MAX_REQUEST_BYTES))
            if opcode not in _UNANSWERED:
                body = _answer(opcode, node)
                head = _REPLY.pack(_REPLY.size + len(body or b""), 0 if body is not None else -errno.ENOSYS, unique)
                os.write(device, head + (body or b""))


@contextlib.contextmanager
def silent_file(folder: Path) -> Iterator[Path]:
    """A file that is never read, in a file system of its own; skips the test where none can be mounted."""
    try:
        device = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except OSError as exc:
        pytest.skip(f"no FUSE here: {exc}")
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    if _LIBC.mount(b"silent", os.fsencode(folder), b"fuse", 0, options.encode()):
        os.close(device)
        pytest.skip(f"FUSE may not be mounted here: {os.strerror(ctypes.get_errno())}")
    server = threading.Thread(target=_serve, args=(device,), daemon=True)
    server.start()
    try:
        yield folder / "never"
    finally:
        _LIBC.umount2(os.fsencode(folder), _MNT_DETACH)
        server.join()
        os.close(device)
