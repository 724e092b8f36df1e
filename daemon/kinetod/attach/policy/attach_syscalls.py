"""The system calls that the hand-over, the bootstrap and the agent make in a target, as a seccomp filter sees them.

Numbers are those of x86-64 and aarch64 (None: the machine does not have the call). A call made with different arguments
lists each kind of them, since filters check arguments. Any pointer stands for all.
"""

from dataclasses import dataclass

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
