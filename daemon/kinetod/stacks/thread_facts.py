"""What the kernel tells of each thread of a process: its state, and the system call in which it waits.

Nothing here touches the process's memory, so nothing of the process can block the reader.
"""

import contextlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from kinetod.base.safe_text import clean
from kinetod.processes.cgroups import frozen_by
from kinetod.processes.identity import PROC

MAX_PATH_CHARS = 200
_STATES = {
    **dict.fromkeys("SI", "SLEEPING"),
    "R": "RUNNING",
    "D": "UNINTERRUPTIBLE",
    "T": "STOPPED",
    "t": "TRACED",
    **dict.fromkeys("ZXx", "ENDED"),
}
_MAX_TABLE_BYTES = 8 << 20
_LISTENS = "0A"  # TCP_LISTEN
_SWITCHES = "voluntary_ctxt_switches"
_TICK_NS = 10**9 // os.sysconf("SC_CLK_TCK")
_USER_TICKS, _SYSTEM_TICKS = 11, 12  # indexes in /proc/PID/task/TID/stat after the name
# Calls in which threads wait, by number on x86-64 and on aarch64.
_CALLS: dict[str, tuple[int, int]] = {
    "read": (0, 63),
    "readv": (19, 65),
    "pread64": (17, 67),
    "preadv": (295, 69),
    "write": (1, 64),
    "writev": (20, 66),
    "pwrite64": (18, 68),
    "pwritev": (296, 70),
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "flock": (73, 32),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "openat": (257, 56),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "getdents64": (217, 61),
    "recvfrom": (45, 207),
    "recvmsg": (47, 212),
    "recvmmsg": (299, 243),
    "sendto": (44, 206),
    "sendmsg": (46, 211),
    "accept": (43, 202),
    "accept4": (288, 242),
    "connect": (42, 203),
    "ppoll": (271, 73),
    "pselect6": (270, 72),
    "epoll_pwait": (281, 22),
    "epoll_pwait2": (441, 441),
    "futex": (202, 98),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "clone": (56, 220),
    "clone3": (435, 435),
    "wait4": (61, 260),
    "waitid": (247, 95),
    "rt_sigtimedwait": (128, 137),
    "rt_sigsuspend": (130, 133),
    "semtimedop": (220, 192),
    "msgrcv": (70, 188),
    "io_uring_enter": (426, 426),
    "restart_syscall": (219, 128),
}
_X86_64 = os.uname().machine == "x86_64"
_NAMES = {both[0 if _X86_64 else 1]: name for name, both in _CALLS.items()}
if _X86_64:
    _NAMES |= {2: "open", 4: "stat", 7: "poll", 23: "select", 34: "pause", 58: "vfork", 232: "epoll_wait"}
_TAKES_DESCRIPTOR = re.compile(r"p?(read|write)(v|64)?|f(data)?sync|flock|fcntl|ioctl|recv.*|send.*|accept4?|connect")
_SOCKET = re.compile(r"socket:\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class BlockingCall:
    """A system call. target: the file or peer of its descriptor, for people; empty: it has none, or it is hidden."""

    name: str
    arguments: tuple[int, ...]
    target: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadFacts:
    """One thread. inner: its number as the process sees it. switches: how often it has waited, in all.

    delayed_ns: for how long it has waited for a processor, in all, if it runs or waits for a futex. wakes_per_s: if it
    wakes all the time in one call, without those delays. kernel_function: where state D waits; empty: unknown.
    stack_pointer: of a thread in the kernel; 0: it runs, or that is hidden. driver_call: the function of CUDA's driver
    in which it waits; empty: it is in none, or that is unknown.
    """

    thread: int
    inner: int
    name: str
    state: str
    cpu_ns: int = 0
    switches: int = 0
    delayed_ns: int = 0
    wakes_per_s: float = 0.0
    call: BlockingCall | None = None
    kernel_function: str = ""
    stack_pointer: int = 0
    driver_call: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadTable:
    """All threads, the main one first. frozen: whether its control group is; tracer: pid of its debugger, 0: none."""

    pid: int
    threads: list[ThreadFacts] = field(default_factory=list)
    left_out: int = 0
    frozen: bool = False
    tracer: int = 0
    uses_gpu: bool = False

    @property
    def inner_pid(self) -> int:
        """Its pid as it sees it."""
        return next((each.inner for each in self.threads if each.thread == self.pid), self.pid)


def read_process(pid: int, most: int, proc: Path = PROC) -> ThreadTable:
    """Raises ProcessLookupError if it does not exist."""
    folder = proc / str(pid)
    try:
        tids = sorted((int(each.name) for each in (folder / "task").iterdir()), key=lambda tid: (tid != pid, tid))
    except FileNotFoundError:
        raise ProcessLookupError(f"there is no process {pid}") from None
    targets = _Targets(folder)
    threads = []
    for tid in tids[:most]:
        with contextlib.suppress(OSError, ValueError):  # it has just ended
            threads.append(_thread(folder / "task" / str(tid), tid, targets))
    return ThreadTable(
        pid=pid,
        threads=threads,
        left_out=max(0, len(tids) - most),
        frozen=bool(frozen_by(pid, proc)),
        tracer=int(_status(folder).get("TracerPid", "0")),
        uses_gpu=targets.any_gpu(),
    )


def _thread(task: Path, tid: int, targets: "_Targets") -> ThreadFacts:
    """Raises OSError, ValueError."""
    head, _, tail = (task / "stat").read_text(errors="replace").rpartition(")")
    fields = tail.split()
    state = _STATES.get(fields[0], "SLEEPING")
    status = _status(task)
    call, stack_pointer = _call(task, targets)
    return ThreadFacts(
        thread=tid,
        inner=int(status.get("NSpid", str(tid)).split()[-1]),
        name=clean(head.partition("(")[2], 64),
        state=state,
        cpu_ns=(int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])) * _TICK_NS,
        call=call,
        switches=int(status.get(_SWITCHES, "0")),
        delayed_ns=_delayed_ns(task) if call is None or call.name == "futex" else 0,
        kernel_function=_kernel_function(task) if state == "UNINTERRUPTIBLE" else "",
        stack_pointer=stack_pointer,
    )


def _status(folder: Path) -> dict[str, str]:
    try:
        text = (folder / "status").read_text(errors="replace")
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


def _delayed_ns(task: Path) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int((task / "schedstat").read_text().split()[1])
    return 0


def _kernel_function(task: Path) -> str:
    with contextlib.suppress(OSError):
        name = (task / "wchan").read_text(errors="replace").strip()
        return clean(name, 64) if name != "0" else ""
    return ""


def _call(task: Path, targets: "_Targets") -> tuple[BlockingCall | None, int]:
    """The call, and the stack pointer."""
    try:
        number, *arguments, stack_pointer, _instruction = (
            int(word, 0) for word in (task / "syscall").read_text().split()
        )
    except (OSError, ValueError):  # it runs, or that is hidden from us
        return None, 0
    if number < 0 or (name := _NAMES.get(number)) is None:
        return None, stack_pointer
    target = targets.named(arguments[0]) if _TAKES_DESCRIPTOR.fullmatch(name) else ""
    return BlockingCall(name, tuple(arguments), target), stack_pointer


class _Targets:
    """The descriptors of a process, as people know them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._peers: dict[str, str] | None = None

    def any_gpu(self) -> bool:
        """Whether the process has a GPU open."""
        with contextlib.suppress(OSError):
            return any(is_gpu(self._link(each.name)) for each in (self._folder / "fd").iterdir())
        return False

    def named(self, descriptor: int) -> str:
        """The file, or the peer of a socket."""
        link = self._link(str(descriptor & 0xFFFFFFFF))
        if link.startswith("pipe:"):
            return "a pipe"
        if (match := _SOCKET.fullmatch(link)) is not None:
            return self._peer(match[1])
        return clean(link, MAX_PATH_CHARS)

    def _link(self, name: str) -> str:
        with contextlib.suppress(OSError):
            return str((self._folder / "fd" / name).readlink())
        return ""

    def _peer(self, inode: str) -> str:
        if self._peers is None:
            self._peers = {**self._unix(), **self._tcp("tcp6"), **self._tcp("tcp")}
        return self._peers.get(inode, "a socket")

    def _lines(self, table: str) -> list[list[str]]:
        with contextlib.suppress(OSError), (self._folder / "net" / table).open("rb") as file:
            text = file.read(_MAX_TABLE_BYTES).decode("utf-8", "replace")
            return [line.split() for line in text.split("\n")[1:]]
        return []

    def _tcp(self, table: str) -> dict[str, str]:
        found = {}
        for line in self._lines(table):
            if len(line) > 9:
                _, local, remote, state, *_ = line
                found[line[9]] = f"port {_port(local)}" if state == _LISTENS else _address(remote)
        return found

    def _unix(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for line in self._lines("unix"):  # names are their owners' choice, line breaks included
            if len(line) > 6 and line[6].isdigit() and line[0].endswith(":"):
                name = f"the Unix socket {clean(line[7], MAX_PATH_CHARS)}" if len(line) == 8 else "a Unix socket"
                found.setdefault(line[6], name)
        return found


def is_gpu(path: str) -> bool:
    """Whether it is the file of a GPU or of its driver."""
    return path.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri/"))


def _port(text: str) -> str:
    return str(int(text.rpartition(":")[2], 16))


def _address(text: str) -> str:
    """The kernel's 0100007F:1F90 as 127.0.0.1:8080."""
    import ipaddress  # few threads wait for a peer

    words = bytes.fromhex(text.rpartition(":")[0])
    packed = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
    address = ipaddress.ip_address(packed)
    mapped = getattr(address, "ipv4_mapped", None)
    shown = mapped or address
    return f"{f'[{shown}]' if shown.version == 6 else shown}:{_port(text)}"
