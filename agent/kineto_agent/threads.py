"""Threads of this process: starting ours unnoticed, and the system's ids and names of all of them.

Theory of operation
    `threading` is never imported from here: up to CPython 3.12 the thread that imports it first becomes its
    "MainThread", and the agent may be brought into a program that has not imported it yet. Our threads are made by
    `_thread` and do not show in threading.enumerate(); where the program has imported `threading`, it is asked for
    the program's own threads. Only the interpreter's own function makes them: what gevent, eventlet or a debugger has
    put in its place makes greenlets, or threads that are traced.

    Signals that the program should get are blocked by the new thread itself. The kernel gives them to the main thread
    first, and a mask that the starting thread changed might not be changed back: a handler may raise in between.

    From CPython 3.12 on the tools of sys.monitoring (cProfile, coverage, debuggers) are called on every thread of the
    interpreter. A thread whose state counts as being traced is spared; that is done by functions in C alone before the
    first of ours runs there.

    Python knows a thread by its pthread_t, everybody else by the kernel's thread id. `threading` knows both for
    its own threads. For any other thread the kernel's id stands somewhere in the pthread structure that pthread_t
    points to; `NativeIds` finds the offset once, from the threads whose ids it knows, reads through /proc/self/mem (a
    wrong address is an error there, not a crash) and believes only ids listed in /proc/self/task.
"""

import _signal  # type: ignore[import-not-found]
import _thread
import os
import struct
import sys
from collections import deque
from itertools import chain
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

from kineto_agent.debuglog import log_exception

OWN_PREFIX = "kineto-"  # names of the agent's own threads; no sampler shows them
_TASKS = "/proc/self/task"
_SYNCHRONOUS = {
    *(_signal.SIGSEGV, _signal.SIGBUS, _signal.SIGFPE, _signal.SIGILL),
    *(_signal.SIGABRT, _signal.SIGTRAP, _signal.SIGSYS),
}
_TRACING_BY_THREAD = (3, 12)
_TOOLS = 6  # of sys.monitoring
_PTHREAD_SCAN_BYTES = 2304  # glibc's and musl's structures are about this long
_INT = struct.Struct("i")


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
        # A thread may have the C library's own signals blocked; naming them would be a warning on the program's stderr.
        _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals() - _SYNCHRONOUS)
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
    """A thread to which the kernel gives no signal that the program should get. Raises RuntimeError."""
    thread = Thread(name)
    start, first = _start_new_thread(), _unseen()

    def run() -> None:
        thread.run(target)

    if first is None:
        start(run, ())
    else:
        start(*_in_turn(*first, run))
    return thread


def _start_new_thread() -> Any:
    """The interpreter's function, also where others have put theirs in its place. Raises RuntimeError."""
    saved = getattr(sys.modules.get("gevent.monkey"), "saved", None)
    kept = saved.get("_thread", {}) if isinstance(saved, dict) else {}
    for found in (_START, _thread.start_new_thread, kept.get("start_new_thread")):
        if type(found) is type(len):
            return found
    raise RuntimeError("the program has put a function of its own in the place of _thread.start_new_thread")


_START = _thread.start_new_thread  # at the time of the import, mostly before others replace it


def _unseen() -> Optional[Tuple[Any, Any]]:
    """Functions in C: the calling thread's state, and what makes a state count as being traced. None: not needed."""
    monitoring: Any = getattr(sys, "monitoring", None)
    if sys.version_info < _TRACING_BY_THREAD or not any(monitoring.get_tool(tool) for tool in range(_TOOLS)):
        return None
    try:
        import ctypes

        library = ctypes.PyDLL(None)  # not ctypes.pythonapi, whose functions are shared with the program
        state, trace = library.PyThreadState_Get, library.PyThreadState_EnterTracing
    except (ImportError, OSError, AttributeError):
        return None
    state.restype, state.argtypes = ctypes.c_void_p, ()
    trace.restype, trace.argtypes = None, (ctypes.c_void_p,)
    return state, trace


def _in_turn(state: Any, trace: Any, run: Callable[[], None]) -> Tuple[Any, Tuple[Any, ...]]:
    """A function in C with its arguments that calls `trace(state())`, then `run()`, and has no frame of its own."""
    import _operator

    return deque, (chain(map(trace, map(_operator.call, (state,))), map(_operator.call, (run,))), 0)


def program_threads() -> List[Any]:
    """The threading.Thread objects of the program, none if it has not imported threading."""
    enumerate_threads = getattr(sys.modules.get("threading"), "enumerate", None)
    try:
        return enumerate_threads() if enumerate_threads is not None else []
    except (AttributeError, NameError):  # it is being imported at the moment
        return []


def program_thread(ident: int) -> Any:
    """The threading.Thread object with this identifier, None if there is none."""
    return getattr(sys.modules.get("threading"), "_active", {}).get(ident)


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


class NativeIds:
    """Translates Python's thread identifiers. Used by one thread."""

    def __init__(self) -> None:
        self._known: Dict[int, Tuple[Any, int]] = {}
        self._offset: Optional[int] = None
        self._calibrated = False

    def tid(self, ident: int) -> int:
        """The system's id of the thread that Python calls `ident`; 0 for one of ours."""
        thread = _ours.get(ident) or program_thread(ident)
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

    def _learn(self, ident: int, thread: Any) -> int:
        if thread is not None:
            if thread.name.startswith(OWN_PREFIX):
                return 0
            if thread.native_id is not None:
                return int(thread.native_id)
        tid = self._from_pthread(ident)
        if tid and command_name(tid).startswith(OWN_PREFIX):  # of another agent in this process
            return 0
        return tid or ident & 0xFFFFFFFF

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
    """Where the threads that know their id have it in their pthread structures."""
    known = {_thread.get_ident(): _thread.get_native_id()}
    known.update((thread.ident, thread.native_id) for thread in (*program_threads(), *list(_ours.values())))
    offsets: Optional[set[int]] = None
    for ident, native_id in known.items():
        if not ident or not native_id:
            continue
        data = _read_memory(ident, _PTHREAD_SCAN_BYTES)
        words = struct.unpack_from("%di" % (len(data) // 4), data)
        found = {4 * index for index, word in enumerate(words) if word == native_id}
        offsets = found if offsets is None else offsets & found
    return min(offsets) if offsets else None
