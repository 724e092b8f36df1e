"""Threads of this process: starting ours unnoticed, and the system's ids and names of all of them.

Theory of operation
    Python knows a thread by its pthread_t, everybody else by the kernel's thread id. `threading` knows both for
    its own threads. For a thread made by a C library the kernel's id stands somewhere in the pthread structure
    that pthread_t points to; `NativeIds` finds the offset once, from two threads whose ids it knows, reads through
    /proc/self/mem (a wrong address is an error there, not a crash) and believes only ids listed in /proc/self/task.
"""

import os
import signal
import struct
import threading
from typing import Callable, Dict, Iterable, Optional, Tuple

OWN_PREFIX = "kineto-"  # names of the agent's own threads; no sampler shows them
_TASKS = "/proc/self/task"
_SYNCHRONOUS = (
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGABRT,
    signal.SIGTRAP,
    signal.SIGSYS,
)
_PTHREAD_SCAN_BYTES = 2304  # glibc's and musl's structures are about this long
_INT = struct.Struct("i")


def start_thread(name: str, target: Callable[[], None]) -> threading.Thread:
    """A daemon thread to which the kernel gives no signal that the program should get."""

    def run() -> None:
        name_this_thread(name)
        target()

    thread = threading.Thread(target=run, name=name, daemon=True)
    blocked = set(signal.valid_signals()) - set(_SYNCHRONOUS)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return thread


def name_this_thread(name: str) -> None:
    """The name that ps and top show; at most 15 bytes of it."""
    try:
        descriptor = os.open("/proc/thread-self/comm", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.write(descriptor, name.encode()[:15])
    except OSError:
        pass
    finally:
        os.close(descriptor)


def command_name(tid: int) -> str:
    """The kernel's name of a thread, "" if it has ended."""
    try:
        descriptor = os.open("%s/%d/comm" % (_TASKS, tid), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(descriptor, 64).decode("utf-8", "replace").rstrip("\n")
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def thread_names(limit: int, max_chars: int = 64) -> Dict[str, str]:
    """System thread id -> name of at most `limit` threads alive now; Python's name where it has one."""
    named = {thread.native_id: thread.name for thread in threading.enumerate()}
    try:
        tids = sorted(int(entry) for entry in os.listdir(_TASKS))[:limit]
    except OSError:
        tids = sorted(tid for tid in named if tid is not None)[:limit]
    return {str(tid): (named.get(tid) or command_name(tid))[:max_chars] for tid in tids}


class NativeIds:
    """Translates Python's thread identifiers. Used by one thread."""

    def __init__(self) -> None:
        self._known: Dict[int, Tuple[Optional[threading.Thread], int]] = {}
        self._offset: Optional[int] = None
        self._calibrated = False

    def tid(self, ident: int) -> int:
        """The system's id of the thread that Python calls `ident`; 0 for one of ours."""
        thread = threading._active.get(ident)  # type: ignore[attr-defined]
        known = self._known.get(ident)
        if known is not None and known[0] is thread:
            return known[1]
        tid = self._learn(ident, thread)
        self._known[ident] = (thread, tid)
        return tid

    def forget_all_but(self, idents: Iterable[int]) -> None:
        """Ended threads give their identifiers to new ones."""
        alive = set(idents)
        for ident in [ident for ident in self._known if ident not in alive]:
            del self._known[ident]

    def __len__(self) -> int:
        return len(self._known)

    def _learn(self, ident: int, thread: Optional[threading.Thread]) -> int:
        if thread is not None:
            if thread.name.startswith(OWN_PREFIX):
                return 0
            if thread.native_id is not None:
                return thread.native_id
        return self._from_pthread(ident) or ident & 0xFFFFFFFF

    def _from_pthread(self, ident: int) -> int:
        if not self._calibrated:
            self._calibrated = True
            self._offset = _find_tid_offset()
        if self._offset is None:
            return 0
        data = _read_memory(ident + self._offset, _INT.size)
        tid: int = _INT.unpack(data)[0] if len(data) == _INT.size else 0
        return tid if tid > 0 and os.path.exists("%s/%d" % (_TASKS, tid)) else 0


def _read_memory(address: int, size: int) -> bytes:
    try:
        descriptor = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.pread(descriptor, size, address)
    except (OSError, OverflowError):
        return b""
    finally:
        os.close(descriptor)


def _find_tid_offset() -> Optional[int]:
    """Where two threads that know their id have it in their pthread structures."""
    offsets: Optional[set[int]] = None
    for thread in (threading.current_thread(), threading.main_thread()):
        if thread.ident is None or thread.native_id is None:
            return None
        data = _read_memory(thread.ident, _PTHREAD_SCAN_BYTES)
        words = struct.unpack_from("%di" % (len(data) // 4), data)
        found = {4 * index for index, word in enumerate(words) if word == thread.native_id}
        offsets = found if offsets is None else offsets & found
    return min(offsets) if offsets else None
