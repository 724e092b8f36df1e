"""The memory of another process."""

import contextlib
import ctypes
import errno
import os
import struct
from pathlib import Path

from kinetod.attach.attach_types import AttachCode, AttachError
from kinetod.base.libc import LIBC, Iovec

_LAST_ADDRESS = (1 << 63) - 1  # upper bound of user space; the kernel accepts no larger offset
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


def gone(pid: int) -> AttachError:
    """Error for a process that no longer has memory."""
    return AttachError(
        AttachCode.GONE,
        f"process {pid} has ended (or now runs another program, or is a kernel thread, which has no memory of its own)",
    )


def not_permitted(pid: int) -> AttachError:
    """Error for a process that the kernel does not let us trace; names possible causes."""
    scope = "0"
    with contextlib.suppress(OSError):
        scope = YAMA.read_text().strip()
    if scope != "0":
        why = f"kernel.yama.ptrace_scope is {scope}: only its parent or a process with CAP_SYS_PTRACE may read it"
    else:
        why = "it belongs to another user or has other capabilities"
    return AttachError(
        AttachCode.NOT_PERMITTED,
        f"the kernel does not permit this daemon to read the memory of process {pid}: {why};"
        " run kinetod as root or give it CAP_SYS_PTRACE",
    )


def _unmapped(address: int, pid: int) -> OSError:
    return OSError(errno.EIO, "Unmapped", f"{address:#x} of process {pid}")


class TargetMemory:
    """Reads and writes through /proc/PID/mem: the memory of the program that runs at construction; after an execve,
    reads return nothing.

    Where the mode of that file forbids it (with CAP_SYS_PTRACE but without CAP_DAC_OVERRIDE), it is opened read-only,
    and a stopped thread does the writing; without CAP_DAC_READ_SEARCH, too, process_vm_readv does the reading. Only
    /proc/PID/mem and ptrace write through the protection of a page (a private copy of code is made).

    Every method raises AttachError when the process has ended or may not be traced, and OSError where nothing is
    mapped.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = -1
        self.writes = True  # otherwise only a stopped thread can write
        try:
            self._fd = self._opened(os.O_RDWR)
            if self._fd < 0:
                self.writes = False
                self._fd = self._opened(os.O_RDONLY)
            if self._fd < 0:
                with contextlib.suppress(OSError):  # EFAULT: permitted, but nothing is mapped there
                    self.read(0, 1)
        except (FileNotFoundError, ProcessLookupError):
            raise gone(pid) from None

    def _opened(self, mode: int) -> int:
        """Returns the descriptor; -1 if the mode of the file forbids it."""
        try:
            return os.open(f"/proc/{self.pid}/mem", mode | os.O_CLOEXEC)
        except PermissionError:
            return -1

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Closes the memory file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read(self, address: int, size: int) -> bytes:
        """Exactly `size` bytes."""
        if not 0 <= address <= _LAST_ADDRESS:  # computed from values that the process controls
            raise _unmapped(address, self.pid)
        if self._fd < 0:
            buffer = ctypes.create_string_buffer(size)
            _transfer(LIBC.process_vm_readv, self.pid, address, buffer, size)
            return buffer.raw
        data = os.pread(self._fd, size, address)
        if not data and size:  # an unmapped address gives EIO, a memory that is gone gives the end of the file
            raise gone(self.pid)
        if len(data) != size:
            raise _unmapped(address, self.pid)
        return data

    def write(self, address: int, data: bytes) -> None:
        """Writes all of the data, if this object `writes`."""
        written = os.pwrite(self._fd, data, address)
        if not written and data:
            raise gone(self.pid)
        if written != len(data):
            raise _unmapped(address, self.pid)

    def u32(self, address: int) -> int:
        """An unsigned 32-bit number."""
        return int(struct.unpack("<I", self.read(address, 4))[0])

    def u64(self, address: int) -> int:
        """An unsigned 64-bit number."""
        return int(struct.unpack("<Q", self.read(address, 8))[0])


def write_of(tid: int, address: int, data: bytes) -> None:
    """Writes all of the data into the memory of the thread with this number. Raises as TargetMemory does."""
    _transfer(LIBC.process_vm_writev, tid, address, ctypes.create_string_buffer(data, len(data)), len(data))


def _transfer(
    call: "ctypes._NamedFuncPointer", pid: int, address: int, buffer: "ctypes.Array[ctypes.c_char]", size: int
) -> None:
    local, remote = Iovec(ctypes.addressof(buffer), size), Iovec(address, size)
    done = call(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    if done == size:
        return
    code = ctypes.get_errno() if done < 0 else errno.EIO
    if code == errno.EPERM:
        raise not_permitted(pid)
    if code == errno.ESRCH:
        raise gone(pid)
    raise OSError(code, os.strerror(code), f"{address:#x} of process {pid}")
