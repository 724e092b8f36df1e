"""Reads the seccomp filters of a process, and predicts what they would do to the system calls that we make in it.

Theory of operation
    A filter is a classic BPF program over struct seccomp_data: the call's number, the machine, the instruction
    pointer, six arguments. Its 32-bit result is an action and 16 bits of data; with several filters, the strictest
    action counts. `Filter.run` follows the kernel's rules (seccomp_check_filter and what the checks guarantee: jumps
    only go forward, so every program ends); a program that breaks them is refused, never guessed at.

    `forbidden` runs the table CALLS through the filters. KILL and TRAP would end the process, so any of them counts; so
    does a supervisor's decision (USER_NOTIF), which cannot be predicted. A call that merely fails counts if we need it.

    The kernel shows a thread's filters only to its tracer, only with CAP_SYS_ADMIN, and only to one that has no
    filter itself. So a thread is stopped (ptrace.py), queried and released. If we die at any point, the kernel releases
    it.

    After a stop the kernel continues sleeps and polls through restart_syscall, which filters see too. A filter that
    kills a process for that would kill it for any stop (also for SIGSTOP and SIGCONT). Threads that run, or wait where
    the kernel just repeats the call, are preferred; on others, if the filter turns out to be of that kind, one register
    (the pending result) is changed so that the call starts anew.

    CALLS has the system calls that the hand-over, the bootstrap and the agent make in a target, as a filter sees them.
    Numbers are those of x86-64 and aarch64 (None: the machine does not have the call). A call made with different
    arguments lists each kind of them, since filters check arguments. Any pointer stands for all.
"""

import contextlib
import errno
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from kinetod.attach.attach_types import AttachCode, AttachError
from kinetod.attach.inject.ptrace import (
    NT_PRSTATUS,
    ORIG_RAX,
    RAX,
    REGISTERS,
    REPEATED_CALLS,
    LostError,
    StoppedThread,
    in_own_thread,
)
from kinetod.attach.inspect.process_inspection import AARCH64, PROC, SECCOMP_FILTER, X86_64, Seccomp, thread_seccomp
from kinetod.processes.credentials import Credentials

MAX_INSTRUCTIONS = 4096  # BPF_MAXINSNS
INSTRUCTION = struct.Struct("<HBBI")  # struct sock_filter: code, jump if true, jump if false, k
_DATA = struct.Struct("<iIQ6Q")  # struct seccomp_data
_WORD = struct.Struct("<I")
_ARCHITECTURES = {X86_64: 0xC000003E, AARCH64: 0xC00000B7}  # AUDIT_ARCH_*
_U32, _U64 = 2**32 - 1, 2**64 - 1
_SOMEWHERE = 0x7F00_0000_1000  # an arbitrary instruction pointer; `looks_at_the_caller` says whether it matters
_IP_WORDS = (8, 12)
_ACTION_MASK, _DATA_MASK = 0xFFFF0000, 0x0000FFFF
# Instruction classes and the other bit fields (linux/bpf_common.h)
_LD, _LDX, _ST, _STX, _ALU, _JMP, _RET, _MISC = range(8)
_IMM, _ABS, _MEM, _LEN = 0x00, 0x20, 0x60, 0x80  # operand sources of a load
_USE_X, _RET_A, _TAX, _TXA, _JA, _DIVIDE = 0x08, 0x16, 0x07, 0x87, 0x05, 0x34
_COMPARISONS: dict[int, Callable[[int, int], bool]] = {
    0x15: lambda a, b: a == b,
    0x25: lambda a, b: a > b,
    0x35: lambda a, b: a >= b,
    0x45: lambda a, b: a & b != 0,
}
_ARITHMETIC: dict[int, Callable[[int, int], int]] = {
    0x04: lambda a, b: a + b,
    0x14: lambda a, b: a - b,
    0x24: lambda a, b: a * b,
    _DIVIDE: lambda a, b: a // b,
    0x44: lambda a, b: a | b,
    0x54: lambda a, b: a & b,
    0x64: lambda a, b: a << (b & 31),
    0x74: lambda a, b: a >> (b & 31),
    0x84: lambda a, _b: -a,
    0xA4: lambda a, b: a ^ b,
}
_MAX_FILTERS = 64
_TRIES = 5  # a signal may come first, or the thread may end
# x86-64: calls that continue through restart_syscall
_RESTART_SYSCALL = 219
# nanosleep, clock_nanosleep, poll; starting anew would extend their time limit
_CONTINUED_CALLS = {35, 230, 7, *REPEATED_CALLS}
_FUTEX, _FUTEX_TIMEOUT = 202, 4  # also a futex with a timeout; index of its timeout in /proc/PID/task/TID/syscall
_RESTARTNOINTR, _RESTART_RESTARTBLOCK = 2**64 - 513, 2**64 - 516
_EPERM, _ENOSYS = 1, 38
_PAGE, _POINTER, _FD = 0x1000, 0x7F00_0000_0000, 7
_RW, _RX = 3, 5
_PRIVATE, _SHARED, _FIXED, _ANONYMOUS, _DENYWRITE = 0x2, 0x1, 0x10, 0x20, 0x800
_NORESERVE_STACK, _FIXED_NOREPLACE = 0x20000, 0x100000
_NO_FD = 2**64 - 1
_CLONE_THREAD = 0x3D0F00  # as pthread_create sets them
_CLOEXEC = 0o2000000
_AT_FDCWD = 2**64 - 100
_CPU_CLOCK_OF_THREAD = 2**64 - 8 * 1001 + 6  # for thread 1000

ANY_ERROR = frozenset(range(4096))
NO_ERROR: frozenset[int] = frozenset()
FALLS_BACK = frozenset((_ENOSYS,))  # the C library then uses another call
_PLAIN_READ = frozenset((_EPERM, _ENOSYS))  # the collector then reads kernel names another way
Arguments = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SystemCall:
    """One system call. tolerated: errno values that do no harm if a filter returns them."""

    name: str
    x86_64: int | None
    aarch64: int | None
    arguments: tuple[Arguments, ...] = ((_FD, _POINTER, _PAGE),)
    tolerated: frozenset[int] = NO_ERROR


# The injection runs on a thread of the program: these first.
HAND_OVER = (
    SystemCall("rt_sigprocmask", 14, 135, ((2, _POINTER, _POINTER, 8),)),
    SystemCall(
        "mmap",
        9,
        222,
        (
            (_POINTER, _PAGE, _RW, _PRIVATE | _ANONYMOUS | _FIXED_NOREPLACE, _NO_FD, 0),
            (0, 1 << 20, _RW, _PRIVATE | _ANONYMOUS, _NO_FD, 0),
            (0, 8 << 20, 0, _PRIVATE | _ANONYMOUS | _NORESERVE_STACK, _NO_FD, 0),
            (0, 8 << 20, _RW, _SHARED, _FD, 0),
            (_POINTER, _PAGE, 1, _PRIVATE | _DENYWRITE, _FD, 0),
            (_POINTER, _PAGE, _RX, _PRIVATE | _FIXED | _DENYWRITE, _FD, 0),
        ),
    ),
    SystemCall("munmap", 11, 215, ((_POINTER, _PAGE),)),
    SystemCall("rt_sigreturn", None, 139, ((),)),  # how the injection ends on aarch64
    # The kernel itself makes this one when a sleep or a poll continues after a stop.
    SystemCall("restart_syscall", 219, 128, ((),)),
    SystemCall("futex", 202, 98, ((_POINTER, 0x80, 0), (_POINTER, 0x81, 1), (_POINTER, 0x189, 0))),
)
AGENT = (
    SystemCall("socketpair", 53, 199, ((1, 5 | _CLOEXEC, 0, _POINTER),)),
    SystemCall("memfd_create", 319, 279, ((_POINTER, 1), (_POINTER, 3))),
    SystemCall("clone3", 435, 435, ((_POINTER, 88),), FALLS_BACK),
    SystemCall("clone", 56, 220, ((_CLONE_THREAD, _POINTER, _POINTER, _POINTER, _POINTER),)),
    SystemCall("recvmsg", 47, 212, ((_FD, _POINTER, 0), (_FD, _POINTER, 0x40000000), (_FD, _POINTER, 0x40000040))),
    SystemCall("sendmsg", 46, 211, ((_FD, _POINTER, 0), (_FD, _POINTER, 0x4000))),
    SystemCall("sendto", 44, 206, ((_FD, _POINTER, 100, 0, 0, 0), (_FD, _POINTER, 100, 0x4000, 0, 0))),
    SystemCall("recvfrom", 45, 207, ((_FD, _POINTER, 100, 0, 0, 0), (_FD, _POINTER, 1, 2, 0, 0))),
    SystemCall("poll", 7, None, ((_POINTER, 1, 1000),)),
    SystemCall("ppoll", None, 73, ((_POINTER, 1, _POINTER, 0, 8),)),
    SystemCall("pselect6", 270, 72, ((0, 0, 0, 0, _POINTER, 0),)),  # time.sleep, up to Python 3.10
    SystemCall("openat", 257, 56, ((_AT_FDCWD, _POINTER, _CLOEXEC, 0),)),
    SystemCall("read", 0, 63),
    SystemCall("pread64", 17, 67, ((_FD, _POINTER, 64, 784),), ANY_ERROR),
    SystemCall("write", 1, 64),
    SystemCall("close", 3, 57, ((_FD,),)),
    SystemCall("fstat", 5, 80, ((_FD, _POINTER),)),
    SystemCall("newfstatat", 262, 79, ((_AT_FDCWD, _POINTER, _POINTER, 0), (_FD, _POINTER, _POINTER, 0x1000))),
    SystemCall("lseek", 8, 62, ((_FD, 0, 1),)),
    SystemCall("fcntl", 72, 25, ((_FD, 3, 0), (_FD, 1030, 0), (_FD, 1033, 6))),
    SystemCall("ftruncate", 77, 46, ((_FD, _PAGE),)),
    SystemCall("mprotect", 10, 226, ((_POINTER, _PAGE, _RW), (_POINTER, _PAGE, 1))),
    SystemCall("pipe2", 293, 59, ((_POINTER, _CLOEXEC),)),
    SystemCall("exit", 60, 93, ((0,),)),
    SystemCall("brk", 12, 214, ((_POINTER,),), ANY_ERROR),
    SystemCall("madvise", 28, 233, ((_POINTER, _PAGE, 4), (_POINTER, _PAGE, 10)), ANY_ERROR),
    # realloc() of a large block; without it the C library copies.
    SystemCall("mremap", 25, 216, ((_POINTER, 1 << 18, 1 << 19, 1),), ANY_ERROR),
    SystemCall("getdents64", 217, 61, tolerated=ANY_ERROR),
    SystemCall("readlink", 89, None, ((_POINTER, _POINTER, 4096),), ANY_ERROR),
    SystemCall("readlinkat", 267, 78, ((_AT_FDCWD, _POINTER, _POINTER, 4096),), ANY_ERROR),
    SystemCall("getcwd", 79, 17, ((_POINTER, 4096),), ANY_ERROR),
    SystemCall("getrandom", 318, 278, ((_POINTER, 16, 1),), ANY_ERROR),
    SystemCall("getpid", 39, 172, ((),), ANY_ERROR),
    SystemCall("gettid", 186, 178, ((),), ANY_ERROR),
    SystemCall("uname", 63, 160, ((_POINTER,),)),
    SystemCall("getsockname", 51, 204, ((_FD, _POINTER, _POINTER),)),
    SystemCall("geteuid", 107, 175, ((),), ANY_ERROR),
    SystemCall("getsockopt", 55, 209, ((_FD, 1, 7, _POINTER, _POINTER),), ANY_ERROR),
    SystemCall("ioctl", 16, 29, ((_FD, 0x5401, _POINTER),), ANY_ERROR),  # checks whether a file is a terminal
    SystemCall("rt_sigaction", 13, 134, ((33, _POINTER, _POINTER, 8),), ANY_ERROR),
    SystemCall("process_vm_readv", 310, 270, ((1000, _POINTER, 1, _POINTER, 1, 0),), _PLAIN_READ),
    SystemCall("set_robust_list", 273, 99, ((_POINTER, 24),), ANY_ERROR),
    SystemCall("rseq", 334, 293, ((_POINTER, 32, 0, 0x53053053),), ANY_ERROR),
    SystemCall("prctl", 157, 167, ((15, _POINTER),), ANY_ERROR),  # the thread's name
    SystemCall("sched_getaffinity", 204, 123, ((0, 128, _POINTER),), ANY_ERROR),
    SystemCall("sched_yield", 24, 124, ((),), ANY_ERROR),
    SystemCall(
        "close_range", 436, 436, ((0, 2**32 - 1, 2),), ANY_ERROR
    ),  # the stack sampler's own table of descriptors
    SystemCall("clock_gettime", 228, 113, ((0, _POINTER), (1, _POINTER), (_CPU_CLOCK_OF_THREAD, _POINTER)), ANY_ERROR),
    SystemCall("clock_nanosleep", 230, 115, ((1, 1, _POINTER, 0),), ANY_ERROR),
)
CALLS = (*HAND_OVER, *AGENT)


class SeccompError(Exception):
    """The kernel would not have accepted this filter."""


class ActionKind(IntEnum):
    """SECCOMP_RET_*. Unknown ones are treated as KILL_PROCESS, as the kernel does."""

    KILL_PROCESS = 0x80000000
    KILL_THREAD = 0x00000000
    TRAP = 0x00030000
    ERRNO = 0x00050000
    USER_NOTIF = 0x7FC00000
    TRACE = 0x7FF00000
    LOG = 0x7FFC0000
    ALLOW = 0x7FFF0000


DEADLY = frozenset((ActionKind.KILL_PROCESS, ActionKind.KILL_THREAD, ActionKind.TRAP))


_STRICTEST_FIRST = tuple(ActionKind)


@dataclass(frozen=True, slots=True)
class FilterAction:
    """A filter's decision about a call. data: for ERRNO, the error number."""

    kind: ActionKind
    data: int = 0

    def __str__(self) -> str:
        return f"ERRNO({self.data})" if self.kind is ActionKind.ERRNO else self.kind.name


def _action(result: int) -> FilterAction:
    try:
        return FilterAction(ActionKind(result & _ACTION_MASK), result & _DATA_MASK)
    except ValueError:
        return FilterAction(ActionKind.KILL_PROCESS)


class Filter:
    """One seccomp filter."""

    def __init__(self, program: bytes) -> None:
        """program: an array of struct sock_filter. Raises SeccompError."""
        if not program or len(program) % INSTRUCTION.size or len(program) > MAX_INSTRUCTIONS * INSTRUCTION.size:
            raise SeccompError(f"its size of {len(program)} bytes is invalid")
        self._program = list(INSTRUCTION.iter_unpack(program))

    def __len__(self) -> int:
        return len(self._program)

    @property
    def looks_at_the_caller(self) -> bool:
        """Whether the filter reads the instruction pointer."""
        return any(code == _LD | _ABS and k in _IP_WORDS for code, _, _, k in self._program)

    def run(self, data: bytes) -> int:
        """The 32-bit result for one struct seccomp_data. Raises SeccompError."""
        try:
            return self._run(data)
        except (IndexError, KeyError, struct.error) as exc:
            raise SeccompError(f"not a valid filter: {exc!r}") from exc

    def _run(self, data: bytes) -> int:
        a = x = position = 0
        memory = [0] * 16
        while True:
            code, if_true, if_false, k = self._program[position]
            position += 1
            kind = code & 0x07
            if kind == _JMP:
                if code == _JA:
                    position += k
                else:
                    position += if_true if _COMPARISONS[code & ~_USE_X](a, x if code & _USE_X else k) else if_false
            elif kind == _LD:
                a = _load(code, k, data, memory)
            elif kind == _RET:
                return a if code == _RET_A else _constant(code, k)
            elif kind == _ALU:
                operand = x if code & _USE_X else k
                if code & ~_USE_X == _DIVIDE and operand == 0:
                    return 0  # as the kernel does
                a = _ARITHMETIC[code & ~_USE_X](a, operand) & _U32
            elif kind == _LDX:
                x = _load(code, k, data, memory)
            elif code in (_ST, _STX):
                memory[k] = a if code == _ST else x
            elif code == _TAX:
                x = a
            elif code == _TXA:
                a = x
            else:
                raise KeyError(hex(code))


def _load(code: int, k: int, data: bytes, memory: list[int]) -> int:
    """The word of LD or LDX."""
    source = code & ~0x07
    if source == _ABS and code & 0x07 == _LD and k % 4 == 0:
        word: int = _WORD.unpack_from(data, k)[0]
        return word
    if source == _MEM:
        return memory[k]
    return {_IMM: k, _LEN: len(data)}[source]


def _constant(code: int, k: int) -> int:
    if code != _RET:
        raise KeyError(hex(code))
    return k


def evaluate(filters: Sequence[Filter], number: int, arguments: Sequence[int], machine: str) -> FilterAction:
    """The action of all filters (oldest first, as the kernel numbers them) for one call. Raises SeccompError."""
    padded = ([value & _U64 for value in arguments] + [0] * 6)[:6]
    data = _DATA.pack(number, _ARCHITECTURES[machine], _SOMEWHERE, *padded)
    newest_first = [_action(each.run(data)) for each in reversed(filters)]
    return min(
        newest_first, key=lambda action: _STRICTEST_FIRST.index(action.kind), default=FilterAction(ActionKind.ALLOW)
    )


@dataclass(frozen=True, slots=True)
class Forbidden:
    """A call of the agent that the filters forbid."""

    name: str
    action: FilterAction

    def __str__(self) -> str:
        return f"{self.name} ({self.action})"


def forbidden(filters: Sequence[Filter], machine: str, calls: Sequence[SystemCall] = CALLS) -> list[Forbidden]:
    """Returns the forbidden calls, those that would kill the process first. Raises SeccompError."""
    found = [each for call in calls for each in _objections(filters, machine, call)]
    return sorted(found, key=lambda each: _STRICTEST_FIRST.index(each.action.kind))


def _objections(filters: Sequence[Filter], machine: str, call: SystemCall) -> Iterator[Forbidden]:
    number = call.x86_64 if machine == X86_64 else call.aarch64
    if number is None:
        return
    for arguments in call.arguments:
        action = evaluate(filters, number, arguments, machine)
        if not _harmless(action, call):
            yield Forbidden(call.name, action)
            return


def _harmless(action: FilterAction, call: SystemCall) -> bool:
    if action.kind in (ActionKind.ALLOW, ActionKind.LOG):
        return True
    if action.kind is ActionKind.TRACE:  # without a tracer the call fails with ENOSYS
        return _ENOSYS in call.tolerated
    return action.kind is ActionKind.ERRNO and action.data in call.tolerated


def read_filters(
    pid: int, seccomp: Seccomp, machine: str = X86_64, *, approved: Credentials | None = None
) -> list[Filter]:
    """Returns the filters of the process, oldest first; `seccomp` is its main thread's state.

    approved: the credentials that the process must have; None: any. Raises AttachError: REPLACED if it has others;
    SECCOMP if filters cannot be read; TRACED or NOT_PERMITTED if the process cannot be stopped; UNSUITABLE, GONE,
    TIMEOUT.
    """
    if seccomp.mode != SECCOMP_FILTER:
        return []
    try:
        return [Filter(program) for program in _read(pid, seccomp, machine, approved)]
    except SeccompError as exc:
        raise AttachError(AttachCode.SECCOMP, f"a seccomp filter of process {pid} cannot be evaluated: {exc}") from exc


def _read(pid: int, seccomp: Seccomp, machine: str, approved: Credentials | None) -> list[bytes]:
    def work() -> list[bytes]:
        with StoppedThread(pid, _thread(pid, seccomp)) as thread:
            programs = _programs(thread)
            if machine == X86_64:
                _keep_alive(thread, programs, machine)  # always: this undoes the effect of our stop
            if approved is not None:
                thread.check(approved)
            return programs

    why = ""
    for _ in range(_TRIES):
        if not (PROC / str(pid)).exists():
            raise AttachError(AttachCode.GONE, f"process {pid} has ended")
        try:
            return in_own_thread(work)  # a new thread each time: its end releases a target thread that did not stop
        except LostError as exc:
            why = str(exc)
    raise AttachError(
        AttachCode.TIMEOUT, f"process {pid} has a seccomp filter that could not be read: {why}; try again"
    )


def _thread(pid: int, seccomp: Seccomp) -> int:
    """A thread with the main thread's filters, if possible one that a stop does not send through restart_syscall."""
    tids = []
    with contextlib.suppress(OSError):
        tids = sorted(int(entry.name) for entry in (PROC / str(pid) / "task").iterdir())
    for tid in sorted(tids, key=lambda tid: tid == pid):  # the main thread last: others matter less
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


def _programs(thread: StoppedThread) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < _MAX_FILTERS:
        try:
            found.append(thread.seccomp_filter(len(found)))
        except OSError as exc:
            if exc.errno == errno.ENOENT:
                return found
            if exc.errno == errno.ESRCH:
                raise LostError(f"thread {thread.tid} ended") from exc
            raise AttachError(
                AttachCode.SECCOMP,
                f"the kernel does not let kinetod read a seccomp filter of process {thread.pid} ({exc.strerror}); the "
                "attach was refused, since the filter could kill the process. Run kinetod with CAP_SYS_ADMIN and "
                "without a seccomp filter of its own (a privileged container), or start the process with the agent",
            ) from exc
    raise AttachError(AttachCode.SECCOMP, f"process {thread.pid} has more than {_MAX_FILTERS} seccomp filters")


def _keep_alive(thread: StoppedThread, programs: list[bytes], machine: str) -> None:
    """Restarts the interrupted call from the beginning if continuing it would end the process (see above)."""
    data = thread.registers(NT_PRSTATUS, REGISTERS.size)
    if len(data) != REGISTERS.size:
        return  # it runs 32-bit code
    registers = list(REGISTERS.unpack(data))
    if registers[ORIG_RAX] >> 63 or registers[RAX] != _RESTART_RESTARTBLOCK:
        return
    action = evaluate([Filter(program) for program in programs], _RESTART_SYSCALL, (), machine)
    if action.kind not in (ActionKind.ALLOW, ActionKind.LOG):
        registers[RAX] = _RESTARTNOINTR
        thread.set_registers(NT_PRSTATUS, REGISTERS.pack(*registers))
