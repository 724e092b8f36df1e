"""Threads of this process: starting ours without disturbing the program, and system ids and names of all threads.

Theory of operation
    `threading` is never imported from here: up to CPython 3.12 the thread that imports it first becomes its
    "MainThread", and the agent may be attached to a program that has not imported it yet. Our threads are created by
    `_thread` and do not appear in threading.enumerate(); if the program has imported `threading`, its own threads are
    read from there. Only the interpreter's own function creates them: replacements by gevent, eventlet or a debugger
    create greenlets, or threads that are traced.

    The new thread itself blocks the signals that are meant for the program. The kernel prefers the main thread for
    them, and a mask that the starting thread changed might not be restored: a handler may raise in between.

    From CPython 3.12 on the tools of sys.monitoring (cProfile, coverage, debuggers) are called on every thread of the
    interpreter. A thread whose state counts as being traced is exempt; C functions set that up before our first Python
    function runs there.
"""

import _signal  # type: ignore[import-not-found]
import _thread
import contextlib
import os
import sys
from collections import deque
from itertools import chain
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

from kineto_agent.system.debuglog import log_exception
from kineto_agent.system.descriptors import list_folder, read_file, write_file

OURS = "kineto-"  # prefix of the names of our threads, including those in C
_TASKS = "/proc/self/task"
_BESIDE_TASKS = 2  # links of that folder that are not tasks
_SYNCHRONOUS = {
    *(_signal.SIGSEGV, _signal.SIGBUS, _signal.SIGFPE, _signal.SIGILL),
    *(_signal.SIGABRT, _signal.SIGTRAP, _signal.SIGSYS),
}
_TRACING_BY_THREAD = (3, 12)
_TOOLS = 6  # of sys.monitoring


class Thread:
    """One of our threads."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ident = 0  # 0: not started yet
        self.native_id = 0
        self._ended = _thread.allocate_lock()
        self._ended.acquire()

    def is_alive(self) -> bool:
        """Whether it has not ended yet."""
        return self._ended.locked()

    def join(self, timeout_s: float = -1) -> bool:
        """Wait for its end, for at most `timeout_s`. Returns False if it is still running."""
        if not self._ended.acquire(timeout=timeout_s):
            return False
        self._ended.release()
        return True

    def run(self, target: Callable[[], None]) -> None:
        """Run `target` as this thread."""
        # A thread may have the C library's own signals blocked; naming them would print a warning on the program's
        # stderr.
        _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals() - _SYNCHRONOUS)
        self.ident, self.native_id = _thread.get_ident(), _thread.get_native_id()
        _ours[self.ident] = self
        try:
            name_this_thread(self.name)
            _unnamed.discard(self)
            target()
        except BaseException:  # noqa: BLE001 - the program must not see it
            log_exception("thread %s" % self.name)
        finally:
            _unnamed.discard(self)
            _ours.pop(self.ident, None)
            self._ended.release()


_ours: Dict[int, Thread] = {}  # by Python's identifier
_unnamed: Set[Thread] = set()  # started, but the kernel does not know their names yet
os.register_at_fork(after_in_child=_ours.clear)
os.register_at_fork(after_in_child=_unnamed.clear)


def start_thread(name: str, target: Callable[[], None]) -> Thread:
    """Start a thread that gets no signal meant for the program. Raises RuntimeError.

    The name begins with "kineto-": no sampler shows such threads (agent/native/python/kernel_threads.c).
    """
    thread = Thread(name)
    start, first = _start_new_thread(), _unseen()

    def run() -> None:
        thread.run(target)

    _unnamed.add(thread)
    try:
        if first is None:
            start(run, ())
        else:
            start(*_in_turn(*first, run))
    except BaseException:
        _unnamed.discard(thread)
        raise
    return thread


def is_ours(ident: int) -> bool:
    """Whether this Python thread identifier belongs to one of our threads."""
    return ident in _ours


def others(most: int) -> Optional[int]:
    """Number of the process's threads that are not ours. None: unknown, or more than `most` in all."""
    unnamed = len(_unnamed)  # first: a thread that names itself in between is excluded under either name
    try:
        if os.stat(_TASKS).st_nlink - _BESIDE_TASKS > most:
            return None
        names = [command_name(int(tid)) for tid in list_folder(_TASKS)]
    except OSError:
        return None
    return sum(name != "" and not name.startswith(OURS) for name in names) - unnamed  # "": it has ended


def _start_new_thread() -> Any:
    """The interpreter's own function, even if others have replaced it. Raises RuntimeError."""
    saved = getattr(sys.modules.get("gevent.monkey"), "saved", None)
    kept = saved.get("_thread", {}) if isinstance(saved, dict) else {}
    for found in (_START, _thread.start_new_thread, kept.get("start_new_thread")):
        if found.__class__ is _IN_C:
            return found
    raise RuntimeError("the program has replaced _thread.start_new_thread with a function of its own")


_IN_C: Any = [].append.__class__  # not type(len): the program may have replaced both
_START = _thread.start_new_thread  # at the time of the import, mostly before others replace it


def _unseen() -> Optional[Tuple[Any, Any]]:
    """C functions: one that returns the calling thread's state, and one that marks a state as being traced. None: not
    needed.
    """
    monitoring: Any = getattr(sys, "monitoring", None)
    if sys.version_info < _TRACING_BY_THREAD or not any(monitoring.get_tool(tool) for tool in range(_TOOLS)):
        return None
    try:
        import ctypes

        from kineto_agent.system.libraries import interpreter

        library = interpreter()
        state, trace = library.PyThreadState_Get, library.PyThreadState_EnterTracing
    except (ImportError, OSError, AttributeError):
        return None
    state.restype, state.argtypes = ctypes.c_void_p, ()
    trace.restype, trace.argtypes = None, (ctypes.c_void_p,)
    return state, trace


def _in_turn(state: Any, trace: Any, run: Callable[[], None]) -> Tuple[Any, Tuple[Any, ...]]:
    """A C function with its arguments that calls `trace(state())`, then `run()`, and has no frame of its own."""
    import _operator

    return deque, (chain(map(trace, map(_operator.call, (state,))), map(_operator.call, (run,))), 0)


def program_threads() -> List[Any]:
    """The threading.Thread objects of the program, none if it has not imported threading."""
    enumerate_threads = getattr(sys.modules.get("threading"), "enumerate", None)
    try:
        return enumerate_threads() if enumerate_threads is not None else []
    except (AttributeError, NameError):  # it is being imported right now
        return []


def name_this_thread(name: str) -> None:
    """Set the name that ps and top show; at most 15 bytes of it."""
    with contextlib.suppress(OSError):
        write_file("/proc/thread-self/comm", name.encode()[:15])


def command_name(tid: int) -> str:
    """The kernel's name of a thread, "" if it has ended."""
    try:
        return read_file("%s/%d/comm" % (_TASKS, tid), 64).decode("utf-8", "replace").rstrip("\n")
    except OSError:
        return ""


def thread_names(limit: int, max_chars: int = 64) -> Dict[str, str]:
    """System thread id -> name of at most `limit` threads alive now; Python's name where it has one."""
    threads = (*program_threads(), *list(_ours.values()))
    named = {getattr(thread, "native_id", None): thread.name for thread in threads}  # eventlet's has none
    try:
        tids = sorted(int(entry) for entry in list_folder(_TASKS))[:limit]
    except OSError:
        tids = sorted(tid for tid in named if tid is not None)[:limit]
    return {str(tid): (named.get(tid) or command_name(tid))[:max_chars] for tid in tids}
