"""Threads of this process: starting ours unnoticed, and the system's ids and names of all of them.

Theory of operation
    `threading` is never imported from here: up to CPython 3.12 the thread that imports it first becomes its
    "MainThread", and the agent may be brought into a program that has not imported it yet. Our threads are made by
    `_thread` and do not show in threading.enumerate(); where the program has imported `threading`, it is asked for
    the program's own threads.

"""

import _thread
import os
import signal
import sys
from typing import Any, Callable, Dict, List

from kineto_agent.debuglog import log_exception

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


class Thread:
    """One of our threads."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ident = 0  # 0: has not come up yet
        self.native_id = 0
        self._ended = _thread.allocate_lock()
        self._ended.acquire()

    def is_alive(self) -> bool:
        """Whether it has not ended yet."""
        return self._ended.locked()

    def join(self, timeout_s: float = -1) -> bool:
        """Wait for its end, at most so long. False: it goes on."""
        if not self._ended.acquire(timeout=timeout_s):
            return False
        self._ended.release()
        return True

    def run(self, target: Callable[[], None]) -> None:
        """The thread itself."""
        self.ident, self.native_id = _thread.get_ident(), _thread.get_native_id()
        _ours[self.ident] = self
        try:
            name_this_thread(self.name)
            target()
        except BaseException:  # noqa: BLE001 - the program must not see it
            log_exception("thread %s" % self.name)
        finally:
            _ours.pop(self.ident, None)
            self._ended.release()


_ours: Dict[int, Thread] = {}  # by Python's identifier
os.register_at_fork(after_in_child=_ours.clear)


def start_thread(name: str, target: Callable[[], None]) -> Thread:
    """A thread to which the kernel gives no signal that the program should get. Raises RuntimeError.

    The name begins with "kineto-": no sampler shows such threads (agent/native/stacks_tasks.c).
    """
    thread = Thread(name)
    valid = set(signal.valid_signals())
    # A thread may have the C library's own signals blocked; naming them would be a warning on the program's stderr.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, valid - set(_SYNCHRONOUS)) & valid
    try:
        _start_new_thread()(thread.run, (target,))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return thread


def _start_new_thread() -> Any:
    """The interpreter's function, also where gevent has put its own in its place."""
    patched = getattr(sys.modules.get("gevent.monkey"), "saved", None)
    if isinstance(patched, dict):
        return patched.get("_thread", {}).get("start_new_thread", _thread.start_new_thread)
    return _thread.start_new_thread


def program_threads() -> List[Any]:
    """The threading.Thread objects of the program, none if it has not imported threading."""
    enumerate_threads = getattr(sys.modules.get("threading"), "enumerate", None)
    try:
        return enumerate_threads() if enumerate_threads is not None else []
    except (AttributeError, NameError):  # it is being imported at the moment
        return []


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
    named = {thread.native_id: thread.name for thread in (*program_threads(), *list(_ours.values()))}
    try:
        tids = sorted(int(entry) for entry in os.listdir(_TASKS))[:limit]
    except OSError:
        tids = sorted(tid for tid in named if tid is not None)[:limit]
    return {str(tid): (named.get(tid) or command_name(tid))[:max_chars] for tid in tids}
