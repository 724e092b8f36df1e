"""A seccomp filter that allows a decoder the system calls of `decoder_syscalls` and no others.

Theory of operation
    A classic BPF program over struct seccomp_data (number, machine, instruction pointer, six arguments). Whatever is
    not allowed fails with EPERM: numpy, Arrow and the C library live with that, and a bug gets an error and not
    a dead process. clone3 fails with ENOSYS, because its flags lie in memory that no filter sees: the C library
    then takes clone, of which only new threads are allowed. Only the lower words of arguments are compared: the kernel
    takes all of these as 32 bits. The filter is built for one process, whose pid is in it.
"""

import ctypes
import functools
import os
import platform
import struct
from collections.abc import Callable

from kinetod.base.libc import LIBC
from kinetod.sandbox import decoder_syscalls

_LOAD, _EQUAL, _AND, _RETURN = 0x20, 0x15, 0x54, 0x06  # linux/bpf_common.h: BPF_LD|ABS, JMP|JEQ, ALU|AND, RET, all |K
_NUMBER, _MACHINE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _ENOSYS = 1, 38
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # AUDIT_ARCH_*, column in `calls`

_THREAD = 0x00010000 | 0x00000800 | 0x00000100  # CLONE_THREAD | CLONE_SIGHAND | CLONE_VM
_NAMESPACES = 0x7E020000 | 0x00000080  # CLONE_NEWNS, CGROUP, UTS, IPC, USER, PID, NET, TIME
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC; not F_SETOWN, by which signals are sent.
_FCNTL_COMMANDS = (0, 1, 2, 3, 4, 1030)
_PRCTL_OPTIONS = (15, 16, 0x53564D41)  # PR_SET_NAME, PR_GET_NAME, PR_SET_VMA: names of threads and of memory

_AT_LEAST, _X32 = 0x35, 0x40000000  # JMP|JGE|K; on x86-64 the same calls have second numbers from here on
_FAMILIES = (2, 10, 16)  # AF_INET, AF_INET6, AF_NETLINK: getaddrinfo asks for this machine's addresses

_SYSCALLS = {"x86_64": 317, "aarch64": 277}  # seccomp(2)
_SET_MODE_FILTER, _GET_ACTION_AVAIL = 1, 2
_TSYNC = 1

_Instruction = tuple[int, int, int, int]


def program(pid: int, machine: str) -> bytes:
    """The filter for the process of this pid. machine: as in platform.machine()."""
    column = _MACHINES[machine][1]
    code: list[_Instruction] = []
    code += _if(
        decoder_syscalls.CLONE[column], [*_masked(0, _NAMESPACES, 0), *_masked(0, _THREAD, _THREAD, allow=True)]
    )
    code += _if(decoder_syscalls.CLONE3[column], [(_RETURN, 0, 0, _ERRNO | _ENOSYS)])
    code += _if(decoder_syscalls.FCNTL[column], _one_of(1, _FCNTL_COMMANDS))
    code += _if(decoder_syscalls.PRCTL[column], _one_of(0, _PRCTL_OPTIONS))
    code += _if(decoder_syscalls.PRLIMIT[column], _one_of(0, (0,)))
    for own in (decoder_syscalls.KILL, decoder_syscalls.TGKILL):
        code += _if(own[column], _one_of(0, (pid,)))
    code.append((_RETURN, 0, 0, _ERRNO | _EPERM))
    return _for_all(machine) + _packed(code)


@functools.cache
def _for_all(machine: str) -> bytes:
    """The part of `program` that is the same for all processes."""
    code, column = _begin(machine)
    for numbers in decoder_syscalls.ALWAYS.values():
        if (number := numbers[column]) is not None:
            code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    return _packed(code)


def without_others(pid: int, machine: str) -> bytes:
    """Allows all but what reaches other processes: Unix sockets, signals, ptrace and its kin, namespaces, io_uring."""
    code, column = _begin(machine)
    code += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    code += _if(decoder_syscalls.SOCKET[column], _one_of(0, _FAMILIES))
    for own in (decoder_syscalls.KILL, decoder_syscalls.TGKILL):
        code += _if(own[column], _one_of(0, (pid,)))
    for numbers in decoder_syscalls.OTHERS.values():
        code += _if(numbers[column], [])
    code.append((_RETURN, 0, 0, _ALLOW))
    return _packed(code)


def _begin(machine: str) -> tuple[list[_Instruction], int]:
    """Leaves the call's number to compare, and says the column of `calls`."""
    audit, column = _MACHINES[machine]
    return [
        (_LOAD, 0, 0, _MACHINE),
        (_EQUAL, 1, 0, audit),
        (_RETURN, 0, 0, _KILL_PROCESS),  # another instruction set has other numbers
        (_LOAD, 0, 0, _NUMBER),
    ], column


def _packed(code: list[_Instruction]) -> bytes:
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)


def _if(number: int | None, then: list[_Instruction]) -> list[_Instruction]:
    """The instructions for the call of this number: EPERM unless told otherwise."""
    body = [*then, (_RETURN, 0, 0, _ERRNO | _EPERM)]
    return [] if number is None else [(_EQUAL, 0, len(body), number), *body]


def _one_of(argument: int, values: tuple[int, ...]) -> list[_Instruction]:
    code: list[_Instruction] = [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument)]
    for value in values:
        code += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
    return code


def _masked(argument: int, mask: int, wanted: int, *, allow: bool = False) -> list[_Instruction]:
    """Refuses a call of which the masked argument is not the wanted one; allow: allows the others."""
    code: list[_Instruction] = [
        (_LOAD, 0, 0, _ARGUMENTS + 8 * argument),
        (_AND, 0, 0, mask),
        (_EQUAL, 1, 0, wanted),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
    ]
    return [*code, (_RETURN, 0, 0, _ALLOW)] if allow else code


def prepare() -> None:
    """Makes what install() needs and what is the same for all processes of this machine, before they are forked."""
    _for_all(platform.machine())


def available() -> bool:
    """Whether this kernel takes filters, and we know its machine."""
    machine = platform.machine()
    if machine not in _MACHINES:
        return False
    action = ctypes.c_uint32(_ERRNO)
    answer = LIBC.syscall(_SYSCALLS[machine], _GET_ACTION_AVAIL, 0, ctypes.byref(action))
    return bool(answer == 0)


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def install(make: Callable[[int, str], bytes] = program) -> None:
    """Installs the filter in all threads of this process, for good. Needs no_new_privs. Raises OSError."""
    machine = platform.machine()
    code = make(os.getpid(), machine)
    filter_ = _Program(len(code) // 8, code)
    if LIBC.syscall(_SYSCALLS[machine], _SET_MODE_FILTER, _TSYNC, ctypes.byref(filter_)):
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp: {os.strerror(number) if number else 'a thread cannot take the filter'}")
