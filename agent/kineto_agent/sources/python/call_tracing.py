"""Every call of Python, and of what Python calls, exactly: --with-stack=trace.

Theory of operation
    The collector (agent/native/python/call_tracer.c) is the profile function of every thread that has none. It writes
    16
    bytes for a call and for a return, with the GIL held, straight into the arena: nothing is kept in the process, and
    everything is there at once when it stops. Torch's own tracer, which did this before, keeps 25 bytes for a call,
    and takes 1.3 to 1.6 KiB more and 3 us for each when it ends: 1.2 GiB for each second of a small training loop.

    A thread of ours looks every LOOK_S for threads that have begun, and for those whose profile function is another
    by now: the program's own goes first. It also is where the agent notices that the daemon does not keep up.

    In a forked child nobody records: the profile function is taken off its one thread.
"""

import _thread
import os
import sys
import time
from typing import Any, Dict, FrozenSet, List, Mapping, Optional

from kineto_agent.protocol.records import PYTHON_CALLS_FORMAT
from kineto_agent.sources.interface import (
    PROFILER_OPTIONS,
    SourceCounts,
    SourceError,
    SourceOutcome,
    SourceRequest,
    SourceSession,
)
from kineto_agent.system.debuglog import log, log_exception
from kineto_agent.system.threads import Thread, start_thread

NAME = "python_calls"
LOOK_S = 0.05
_BUFFER_BYTES = 256 * 1024
_STRINGS_BYTES = 8 * 1024 * 1024  # some 80,000 functions
_NOT_EXACT = (
    "exact calls of Python cannot be recorded (%s); leave out --with-stack=trace to have stacks sampled instead"
)
_PREFAULT_BYTES = 16 * 1024 * 1024  # 0.5 s of 2 M records/s, until the daemon gives buffers back


class PythonCallsSource:
    """Offered where calls are asked for exactly; stack_sampling.py samples them otherwise."""

    name = NAME
    on_request: FrozenSet[str] = frozenset()

    def activity_types(self) -> List[str]:
        """Nothing by itself: the registry moves python_function here if calls are asked for exactly."""
        return []

    def why_no_calls(self, options: Mapping[str, Any]) -> str:
        """ "" if it can record them, or why not. Never raises."""
        if any(options.get(name) for name in PROFILER_OPTIONS):
            return "torch's profiler, which has to run anyway, records them as well"
        kind = _unknown_build()
        if kind:
            return _NOT_EXACT % ("this is %s, whose objects begin otherwise" % kind)
        try:
            from kineto_agent.sources.python import tracer_binding  # ctypes: only where it is needed

            if not _opened:
                tracer_binding.load().open()
                _opened.append(True)
        except Exception as exc:  # noqa: BLE001 - then it does not
            log_exception("Python's calls cannot be recorded")
            return _NOT_EXACT % exc
        return ""

    def would_yield(self, request: SourceRequest) -> bool:
        """It and torch's profiler do not meet; the tracer of Python in that one goes first, thread by thread."""
        return False

    def prepare(self, request: SourceRequest) -> SourceSession:
        """Make the arena. Raises SourceError."""
        from kineto_agent.sources.python import tracer_binding

        native = tracer_binding.load()
        native.open()
        config = tracer_binding.TracerConfig(
            request.buffer_limit_bytes,
            min(_BUFFER_BYTES, max(request.buffer_limit_bytes // 8, 4096)),
            _STRINGS_BYTES,
            _PREFAULT_BYTES,
        )
        return PythonCallsSession(native, native.prepare(config))


class PythonCallsSession:
    """One recording."""

    format = PYTHON_CALLS_FORMAT
    yields = False

    def __init__(self, native: Any, arena_fd: int) -> None:
        self._native = native
        self.arena_fd = arena_fd
        self.metadata: Dict[str, Any] = {"prefixes": _prefixes()}
        self._pid = os.getpid()
        self._began_ns = 0
        self._stopping = _thread.allocate_lock()  # released to end the thread that looks
        self._worker: Optional[Thread] = None
        self._cpu_ns = 0

    def start(self) -> None:
        """Set the profile function on all threads. Raises SourceError."""
        self._stopping.acquire()
        ready = _thread.allocate_lock()
        ready.acquire()
        try:
            self._worker = start_thread("kineto-calls", lambda: self._look(ready))
        except RuntimeError as exc:
            raise SourceError("NO_THREAD", "cannot start the thread that looks for new threads: %s" % exc) from exc
        ready.acquire()  # it has had itself left out
        self._began_ns = time.time_ns()
        _sessions.append(self)
        self._native.start(_module_call())

    def counts(self) -> SourceCounts:
        """A record is a call or a return."""
        counts = self._native.counts()
        return SourceCounts(counts.records, counts.bytes, counts.dropped)

    def give_way(self) -> None:
        """Nothing to do: a profile function of torch's takes the place of ours, and is left alone."""

    def stop(self) -> SourceOutcome:
        """Take the profile function off; never raises."""
        begin_ns = time.thread_time_ns()
        if self._worker is not None:
            self._stopping.release()
            self._worker.join()
            self._worker = None
        result = self._native.stop()
        self._forget()
        self._cpu_ns += time.thread_time_ns() - begin_ns
        counts = SourceCounts(result.counts.records, result.counts.bytes, result.counts.dropped)
        incomplete = ""
        if result.full_ns:
            incomplete = (
                "calls of Python were recorded for %.1f s only: they came faster than the daemon could take them; ask "
                "for a larger buffer limit" % (max(result.full_ns - self._began_ns, 0) / 1e9)
            )
        return SourceOutcome(
            counts, {"threads": result.threads}, self._warnings(result), 0, self._cpu_ns, incomplete=incomplete
        )

    def _warnings(self, result: Any) -> List[str]:
        said = [
            (result.names_lost, "%d calls of Python have no name: there was no room for more names"),
            (result.others, "%d threads were not recorded: the program's own profile function or audit hook is there"),
        ]
        warnings = [text % number for number, text in said if number]
        if result.elsewhere:
            warnings.append(
                "calls in sub-interpreters were not recorded: exact calls are those of the main interpreter; leave out "
                "--with-stack=trace to have stacks of all of them sampled"
            )
        return warnings

    def close(self) -> None:
        """Free the arena. Never raises."""
        if self in _sessions:
            self.stop()
        self._native.close()

    def _look(self, ready: Any) -> None:
        began_ns = time.thread_time_ns()
        try:
            self._native.leave_out()
        finally:
            ready.release()
        while not self._stopping.acquire(timeout=LOOK_S):
            self._native.look()
        self._cpu_ns += time.thread_time_ns() - began_ns

    def _forget(self) -> None:
        if self in _sessions:
            _sessions.remove(self)

    def after_fork_in_child(self) -> None:
        """Nobody calls this session here any more."""
        self._native.forked()
        self._forget()


def _unknown_build() -> str:
    """What this Python is, if its objects begin otherwise than those the collector knows; else ""."""
    if hasattr(sys, "gettotalrefcount"):
        return "a debug build of Python"
    if "t" in getattr(sys, "abiflags", ""):
        return "a free-threaded Python"
    return "Python %d.%d" % sys.version_info[:2] if sys.version_info >= (3, 16) else ""


def _prefixes() -> List[str]:
    """Folders that file names are shown without, as torch does it, the longest first."""
    folders = {os.path.abspath(folder) + "/" for folder in list(sys.path) if isinstance(folder, str) and folder}
    return sorted(folders, key=len, reverse=True)[:100]


def _module_call() -> int:
    """The address of the code of torch.nn.Module.__call__; 0 without torch."""
    module: Any = getattr(sys.modules.get("torch.nn.modules.module"), "Module", None)
    code = getattr(getattr(module, "__dict__", {}).get("__call__"), "__code__", None)
    return 0 if code is None else id(code)


_sessions: List[PythonCallsSession] = []
_opened: List[bool] = []  # once this Python has turned out to be fit


def _after_fork_in_child() -> None:
    for session in list(_sessions):
        try:
            session.after_fork_in_child()
        except Exception:  # noqa: BLE001 - never into the program
            log("the child of a fork cannot take the profile function off")


os.register_at_fork(after_in_child=_after_fork_in_child)
