"""Descriptors in a foreign process: the program may close numbers that it did not open, and reuse them.

Theory of operation
    Python's own functions release the GIL around each system call and may get it back only 5 ms later. By then a number
    may belong to the program: os.pipe() could return two files of the program. So descriptors are created, inspected
    and closed here by system calls that keep the GIL, right after it was acquired: no Python code of the program runs
    in between.

    Long-lived ones are moved to the high end of the present descriptor table (the kernel would take milliseconds to
    enlarge it). The kernel assigns the lowest numbers first, so a program that opens as many as it has closed does not
    reach them, and waiting and reading without the GIL is safe: at worst such a number is closed.
"""

import _ctypes
import errno
import os
import struct
from typing import Any, Iterator, List, NamedTuple, Tuple

from kineto_agent.system.c_functions import Long, program_function

Identity = Tuple[int, int]
NOBODY: Identity = (0, 0)
_AT_FDCWD = -100
_F_DUPFD_CLOEXEC = 1030
_F_GET_SEALS, _F_SEAL_WRITE = 1034, 0x8
_FUTEX_WAKE_PRIVATE = 0x81
_STATUS_BYTES = 144  # struct stat begins with device and inode
_FOLDER_BYTES = 32 * 1024
_ENTRY = struct.Struct("=QqHB")  # struct linux_dirent64 before the name
_STATUS_FILE_BYTES = 4096
_SMALLEST_TABLE = 64
_AT_THE_END = 24  # how many numbers at the end of the table are ours


class _Calls(NamedTuple):
    """Numbers of system calls."""

    read: int
    write: int
    close: int
    fstat: int
    fcntl: int
    openat: int
    pipe2: int
    memfd_create: int
    getdents64: int
    futex: int


_CALLS = _Calls(0, 1, 3, 5, 72, 257, 293, 319, 217, 202)
if os.uname().machine != "x86_64":
    _CALLS = _Calls(63, 64, 57, 80, 25, 56, 59, 279, 61, 98)


_syscall: Any = program_function("syscall")


def _call(number: int, *arguments: Any) -> int:
    """Make a system call with the GIL held. Raises OSError."""
    result: int = _syscall(number, *arguments)
    if result < 0:
        error = _ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


def wake_waiter(address: int) -> None:
    """Wake a thread that waits on a futex for the word there to change. Keeps the GIL."""
    _syscall(_CALLS.futex, Long(address), _FUTEX_WAKE_PRIVATE, 1)


def _begin_turn() -> None:
    """Release the GIL and acquire it again: any other thread now waits 5 ms before it requests it."""
    os.stat("/")


def identity(descriptor: int) -> Identity:
    """Device and inode of the file that the number refers to now; NOBODY if it is closed."""
    status = bytes(_STATUS_BYTES)
    if _syscall(_CALLS.fstat, descriptor, status) != 0:
        return NOBODY
    device, inode = struct.unpack_from("QQ", status)
    return (device, inode)


def close_ours(descriptor: int, ours: Identity) -> None:
    """Close the number if it still refers to our file."""
    _begin_turn()
    _close(descriptor, ours)


def _close(descriptor: int, ours: Identity) -> None:
    if ours != NOBODY and identity(descriptor) == ours:
        _syscall(_CALLS.close, descriptor)


def close_all(ours: Identity) -> None:
    """Close every number that refers to our file."""
    for name in list_folder("/proc/self/fd"):
        _close(int(name), ours)


def _moved(descriptor: int) -> int:
    """Move it to the high end, or leave it if there is no room. Returns its number."""
    ours = identity(descriptor)
    high: int = _syscall(_CALLS.fcntl, descriptor, _F_DUPFD_CLOEXEC, _first_number())
    if high < 0:
        return descriptor
    _close(descriptor, ours)
    return high


def _first_number() -> int:
    try:
        status = read_file("/proc/self/status", _STATUS_FILE_BYTES, begin_turn=False)
    except OSError:  # a container may have no /proc
        return _SMALLEST_TABLE - _AT_THE_END
    size = status.partition(b"FDSize:")[2].split(None, 1)
    return max(int(size[0]), _SMALLEST_TABLE) - _AT_THE_END if size else _SMALLEST_TABLE - _AT_THE_END


def pipe() -> Tuple[int, int]:
    """Like os.pipe2 with O_NONBLOCK and O_CLOEXEC. Raises OSError."""
    _begin_turn()
    numbers = bytes(8)
    _call(_CALLS.pipe2, numbers, os.O_NONBLOCK | os.O_CLOEXEC)
    reader, writer = struct.unpack("ii", numbers)
    return (_moved(reader), _moved(writer))


def memfd(name: str, flags: int) -> int:
    """Like os.memfd_create, which Pythons built against an old C library lack. Raises OSError."""
    _begin_turn()
    return _moved(_call(_CALLS.memfd_create, name.encode(), flags))


def read_file(path: str, most: int, *, begin_turn: bool = True) -> bytes:
    """The first `most` bytes of a file of /proc, in one read. Raises OSError."""
    if begin_turn:
        _begin_turn()
    descriptor = _open(path, os.O_RDONLY)
    ours, data = identity(descriptor), bytes(most)
    try:
        return data[: _call(_CALLS.read, descriptor, data, most)]
    finally:
        _close(descriptor, ours)


def read_on(descriptor: int, ours: Identity, times: int, most: int) -> List[bytes]:
    """The next pieces of one of our files; the last one is empty at the end of the file. Raises OSError."""
    _begin_turn()
    if identity(descriptor) != ours:
        raise OSError(errno.EBADF, "the program closed the agent's descriptor")
    pieces: List[bytes] = []
    while len(pieces) < times and (not pieces or pieces[-1]):
        data = bytes(most)
        pieces.append(data[: _call(_CALLS.read, descriptor, data, most)])
    return pieces


def received_memfd(descriptor: int) -> Identity:
    """The identity of a sealed memfd that was just received; NOBODY if the number refers to something else by now."""
    _begin_turn()
    seals = _syscall(_CALLS.fcntl, descriptor, _F_GET_SEALS)
    return identity(descriptor) if seals >= 0 and seals & _F_SEAL_WRITE else NOBODY


def write_file(path: str, data: bytes) -> None:
    """Write into a file of /proc. Raises OSError."""
    _begin_turn()
    descriptor = _open(path, os.O_WRONLY)
    ours = identity(descriptor)
    try:
        _call(_CALLS.write, descriptor, data, len(data))
    finally:
        _close(descriptor, ours)


def list_folder(path: str) -> List[str]:
    """Like os.listdir. Raises OSError."""
    _begin_turn()
    descriptor = _open(path, os.O_RDONLY | os.O_DIRECTORY)
    ours = identity(descriptor)
    names: List[str] = []
    try:
        while True:
            data = bytes(_FOLDER_BYTES)
            size = _call(_CALLS.getdents64, descriptor, data, _FOLDER_BYTES)
            if not size:
                return names
            names += _names(data[:size])
    finally:
        _close(descriptor, ours)


def _names(entries: bytes) -> Iterator[str]:
    at = 0
    while at < len(entries):
        _inode, _next, length, _kind = _ENTRY.unpack_from(entries, at)
        name = entries[at + _ENTRY.size : at + length].partition(b"\0")[0]
        if name not in (b".", b".."):
            yield os.fsdecode(name)
        at += length


def open_kept(path: str) -> int:
    """Open a file that is read over a longer time. Raises OSError."""
    _begin_turn()
    return _moved(_open(path, os.O_RDONLY))


def _open(path: str, flags: int) -> int:
    return _call(_CALLS.openat, _AT_FDCWD, os.fsencode(path), flags | os.O_CLOEXEC)
