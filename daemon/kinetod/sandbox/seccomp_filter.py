"""A seccomp filter that allows a decoder only the system calls that it needs.

Theory of operation
    A classic BPF program over struct seccomp_data (number, machine, instruction pointer, six arguments). Everything
    else fails with EPERM: numpy, Arrow and the C library cope with that, and a bug causes an error instead of a dead
    process. clone3 fails with ENOSYS, because its flags are in memory that no filter sees: the C library then uses
    clone, which is allowed for new threads only. Only the lower words of arguments are compared: the kernel treats all
    of these as 32 bits. The filter is built for one process and contains its pid.
"""

import ctypes
import functools
import os
import struct
from collections.abc import Callable

from kinetod.base.libc import LIBC

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

_AT_LEAST, _X32 = 0x35, 0x40000000  # JMP|JGE|K; on x86-64 the same calls have a second set of numbers from here on
_FAMILIES = (2, 10, 16)  # AF_INET, AF_INET6, AF_NETLINK: getaddrinfo asks for this machine's addresses

_SYSCALLS = {"x86_64": 317, "aarch64": 277}  # seccomp(2)
_SET_MODE_FILTER, _GET_ACTION_AVAIL = 1, 2
_TSYNC = 1

_Instruction = tuple[int, int, int, int]
# The system calls that a decoder makes: numbers on x86-64 and aarch64 (None: the machine does not have the call).
# All others fail with EPERM: sockets of any family, new processes and programs, signals to others, ptrace and the like,
# changes of mode, owner, times and xattrs (Landlock does not see those), links, mounts, namespaces, keys, io_uring,
# BPF, performance events, shared memory by name, other processes' limits and priorities, ioctl.
Numbers = tuple[int | None, int | None]

ALWAYS: dict[str, Numbers] = {
    # files: Landlock decides which
    "read": (0, 63),
    "write": (1, 64),
    "readv": (19, 65),
    "writev": (20, 66),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "preadv": (295, 69),
    "pwritev": (296, 70),
    "lseek": (8, 62),
    "close": (3, 57),
    "close_range": (436, 436),
    "fstat": (5, 80),
    "stat": (4, None),
    "lstat": (6, None),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "statfs": (137, 43),
    "fstatfs": (138, 44),
    "access": (21, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "open": (2, None),
    "openat": (257, 56),
    "getdents64": (217, 61),
    "getcwd": (79, 17),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "ftruncate": (77, 46),
    "fallocate": (285, 47),
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "fadvise64": (221, 223),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "umask": (95, 166),
    # memory
    "mmap": (9, 222),
    "munmap": (11, 215),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "msync": (26, 227),
    "mincore": (27, 232),
    "brk": (12, 214),
    "membarrier": (324, 283),
    # threads and time
    "futex": (202, 98),
    "set_robust_list": (273, 99),
    "get_robust_list": (274, 100),
    "rseq": (334, 293),
    "set_tid_address": (218, 96),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120),
    "sched_get_priority_max": (146, 125),
    "sched_get_priority_min": (147, 126),
    "getcpu": (309, 168),
    "get_mempolicy": (239, 236),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "times": (100, 153),
    "setitimer": (38, 103),
    # its own state
    "getrusage": (98, 165),
    "sysinfo": (99, 179),
    "uname": (63, 160),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "getppid": (110, 173),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getrandom": (318, 278),
    "getrlimit": (97, 163),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),
    # pipes and waiting
    "poll": (7, None),
    "ppoll": (271, 73),
    "select": (23, None),
    "pselect6": (270, 72),
    "pipe": (22, None),
    "pipe2": (293, 59),
    "eventfd2": (290, 19),
}
# System calls denied to the upload worker: access to other processes, and ways around filters.
OTHERS: dict[str, Numbers] = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "mount": (165, 40),
    "unshare": (272, 97),
    "setns": (308, 268),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
}
# Denied where a process acts as another user: ways back.
IDENTITY: dict[str, Numbers] = {
    "setuid": (105, 146),
    "setgid": (106, 144),
    "setreuid": (113, 145),
    "setregid": (114, 143),
    "setgroups": (116, 159),
    "setresuid": (117, 147),
    "setresgid": (119, 149),
    "setfsuid": (122, 151),
    "setfsgid": (123, 152),
    "capset": (126, 91),
}
# Allowed depending on arguments; `seccomp_filter` has the rules.
CLONE: Numbers = (56, 220)
CLONE3: Numbers = (435, 435)
FCNTL: Numbers = (72, 25)
PRCTL: Numbers = (157, 167)
PRLIMIT: Numbers = (302, 261)
SOCKET: Numbers = (41, 198)
KILL: Numbers = (62, 129)
TGKILL: Numbers = (234, 131)


def program(pid: int, machine: str) -> bytes:
    """Builds the filter for the process with this pid. machine: as in os.uname().machine."""
    column = _MACHINES[machine][1]
    code: list[_Instruction] = []
    code += _if(CLONE[column], [*_masked(0, _NAMESPACES, 0), *_masked(0, _THREAD, _THREAD, allow=True)])
    code += _if(CLONE3[column], [(_RETURN, 0, 0, _ERRNO | _ENOSYS)])
    code += _if(FCNTL[column], _one_of(1, _FCNTL_COMMANDS))
    code += _if(PRCTL[column], _one_of(0, _PRCTL_OPTIONS))
    code += _if(PRLIMIT[column], _one_of(0, (0,)))
    for own in (KILL, TGKILL):
        code += _if(own[column], _one_of(0, (pid,)))
    code.append((_RETURN, 0, 0, _ERRNO | _EPERM))
    return _for_all(machine) + _packed(code)


@functools.cache
def _for_all(machine: str) -> bytes:
    """The part of `program` that is the same for all processes."""
    code, column = _begin(machine)
    for numbers in ALWAYS.values():
        if (number := numbers[column]) is not None:
            code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    return _packed(code)


def that_reads(target: int) -> Callable[[int, str], bytes]:
    """Builds filters that let a process read the memory of one other process, open no socket and stay who it is."""
    return functools.partial(without_others, target=target)


def without_others(pid: int, machine: str, target: int | None = None) -> bytes:
    """Builds a filter that denies only access to other processes: Unix sockets, signals, ptrace and the like,
    namespaces, io_uring. target: as in that_reads.
    """
    code, column = _begin(machine)
    code += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    code += _if(SOCKET[column], _one_of(0, _FAMILIES if target is None else ()))
    for own in (KILL, TGKILL):
        code += _if(own[column], _one_of(0, (pid,)))
    if target is not None:
        code += _if(OTHERS["process_vm_readv"][column], _one_of(0, (target,)))
        for numbers in IDENTITY.values():
            code += _if(numbers[column], [])
    for numbers in OTHERS.values():
        code += _if(numbers[column], [])
    code.append((_RETURN, 0, 0, _ALLOW))
    return _packed(code)


def _begin(machine: str) -> tuple[list[_Instruction], int]:
    """Returns the beginning, after which the call's number can be compared, and the column of `calls`."""
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
    """The instructions for the call with this number: EPERM by default."""
    body = [*then, (_RETURN, 0, 0, _ERRNO | _EPERM)]
    return [] if number is None else [(_EQUAL, 0, len(body), number), *body]


def _one_of(argument: int, values: tuple[int, ...]) -> list[_Instruction]:
    code: list[_Instruction] = [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument)]
    for value in values:
        code += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
    return code


def _masked(argument: int, mask: int, wanted: int, *, allow: bool = False) -> list[_Instruction]:
    """Refuses a call whose masked argument differs from the wanted one; allow: allows the others."""
    code: list[_Instruction] = [
        (_LOAD, 0, 0, _ARGUMENTS + 8 * argument),
        (_AND, 0, 0, mask),
        (_EQUAL, 1, 0, wanted),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
    ]
    return [*code, (_RETURN, 0, 0, _ALLOW)] if allow else code


def prepare() -> None:
    """Builds, before forking, what install() needs and what is common to all processes of this machine."""
    _for_all(os.uname().machine)


def available() -> bool:
    """Whether this kernel supports filters, and its machine is known."""
    machine = os.uname().machine
    if machine not in _MACHINES:
        return False
    action = ctypes.c_uint32(_ERRNO)
    answer = LIBC.syscall(_SYSCALLS[machine], _GET_ACTION_AVAIL, 0, ctypes.byref(action))
    return bool(answer == 0)


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def install(make: Callable[[int, str], bytes] = program) -> None:
    """Permanently installs the filter in all threads of this process. Needs no_new_privs. Raises OSError."""
    machine = os.uname().machine
    code = make(os.getpid(), machine)
    filter_ = _Program(len(code) // 8, code)
    if LIBC.syscall(_SYSCALLS[machine], _SET_MODE_FILTER, _TSYNC, ctypes.byref(filter_)):
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp: {os.strerror(number) if number else 'a thread cannot take the filter'}")
