"""Descriptors in a foreign process: the program may close numbers that it did not open, and use them anew.

Theory of operation
    Python's own functions give the GIL away around each system call and may have it back 5 ms later. What a number
    names then may be the program's: os.pipe() would answer with two files of the program. So descriptors are made,
    looked at and closed here by system calls that keep the GIL, in a turn with it that has just begun: no Python code
    of the program comes in between.

    Those that stay are moved to the high end of the table of descriptors as it is now (the kernel would stop for
    milliseconds to make a larger one). The lowest numbers are given first, so a program that opens as many as it has
    closed does not come there, and waiting and reading without the GIL is safe: at worst such a number is closed.

    `_ctypes` is what the ctypes package wraps; it costs no file to be read.
"""

import _ctypes
import errno
import os
import struct
from typing import Any, Iterator, List, NamedTuple, Tuple

Identity = Tuple[int, int]
NOBODY: Identity = (0, 0)
_KEEPS_GIL, _KEEPS_ERRNO, _C_CALL = 0x4, 0x8, 0x1  # flags of ctypes functions
_AT_FDCWD = -100
_F_DUPFD_CLOEXEC = 1030
_FUTEX_WAKE_PRIVATE = 0x81
_STATUS_BYTES = 144  # struct stat begins with device and inode
_FOLDER_BYTES = 32 * 1024
_ENTRY = struct.Struct("=QqHB")  # struct linux_dirent64 before the name
_STATUS_FILE_BYTES = 4096
_SMALLEST_TABLE = 64
_AT_THE_END = 24  # so many numbers at the end of the table are for us


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


class _Long(_ctypes._SimpleCData):  # type: ignore[type-arg]
    _type_ = "l"


class _Function(_ctypes.CFuncPtr):
    _flags_ = _C_CALL | _KEEPS_GIL | _KEEPS_ERRNO
    _restype_ = _Long


_program: Any = None  # for dlopen: all that it has loaded
_syscall: Any = _Function(_ctypes.dlsym(_ctypes.dlopen(_program, os.RTLD_NOW), "syscall"))


def _call(number: int, *arguments: Any) -> int:
    """With the GIL. Raises OSError."""
    result: int = _syscall(number, *arguments)
    if result < 0:
        error = _ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


def wake_waiter(address: int) -> None:
    """Wake a thread that waits by a futex for the word there to change. Keeps the GIL."""
    _syscall(_CALLS.futex, _Long(address), _FUTEX_WAKE_PRIVATE, 1)


def _begin_turn() -> None:
    """Give the GIL away and have it anew: whoever wants it now waits 5 ms before he asks for it."""
    os.stat("/")


def identity(descriptor: int) -> Identity:
    """Device and inode of what the number names now; NOBODY if it is closed."""
    status = bytes(_STATUS_BYTES)
    if _syscall(_CALLS.fstat, descriptor, status) != 0:
        return NOBODY
    device, inode = struct.unpack_from("QQ", status)
    return (device, inode)


def close_ours(descriptor: int, ours: Identity) -> None:
    """Close the number if it still names what it named for us."""
    _begin_turn()
    _close(descriptor, ours)


def _close(descriptor: int, ours: Identity) -> None:
    if ours != NOBODY and identity(descriptor) == ours:
        _syscall(_CALLS.close, descriptor)


def _moved(descriptor: int) -> int:
    """At the high end; where it was if there is no room."""
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
    """Like os.memfd_create, which Pythons that were built for an old C library lack. Raises OSError."""
    _begin_turn()
    return _moved(_call(_CALLS.memfd_create, name.encode(), flags))


def read_file(path: str, most: int, *, begin_turn: bool = True) -> bytes:
    """The beginning of a file of /proc that is read at once. Raises OSError."""
    if begin_turn:
        _begin_turn()
    descriptor = _open(path, os.O_RDONLY)
    ours, data = identity(descriptor), bytes(most)
    try:
        return data[: _call(_CALLS.read, descriptor, data, most)]
    finally:
        _close(descriptor, ours)


def read_on(descriptor: int, ours: Identity, times: int, most: int) -> List[bytes]:
    """Some more pieces of a file that is ours; the last one is empty at its end. Raises OSError."""
    _begin_turn()
    if identity(descriptor) != ours:
        raise OSError(errno.EBADF, "the program closed the agent's descriptor")
    pieces: List[bytes] = []
    while len(pieces) < times and (not pieces or pieces[-1]):
        data = bytes(most)
        pieces.append(data[: _call(_CALLS.read, descriptor, data, most)])
    return pieces


def write_file(path: str, data: bytes) -> None:
    """Into a file of /proc. Raises OSError."""
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
    """A file to be read, for longer. Raises OSError."""
    _begin_turn()
    return _moved(_open(path, os.O_RDONLY))


def _open(path: str, flags: int) -> int:
    return _call(_CALLS.openat, _AT_FDCWD, os.fsencode(path), flags | os.O_CLOEXEC)
