"""Reads the seccomp filters of a process, which takes one short stop of one of its threads.

Theory of operation
    The kernel shows a thread's filters only to its tracer, only with CAP_SYS_ADMIN, and only to one that has no
    filter itself. So: SEIZE, INTERRUPT, wait, PTRACE_SECCOMP_GET_FILTER for each, DETACH. No register is changed; when
    we die at any point the kernel detaches, and the thread goes on.

    A stop makes the kernel go on with sleeps and polls through restart_syscall, which filters see too. A filter
    that kills a process for that would kill it for any stop (also for SIGSTOP and SIGCONT). Threads that run, or wait
    where the kernel just repeats the call, are taken first; on others that one register (the pending result) is
    changed so that the call starts anew, when the filter turns out to be of that kind.
"""

import contextlib
import ctypes
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

from kinetod.attach.facts import PROC, SECCOMP_FILTER, X86_64, Seccomp, thread_seccomp
from kinetod.attach.interface import AttachCode, AttachError
from kinetod.attach.seccomp import INSTRUCTION, MAX_INSTRUCTIONS, ActionKind, Filter, SeccompError, evaluate

STOP_LIMIT_S = 0.5
_POLL_S = 0.000_02
_SPIN_S = 0.002
_DETACH, _GETREGSET, _SETREGSET, _SEIZE, _INTERRUPT, _GET_FILTER = 17, 0x4204, 0x4205, 0x4206, 0x4207, 0x420C
_WALL = 0x40000000
_EVENT_STOP = 128
_NT_PRSTATUS = 1
_MAX_FILTERS = 64
# x86-64: calls that go on through restart_syscall, and where their state lies in struct user_regs_struct
_RESTART_SYSCALL = 219
_CONTINUED_CALLS = {35, 230, 7}  # nanosleep, clock_nanosleep, poll
_FUTEX, _FUTEX_TIMEOUT = 202, 4  # a futex with a timeout too; its place in /proc/PID/task/TID/syscall
_RAX, _ORIG_RAX = 10, 15
_RESTARTNOINTR, _RESTART_RESTARTBLOCK = 2**64 - 513, 2**64 - 516

_libc = ctypes.CDLL(None, use_errno=True)
_ptrace = _libc.ptrace
_ptrace.restype = ctypes.c_long
_ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def read_filters(pid: int, seccomp: Seccomp, machine: str = X86_64) -> list[Filter]:
    """The filters of the process, oldest first; `seccomp` is what its main thread has.

    Raises AttachError: SECCOMP where they may not be read, TRACED or NOT_PERMITTED where the thread may not be
    stopped, GONE, TIMEOUT. Must be called and finished in one thread.
    """
    if seccomp.mode != SECCOMP_FILTER:
        return []
    tid = _thread(pid, seccomp)
    programs = ctypes.create_string_buffer(MAX_INSTRUCTIONS * INSTRUCTION.size)
    try:
        with _stopped(pid, tid):
            raw = list(_programs(pid, tid, programs))
            if machine == X86_64:
                _keep_alive(tid, raw, machine)
        return [Filter(program) for program in raw]
    except SeccompError as exc:
        raise AttachError(AttachCode.SECCOMP, f"a seccomp filter of process {pid} is not understood: {exc}") from exc


def _thread(pid: int, seccomp: Seccomp) -> int:
    """A thread with the main thread's filters, one that a stop does not send through restart_syscall if there is."""
    tids = []
    with contextlib.suppress(OSError):
        tids = sorted(int(entry.name) for entry in (PROC / str(pid) / "task").iterdir())
    for tid in sorted(tids, key=lambda tid: tid == pid):  # the main thread last: others have less to lose
        if thread_seccomp(pid, tid) == seccomp and _repeats(pid, tid):
            return tid
    return pid


def _repeats(pid: int, tid: int, proc: Path = PROC) -> bool:
    try:
        fields = (proc / str(pid) / "task" / str(tid) / "syscall").read_text().split()
        if fields[0] == "running":
            return True
        number = int(fields[0])
        if number == _FUTEX:
            return int(fields[_FUTEX_TIMEOUT], 16) == 0
        return number not in _CONTINUED_CALLS
    except (OSError, ValueError, IndexError):
        return False


def _call(request: int, tid: int, address: int = 0, data: int = 0) -> int:
    result: int = _ptrace(request, tid, address, data)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


@contextlib.contextmanager
def _stopped(pid: int, tid: int) -> Iterator[None]:
    """The thread stands still inside."""
    try:
        _call(_SEIZE, tid)
    except ProcessLookupError as exc:
        raise AttachError(AttachCode.GONE, f"process {pid} has ended") from exc
    except OSError as exc:
        raise AttachError(
            AttachCode.NOT_PERMITTED,
            f"process {pid} has a seccomp filter that must be looked at, but its thread {tid} cannot be stopped for "
            f"that ({exc.strerror}): is it traced by another tool? `kinetoctl doctor {pid}` says more",
        ) from exc
    deliver = 0
    try:
        with contextlib.suppress(ProcessLookupError):
            _call(_INTERRUPT, tid)
        deliver = _wait(pid, tid)
        yield
    finally:
        with contextlib.suppress(OSError):  # it has not stopped, or is gone
            _call(_DETACH, tid, 0, deliver)


def _wait(pid: int, tid: int) -> int:
    """The signal that came first and is still to be delivered, or 0."""
    start = time.monotonic()
    while True:
        try:
            waited, status = os.waitpid(tid, _WALL | os.WNOHANG)
        except ChildProcessError as exc:
            raise AttachError(AttachCode.GONE, f"process {pid} has ended") from exc
        if waited:
            break
        passed = time.monotonic() - start
        if passed > STOP_LIMIT_S:
            raise AttachError(
                AttachCode.TIMEOUT,
                f"thread {tid} of process {pid} did not stop within {STOP_LIMIT_S:g} s (is it in the kernel, waiting "
                "for a device?); try again",
            )
        if passed > _SPIN_S:
            time.sleep(_POLL_S)
    if not os.WIFSTOPPED(status):
        raise AttachError(AttachCode.GONE, f"process {pid} has ended")
    return 0 if status >> 16 == _EVENT_STOP else os.WSTOPSIG(status)


def _programs(pid: int, tid: int, buffer: "ctypes.Array[ctypes.c_char]") -> Iterator[bytes]:
    for index in range(_MAX_FILTERS):
        try:
            length = _call(_GET_FILTER, tid, index, ctypes.addressof(buffer))
        except OSError as exc:
            if exc.errno == errno.ENOENT:
                return
            raise AttachError(AttachCode.SECCOMP, unreadable(pid, exc)) from exc
        yield buffer.raw[: length * INSTRUCTION.size]
    raise AttachError(AttachCode.SECCOMP, f"process {pid} has more than {_MAX_FILTERS} seccomp filters")


def unreadable(pid: int, exc: OSError | None = None) -> str:
    """Why a process whose filters cannot be read is refused."""
    why = f" ({exc.strerror})" if exc else ""
    return (
        f"process {pid} has a seccomp filter that cannot be read{why}; a filter may kill the process for a system call "
        "that attaching makes, so it is left alone. Run kinetod with CAP_SYS_ADMIN and without a seccomp filter of its "
        "own (a privileged container), or start the process with an agent"
    )


def _keep_alive(tid: int, programs: list[bytes], machine: str) -> None:
    """Makes the interrupted call start anew where going on with it would end the process (see above)."""
    registers = (ctypes.c_uint64 * 27)()
    vector = _Iovec(ctypes.addressof(registers), ctypes.sizeof(registers))
    _call(_GETREGSET, tid, _NT_PRSTATUS, ctypes.addressof(vector))
    if registers[_ORIG_RAX] >> 63 or registers[_RAX] != _RESTART_RESTARTBLOCK:
        return
    action = evaluate([Filter(program) for program in programs], _RESTART_SYSCALL, (), machine)
    if action.kind not in (ActionKind.ALLOW, ActionKind.LOG):
        registers[_RAX] = _RESTARTNOINTR
        _call(_SETREGSET, tid, _NT_PRSTATUS, ctypes.addressof(vector))
