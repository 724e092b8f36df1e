"""ptrace(2) for one thread: seize, stop, read, redirect, release.

Theory of operation
    When a tracing thread ends, for whatever reason, the kernel releases the threads it traces. So everything here runs
    in an operating-system thread started for one call (`in_own_thread`): a target thread that does not stop in time is
    released by ending our own. After a stop some calls, such as sigtimedwait, return EINTR, and the kernel does not
    restart them. Before the thread continues, their result is set to the one with which the kernel repeats the call
    unless a handler runs. Where the caller itself continues with the remaining time (thread_policy.py), the EINTR
    stays: a repeated call would start its time anew. Waiting is waitpid(WNOHANG) and very short sleeps: a blocking
    waitpid has no deadline. If this process stops running during a stop, another one kills it (watchdog.py).
"""

import contextlib
import ctypes
import errno
import os
import platform
import signal
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from kinetod.attach.attach_types import AttachCode, AttachError, replaced
from kinetod.attach.inject.watchdog import WATCHDOG
from kinetod.attach.inspect.target_memory import gone, not_permitted, write_of
from kinetod.base.libc import LIBC, Iovec
from kinetod.processes import credentials
from kinetod.processes.credentials import Credentials

STOP_LIMIT_S = 0.5  # a thread that takes longer is in an uninterruptible sleep or frozen
_REAP_S = 0.05
_POLL_S = 5e-6
_MAX_POLL_S = 5e-4
_POLL_SHARE = 0.25  # of the time waited so far
_POKEDATA, _DETACH = 5, 17
_GETREGSET, _SETREGSET, _SEIZE, _INTERRUPT, _GETSIGMASK, _SETSIGMASK = 0x4204, 0x4205, 0x4206, 0x4207, 0x420A, 0x420B
_SECCOMP_GET_FILTER, _SOCK_FILTER_BYTES, _MAX_FILTER_BYTES = 0x420C, 8, 8 * 4096
_EVENT_STOP = 128
_WALL = 0x40000000
_PR_SET_TIMERSLACK = 29
_MASK_BYTES = 8
# x86-64: calls that return EINTR after a stop, and only if they have done nothing yet. Socket calls do so only with a
# time limit. On aarch64 the result has replaced the first argument, which cannot be read back: there EINTR stays.
REPEATED_CALLS = frozenset(
    {
        *(128, 65, 220, 208, 333, 232, 281, 441),  # rt_sigtimedwait, semop, io_getevents, epoll_wait and their variants
        *(0, 43, 288, 44, 46, 45, 47, 299),  # read, accept, sendto, sendmsg, recvfrom and their variants
    }
)
NT_PRSTATUS = 1
REGISTERS, RAX, ORIG_RAX = struct.Struct("<27Q"), 10, 15  # x86-64: struct user_regs_struct
_EINTR, _RESTARTNOHAND = 2**64 - errno.EINTR, 2**64 - 514
_STOPPING = (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)

LIBC.ptrace.restype = ctypes.c_long
LIBC.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)

Result = TypeVar("Result")


class LostError(Exception):
    """This thread of the target cannot be used now: it ended, did not stop, or received a signal."""


class StuckError(LostError):
    """This thread of the target has not stopped in time: it is released when ours ends (in_own_thread)."""


def in_own_thread(work: Callable[[], Result]) -> Result:
    """Runs `work` in a thread that ends with it; its exceptions are raised here."""
    results: list[Result] = []
    failures: list[BaseException] = []

    def run() -> None:
        LIBC.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # otherwise every short sleep takes 50 us longer
        with contextlib.suppress(OSError):  # not to lose the CPU while the target is stopped; ends with the thread
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 -- raised again below
            failures.append(error)

    thread = threading.Thread(target=run, name="kinetod-ptrace")
    with WATCHDOG.awake():  # until our thread has ended: only then is a thread that did not stop in time released
        try:
            thread.start()
        except RuntimeError as exc:
            reason = f"the attach helper cannot start a thread ({exc}): raise kinetod's limit on threads (pids.max)"
            raise AttachError(AttachCode.FAILED, reason) from None
        thread.join()
    if failures:
        raise failures[0]
    return results[0]


class StoppedThread:
    """Context in which one thread of the target is stopped; leaving it releases the thread.

    Entering raises LostError, or AttachError if the process may not be traced or is stopped by job control.
    """

    def __init__(self, pid: int, tid: int, *, takes_eintr: bool = False) -> None:
        self.pid, self.tid, self._takes_eintr = pid, tid, takes_eintr
        self.stopped_ns = 0  # from when it was last seen running until its release; known after the context
        self._signal = 0
        self._held = False
        self._since_ns = 0

    def __enter__(self) -> "StoppedThread":
        self._seize()
        WATCHDOG.beat()
        try:
            self._request(_INTERRUPT)
            self._await_stop()
        except StuckError:
            raise
        except BaseException as error:
            WATCHDOG.rest()
            if isinstance(error, ProcessLookupError):
                raise LostError(f"thread {self.tid} ended") from None
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._let_go()

    def registers(self, regset: int, size: int) -> bytes:
        """Returns one register set; the length shows how much the kernel has."""
        buffer = ctypes.create_string_buffer(size)
        vector = Iovec(ctypes.addressof(buffer), size)
        self._request(_GETREGSET, regset, ctypes.addressof(vector))
        return buffer.raw[: vector.length]

    def set_registers(self, regset: int, data: bytes) -> None:
        """Sets one register set, all at once."""
        buffer = ctypes.create_string_buffer(data, len(data))
        vector = Iovec(ctypes.addressof(buffer), len(data))
        self._request(_SETREGSET, regset, ctypes.addressof(vector))

    def signal_mask(self) -> int:
        """Returns its blocked signals, signal 1 in bit 0."""
        buffer = ctypes.create_string_buffer(_MASK_BYTES)
        self._request(_GETSIGMASK, _MASK_BYTES, ctypes.addressof(buffer))
        return int(struct.unpack("<Q", buffer.raw)[0])

    def set_signal_mask(self, mask: int) -> None:
        """Sets the blocked signals; see signal_mask()."""
        buffer = ctypes.create_string_buffer(struct.pack("<Q", mask), _MASK_BYTES)
        self._request(_SETSIGMASK, _MASK_BYTES, ctypes.addressof(buffer))

    def seccomp_filter(self, index: int) -> bytes:
        """Returns one of its filters (0 is the oldest) as an array of struct sock_filter. Raises OSError; ENOENT: no
        more.
        """
        buffer = ctypes.create_string_buffer(_MAX_FILTER_BYTES)
        length = LIBC.ptrace(_SECCOMP_GET_FILTER, self.tid, index, ctypes.addressof(buffer))
        if length < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return buffer.raw[: length * _SOCK_FILTER_BYTES]

    def poke(self, address: int, data: bytes) -> None:
        """Writes memory regardless of its protection; whole words of 8 bytes."""
        for offset in range(0, len(data), 8):
            (word,) = struct.unpack_from("<Q", data, offset)
            self._request(_POKEDATA, address + offset, word)

    def write(self, address: int, data: bytes) -> None:
        """Writes memory that its protection allows to write; whole words of 8 bytes.

        Writes to the memory of this very thread, whatever happens to its process: by its own thread id, which nobody
        else
        gets while we hold it, or word by word, since a main thread's id passes to a thread that calls execve.
        """
        if self.tid != self.pid or len(os.listdir(f"/proc/{self.pid}/task")) == 1:  # noqa: PTH208 -- in a hurry
            write_of(self.tid, address, data)
        else:
            self.poke(address, data)

    def check(self, approved: Credentials) -> None:
        """Raises AttachError if the thread does not belong to what was approved, and LostError if it was killed."""
        try:
            found = credentials.read(self.pid, self.tid)
        except ProcessLookupError:
            raise LostError(f"thread {self.tid} ended") from None
        if difference := approved.difference(found):
            raise replaced(self.pid, difference)

    def _seize(self) -> None:
        try:
            self._request(_SEIZE)
        except ProcessLookupError:
            raise LostError(f"thread {self.tid} ended") from None
        except PermissionError:
            if tracer := tracer_of(self.pid, self.tid):
                raise traced(self.pid, tracer) from None
            if not Path(f"/proc/{self.pid}/task/{self.tid}").is_dir():
                raise LostError(f"thread {self.tid} ended") from None
            raise not_permitted(self.pid) from None
        self._held = True

    def _await_stop(self) -> None:
        began = time.monotonic()
        while True:
            self._since_ns = time.monotonic_ns()
            WATCHDOG.beat()
            try:
                waited, status = os.waitpid(self.tid, _WALL | os.WNOHANG)
            except ChildProcessError:
                self._held = False
                raise LostError(f"thread {self.tid} ended") from None
            if waited:
                break
            waited_s = time.monotonic() - began
            if waited_s > STOP_LIMIT_S:
                raise StuckError(f"thread {self.tid} did not stop within {STOP_LIMIT_S} s")
            # Increasing: polling with real-time priority on every CPU would keep the thread from running to its stop.
            time.sleep(min(max(_POLL_S, waited_s * _POLL_SHARE), _MAX_POLL_S))
        if not os.WIFSTOPPED(status):
            self._held = False
            raise LostError(f"thread {self.tid} ended")
        number = os.WSTOPSIG(status)
        if status >> 16 != _EVENT_STOP:  # a signal was on its way: it is delivered when we release the thread
            self._signal = number
            self._let_go()
            raise LostError(f"thread {self.tid} received signal {number}")
        if number in _STOPPING:
            self._let_go()
            raise job_stopped(self.pid)
        if platform.machine() == "x86_64" and not self._takes_eintr:
            self._repeat_call()

    def _repeat_call(self) -> None:
        data = self.registers(NT_PRSTATUS, REGISTERS.size)
        if len(data) != REGISTERS.size:  # runs 32-bit code
            return
        registers = list(REGISTERS.unpack(data))
        if registers[RAX] == _EINTR and registers[ORIG_RAX] in REPEATED_CALLS:
            registers[RAX] = _RESTARTNOHAND
            self.set_registers(NT_PRSTATUS, REGISTERS.pack(*registers))

    def _let_go(self) -> None:
        if self._held:
            try:
                self._request(_DETACH, 0, self._signal)
            except OSError:  # it did not stop, or was killed
                self._reap()
            WATCHDOG.rest()
            self.stopped_ns = time.monotonic_ns() - self._since_ns
            self._held = False

    def _reap(self) -> None:
        """Waits for a thread that was killed while we held it: an execve of its process waits for that."""
        end = time.monotonic() + _REAP_S
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < end:
                waited, status = os.waitpid(self.tid, _WALL | os.WNOHANG)
                if waited and not os.WIFSTOPPED(status):
                    return
                time.sleep(_MAX_POLL_S)

    def _request(self, request: int, address: int = 0, data: int = 0) -> None:
        if LIBC.ptrace(request, self.tid, address, data) == -1 and (code := ctypes.get_errno()):
            raise OSError(code, os.strerror(code), f"ptrace request {request:#x}, thread {self.tid}")


def tracer_of(pid: int, tid: int) -> int:
    """Returns the process id of the thread's tracer; 0: none."""
    try:
        with open(f"/proc/{pid}/task/{tid}/status", errors="replace") as status:  # noqa: PTH123 -- while it stands
            return next((int(line.split()[1]) for line in status if line.startswith("TracerPid:")), 0)
    except OSError:
        return 0


def traced(pid: int, tracer: int) -> AttachError:
    """Error for a process that another one traces."""
    name = "?"
    with contextlib.suppress(OSError), open(f"/proc/{tracer}/comm", errors="replace") as comm:  # noqa: PTH123
        name = comm.read().strip()
    return AttachError(
        AttachCode.TRACED,
        f"process {pid} is traced by process {tracer} ({name}); end that process or let it detach, then try again",
    )


def job_stopped(pid: int) -> AttachError:
    """Error for a process that job control has stopped."""
    return AttachError(
        AttachCode.UNSUITABLE,
        f"process {pid} cannot be attached to: it is stopped (SIGSTOP or Ctrl-Z); resume it: kill -CONT {pid}",
    )


def translate(pid: int, error: OSError) -> AttachError:
    """Translates a failed request or access into an error about the whole process."""
    if error.errno == errno.ESRCH:
        return gone(pid)
    return AttachError(AttachCode.FAILED, f"could not attach to process {pid}: {error}; try again")
