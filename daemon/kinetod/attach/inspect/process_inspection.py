"""Reads from /proc the facts about a process and about ourselves that matter for attaching.

Theory of operation
    Nothing here stops or changes the process. Values that the kernel hides from us are None or empty: the rules that
    use them (preconditions.py) then say "unknown". All reads are bounded, but reading a hostile process can still block
    (its memory may lie on a file system of its own): call this in a process that can be killed.

    `access` asks the kernel instead of imitating it: process_vm_readv of an address that nobody maps fails with
    EFAULT where tracing would be allowed (credentials, capabilities, Yama and other security modules) and with EPERM
    where not.
"""

import contextlib
import ctypes
import errno
import os
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from kinetod.base.libc import LIBC, Iovec
from kinetod.processes import profiler_signs
from kinetod.processes.budgets import BudgetRoom, what_is_left
from kinetod.processes.cgroups import frozen_by

PROC = Path("/proc")
NAMESPACES = ("pid", "mnt", "net", "user")
# The capabilities that matter for attaching, by their number in capability(7).
CAPABILITIES = {1: "CAP_DAC_OVERRIDE", 2: "CAP_DAC_READ_SEARCH", 19: "CAP_SYS_PTRACE", 21: "CAP_SYS_ADMIN"}
SECCOMP_STRICT, SECCOMP_FILTER = 1, 2
X86_64, AARCH64 = "x86-64", "aarch64"

_MAX_TEXT_BYTES = 1 << 16
_MAX_MAPS_BYTES = 32 << 20
_CUPTI_STAYS = "kineto-cupti-stays-"  # agent/native/cupti/detach_safety.c
_HOST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO: the same on every Linux
_STAT_FLAGS, _PF_EXITING, _PF_KTHREAD = 6, 0x4, 0x200000  # index in /proc/PID/stat after the name
_ELF_BITS = {1: 32, 2: 64}
_ELF_MACHINES = {3: "i386", 40: "arm", 62: X86_64, 183: AARCH64}
_SECTION_NAME_BYTES = 1 << 16
_LIBPYTHON = re.compile(r"libpython3\.\d+[a-z]*\.so")
_OTHER_PYTHONS = (("PyPy", re.compile(r"libpypy[\d.]*-c\.so|pypy[\d.]*")), ("GraalPy", re.compile(r"libpythonvm\.so")))
# Of a process whose threads outlive its first one (pthread_exit).
MAIN_THREAD_ENDED = "its main thread ended before its other threads, so /proc shows neither its memory nor its files"
MAIN_THREAD_ADVICE = "make the main thread wait for the others (join) instead of ending"


class Access(Enum):
    """Whether the kernel lets us trace the process."""

    ALLOWED = "allowed"
    REFUSED = "refused"
    UNKNOWN = "unknown"  # it has no memory (kernel thread, zombie), or the call does not exist


@dataclass(frozen=True, slots=True, kw_only=True)
class Seccomp:
    """A thread's state. mode: 0 none, 1 strict, 2 filter; filters: how many (0 before Linux 5.10 even in mode 2)."""

    mode: int
    filters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Executable:
    """The head of /proc/PID/exe. frozen: the tool that packed the program; empty: none."""

    path: str
    deleted: bool
    bits: int  # 0: unknown
    machine: str
    frozen: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedProcess:
    """One process. uids: real, effective, saved, file system."""

    pid: int
    process_pid: int  # differs from `pid` if that is the number of a thread
    name: str
    state: str  # R, S, D, T, t, Z, X, I
    kernel_thread: bool
    exiting: bool
    tracer_pid: int
    tracer_name: str
    uids: tuple[int, int, int, int]
    namespace_pids: tuple[int, ...]  # the pid in our namespace first, in its own last
    foreign_namespaces: tuple[str, ...] | None  # those of NAMESPACES that are not ours
    no_new_privs: bool
    shadow_stack: bool
    seccomp: Seccomp
    dumpable: bool | None  # None: unknown (root's processes)
    executable: Executable | None
    access: Access
    files_visible: bool  # whether /proc/PID/fd can be read
    thread_count: int = 1
    switches: int = 0  # context switches of the main thread so far
    frozen_by: str = ""  # file of the control group that freezes it
    sees_proc: bool = True  # whether /proc is mounted in its root directory
    budgets: tuple[BudgetRoom, ...] = ()  # the limits that an attach draws on


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFacts:
    """This process and the kernel's rules. pids: the daemon's own processes, which are never targets."""

    uid: int
    pids: frozenset[int]
    capabilities: frozenset[str]
    ptrace_scope: int | None  # of Yama; None: there is no Yama
    seccomp: Seccomp
    init_seccomp: Seccomp | None  # of pid 1 in our PID namespace
    host_pid_namespace: bool
    machine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedFacts:
    """Facts from /proc/PID/maps and /proc/PID/fd. Paths as the process sees them."""

    libc: str  # "glibc", "musl" or "" for neither
    libpython: str
    other_python: str  # an interpreter that is not CPython: "PyPy"
    cuda: tuple[str, ...]  # libcuda, libcudart
    cupti: str
    torch: str
    gpu_files: tuple[str, ...]
    profilers: tuple[str, ...] = ()  # other tools whose libraries show that they trace it
    cupti_stays: bool = False  # a capture has left CUPTI in it permanently, because of CUDA graphs


def read_process(pid: int, proc: Path = PROC) -> InspectedProcess:
    """Reads the facts about a process. Raises ProcessLookupError if it does not exist."""
    folder = proc / str(pid)
    status, flags = read_status(folder), _flags(folder)
    if not status:
        raise ProcessLookupError(f"there is no process {pid}")
    tracer = _number(status.get("TracerPid"))
    uids = _numbers(status.get("Uid"))
    return InspectedProcess(
        pid=pid,
        process_pid=_number(status.get("Tgid")) or pid,
        name=status.get("Name", ""),
        state=status.get("State", "?")[:1],
        kernel_thread=status.get("Kthread") == "1" or bool(flags & _PF_KTHREAD),
        exiting=bool(flags & _PF_EXITING),
        tracer_pid=tracer,
        tracer_name=read_status(proc / str(tracer)).get("Name", "") if tracer else "",
        uids=(uids[0], uids[1], uids[2], uids[3]) if len(uids) == 4 else (-1, -1, -1, -1),
        namespace_pids=tuple(_numbers(status.get("NSpid"))) or (pid,),
        foreign_namespaces=_foreign_namespaces(folder, proc),
        no_new_privs=status.get("NoNewPrivs") == "1",
        shadow_stack="shstk" in status.get("x86_Thread_features", "").split(),
        seccomp=_seccomp(status),
        dumpable=_dumpable(folder, uids),
        executable=_executable(folder),
        access=_access(pid),
        files_visible=_files_visible(folder),
        thread_count=_number(status.get("Threads")),
        switches=sum(_number(status.get(f"{kind}_ctxt_switches")) for kind in ("voluntary", "nonvoluntary")),
        frozen_by=frozen_by(pid, proc),
        sees_proc=_sees_proc(folder),
        budgets=what_is_left(pid, proc=proc),
    )


def read_own(proc: Path = PROC) -> OwnFacts:
    """Reads what this process may do. Its parent counts as the daemon."""
    status = read_status(proc / "self")
    effective = int(status.get("CapEff", "0"), 16)
    init = read_status(proc / "1")
    return OwnFacts(
        uid=os.geteuid(),
        pids=frozenset((os.getpid(), os.getppid())),
        capabilities=frozenset(name for bit, name in CAPABILITIES.items() if effective >> bit & 1),
        ptrace_scope=_ptrace_scope(proc),
        seccomp=_seccomp(status),
        init_seccomp=_seccomp(init) if init else None,
        host_pid_namespace=_link(proc / "self" / "ns" / "pid") == _HOST_PID_NAMESPACE,
        machine={"x86_64": X86_64, "aarch64": AARCH64}.get(os.uname().machine, os.uname().machine),
    )


def thread_seccomp(pid: int, tid: int, proc: Path = PROC) -> Seccomp | None:
    """Returns one thread's seccomp state, which may differ from its process's; None if the thread has ended."""
    status = read_status(proc / str(pid) / "task" / str(tid))
    return _seccomp(status) if status else None


def read_mapped(pid: int, proc: Path = PROC) -> MappedFacts | None:
    """Reads what the process has loaded; None if the daemon may not read that."""
    folder = proc / str(pid)
    try:
        paths = mapped_paths(folder)
    except OSError:
        return None
    if not paths:  # those of zombies and kernel threads are empty
        return None
    names = {path: path.rpartition("/")[2] for path in paths}

    def first(pattern: str) -> str:
        return next((path for path, name in names.items() if re.match(pattern, name)), "")

    return MappedFacts(
        libc="musl" if first(r"(ld-musl|libc\.musl)-") else "glibc" if first(r"libc(\.so\.6|-2\.\d+\.so)$") else "",
        libpython=next((path for path, name in names.items() if _LIBPYTHON.match(name)), ""),
        other_python=_other_python(names.values()),
        cuda=tuple(filter(None, (first(r"libcuda\.so"), first(r"libcudart\.so")))),
        cupti=first(r"libcupti\.so"),
        torch=first(r"libtorch_python\.so") or first(r"libtorch(_cpu)?\.so"),
        gpu_files=_gpu_files(folder),
        profilers=tuple(sign.product for sign, _library in profiler_signs.of_libraries(list(names.values()))),
        cupti_stays=bool(first("memfd:" + _CUPTI_STAYS)),
    )


def read_file(path: Path, limit: int = _MAX_TEXT_BYTES) -> bytes:
    """Reads at most `limit` bytes of a regular file, without ever blocking on it. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    parts = []
    try:
        while limit and (part := os.read(descriptor, min(limit, 1 << 20))):
            parts.append(part)
            limit -= len(part)
    finally:
        os.close(descriptor)
    return b"".join(parts)


def environment(pid: int, proc: Path = PROC) -> dict[str, str] | None:
    """Returns the environment that the process was started with; None if it may not be read."""
    with contextlib.suppress(OSError):
        text = read_file(proc / str(pid) / "environ", 1 << 21).decode("utf-8", "replace")
        return {name: value for name, _, value in (entry.partition("=") for entry in text.split("\0"))}
    return None


def read_status(folder: Path) -> dict[str, str]:
    """Returns the fields of /proc/PID/status; empty if there is no such process."""
    with contextlib.suppress(OSError):
        lines = read_file(folder / "status").decode("utf-8", "replace").split("\n")
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines) if value}
    return {}


def _flags(folder: Path) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(read_file(folder / "stat").rpartition(b")")[2].split()[_STAT_FLAGS])
    return 0


def _number(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0


def _numbers(text: str | None) -> list[int]:
    return [int(word) for word in (text or "").split() if word.isdecimal()]


def _seccomp(status: dict[str, str]) -> Seccomp:
    return Seccomp(mode=_number(status.get("Seccomp")), filters=_number(status.get("Seccomp_filters")))


def _link(path: Path) -> str:
    with contextlib.suppress(OSError):
        return str(path.readlink())
    return ""


def _foreign_namespaces(folder: Path, proc: Path) -> tuple[str, ...] | None:
    theirs = {name: _link(folder / "ns" / name) for name in NAMESPACES}
    if not all(theirs.values()):
        return None
    return tuple(name for name in NAMESPACES if theirs[name] != _link(proc / "self" / "ns" / name))


def _sees_proc(folder: Path) -> bool:
    """Checks the link itself: its target is another process's business. True where the root cannot be read."""
    try:
        (folder / "root" / "proc" / "self").lstat()
    except (FileNotFoundError, NotADirectoryError):
        return not (folder / "root").exists()
    except OSError:
        return True
    return True


def _dumpable(folder: Path, uids: list[int]) -> bool | None:
    """The files of a non-dumpable process belong to root, whatever user it runs as."""
    if len(uids) != 4 or uids[1] == 0:
        return None
    with contextlib.suppress(OSError):
        return (folder / "maps").stat().st_uid == uids[1]
    return None


def _ptrace_scope(proc: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int((proc / "sys/kernel/yama/ptrace_scope").read_text())
    return None


def _executable(folder: Path) -> Executable | None:
    path = _link(folder / "exe")
    if not path:
        return None
    deleted = path.endswith(" (deleted)")
    bits, machine, frozen = 0, "", ""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder / "exe", os.O_RDONLY | os.O_CLOEXEC)
        try:
            bits, machine = elf_kind(os.pread(descriptor, 20, 0))
            if bits == 64 and b"pydata" in _section_names(descriptor):
                frozen = "PyInstaller"
        finally:
            os.close(descriptor)
    return Executable(path=path.removesuffix(" (deleted)"), deleted=deleted, bits=bits, machine=machine, frozen=frozen)


def elf_kind(head: bytes) -> tuple[int, str]:
    """Returns bits and machine from the first 20 bytes of an ELF file; (0, "") for any other file."""
    if len(head) < 20 or head[:4] != b"\x7fELF":
        return 0, ""
    number = int.from_bytes(head[18:20], "little")
    return _ELF_BITS.get(head[4], 0), _ELF_MACHINES.get(number, f"machine {number}")


def _section_names(descriptor: int) -> list[bytes]:
    """Returns the section names of a 64-bit little-endian ELF file; empty if it has none or is damaged."""
    with contextlib.suppress(struct.error):
        head = os.pread(descriptor, 64, 0)
        (table,) = struct.unpack_from("<Q", head, 40)
        size, _count, index = struct.unpack_from("<HHH", head, 58)
        header = os.pread(descriptor, 64, table + size * index) if table < 1 << 62 else b""
        offset, length = struct.unpack_from("<QQ", header, 24)
        if offset < 1 << 62:
            return os.pread(descriptor, min(length, _SECTION_NAME_BYTES), offset).split(b"\0")
    return []


_process_vm_readv = LIBC.process_vm_readv
_process_vm_readv.restype = ctypes.c_ssize_t
_process_vm_readv.argtypes = (
    ctypes.c_int,
    *(ctypes.c_void_p, ctypes.c_ulong) * 2,
    ctypes.c_ulong,
)


def _access(pid: int) -> Access:
    buffer = ctypes.create_string_buffer(1)
    ours, theirs = Iovec(ctypes.addressof(buffer), 1), Iovec(0, 1)
    read = _process_vm_readv(pid, ctypes.addressof(ours), 1, ctypes.addressof(theirs), 1, 0)
    if read >= 0 or ctypes.get_errno() == errno.EFAULT:
        return Access.ALLOWED
    return Access.REFUSED if ctypes.get_errno() == errno.EPERM else Access.UNKNOWN


def _files_visible(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def mapped_paths(folder: Path) -> list[str]:
    """Returns each file that a process maps once, in order. folder: /proc/PID. Raises OSError."""
    content = read_file(folder / "maps", _MAX_MAPS_BYTES)
    lines = (line for line in content.split(b"\n") if b"/" in line)
    paths = dict.fromkeys(line[line.index(b"/") :] for line in lines)
    return [os.fsdecode(path).removesuffix(" (deleted)") for path in paths]


def _other_python(names: Iterable[str]) -> str:
    found = list(names)
    return next((title for title, pattern in _OTHER_PYTHONS if any(map(pattern.fullmatch, found))), "")


def _gpu_files(folder: Path) -> tuple[str, ...]:
    found = set()
    with contextlib.suppress(OSError):
        for entry in (folder / "fd").iterdir():
            path = _link(entry)
            if path.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri/render")):
                found.add(path)
    return tuple(sorted(found))
