"""Records calls of Python exactly: all, including calls into C (--with-stack=trace), or of modules alone
(--with-modules).

Theory of operation
    The collector (agent/native/python/call_tracer.c) is the profile function of every thread that has none. It writes
    16 bytes for each call and each return, with the GIL held, straight into the arena: nothing is kept in the process,
    and everything is available at once when recording stops. Torch's own tracer keeps 25 bytes for a call, and needs
    1.3 to 1.6 KiB and 3 us more for each call when it ends: 1.2 GiB for each second of a small training loop. So it is
    never used, not even for modules: for these the collector writes only the calls of torch.nn.Module.__call__.

    A thread of ours checks every LOOK_S for new threads, and for threads whose profile function has changed: the
    program's own takes precedence. It also detects that the daemon does not keep up.

    A forked child does not record: the profile function is removed from its only thread.
"""

import _thread
import os
import sys
import time
from typing import Any, Dict, FrozenSet, List, Mapping, Optional

from kineto_agent.protocol.records import PYTHON_CALLS_FORMAT
from kineto_agent.sources.interface import (
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
_NOT_EXACT = "exact Python calls cannot be recorded (%s); leave out --with-stack=trace to have stacks sampled instead"
_NO_MODULES = "module calls cannot be recorded (%s)"
_PREFAULT_BYTES = 16 * 1024 * 1024  # 0.5 s of 2 M records/s, until the daemon frees buffers


class PythonCallsSource:
    """Serves requests for calls or modules; otherwise stack_sampling.py samples stacks."""

    name = NAME
    on_request: FrozenSet[str] = frozenset()

    def activity_types(self) -> List[str]:
        """None by itself: the registry moves python_function here if exact calls are requested."""
        return []

    def why_no_calls(self, options: Mapping[str, Any]) -> str:
        """Why it cannot record calls with these options, "" if it can. Never raises."""
        said = _NOT_EXACT if options.get("stack_trace") else _NO_MODULES
        kind = _unknown_build()
        if kind:
            return said % ("this is %s, whose objects have a different layout" % kind)
        try:
            from kineto_agent.sources.python import tracer_binding  # ctypes: only where it is needed

            if not _opened:
                tracer_binding.CallTracer.of_process().open()
                _opened.append(True)
        except Exception as exc:  # noqa: BLE001 - the reason is returned
            log_exception("Python's calls cannot be recorded")
            return said % exc
        return ""

    def would_yield(self, request: SourceRequest) -> bool:
        """False: the Python tracer of the program's torch.profiler takes precedence thread by thread."""
        return False

    def prepare(self, request: SourceRequest) -> SourceSession:
        """Create the arena. Without activity types: only calls of modules. Raises SourceError."""
        from kineto_agent.sources.python import tracer_binding

        native = tracer_binding.CallTracer.of_process()
        native.open()
        config = tracer_binding.TracerConfig(
            request.buffer_limit_bytes,
            min(_BUFFER_BYTES, max(request.buffer_limit_bytes // 8, 4096)),
            _STRINGS_BYTES,
            _PREFAULT_BYTES,
            not request.activity_types,
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
        self._stopping = _thread.allocate_lock()  # released to end the watching thread
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
        ready.acquire()  # it has excluded itself
        self._began_ns = time.time_ns()
        _sessions.append(self)
        self._native.start(_module_call())

    def counts(self) -> SourceCounts:
        """Records so far; a record is a call or a return."""
        counts = self._native.counts()
        return SourceCounts(counts.records, counts.bytes, counts.dropped)

    def give_way(self) -> None:
        """Do nothing: torch's profile function replaces ours and is left alone."""

    def stop(self) -> SourceOutcome:
        """Remove the profile function; never raises."""
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
                "Python calls were recorded for only %.1f s: they came faster than the daemon could copy them; ask "
                "for a larger buffer limit" % (max(result.full_ns - self._began_ns, 0) / 1e9)
            )
        return SourceOutcome(
            counts, {"threads": result.threads}, self._warnings(result), 0, self._cpu_ns, incomplete=incomplete
        )

    def _warnings(self, result: Any) -> List[str]:
        said = [
            (result.names_lost, "%d Python calls have no name: the table of names was full"),
            (
                result.others,
                "%d threads were not recorded: the program has its own profile function on them, or an audit hook",
            ),
            (
                result.crowded,
                "%d threads were not recorded: exact calls are limited to 2,048 threads, including those that have "
                "ended; ask for a shorter recording",
            ),
        ]
        warnings = [text % number for number, text in said if number]
        if result.elsewhere:
            warnings.append(
                "calls in sub-interpreters were not recorded: exact calls cover the main interpreter only; leave out "
                "--with-stack=trace to have the stacks of all interpreters sampled"
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
        """Stop recording in a forked child, where nothing uses this session any more."""
        self._native.forked()
        self._forget()


def _unknown_build() -> str:
    """The kind of this Python, if the collector does not know its object layout; otherwise ""."""
    if hasattr(sys, "gettotalrefcount"):
        return "a debug build of Python"
    if "t" in getattr(sys, "abiflags", ""):
        return "a free-threaded Python"
    return "Python %d.%d" % sys.version_info[:2] if sys.version_info >= (3, 16) else ""


def _prefixes() -> List[str]:
    """Folders to strip from file names, as torch does, the longest first."""
    folders = {os.path.abspath(folder) + "/" for folder in list(sys.path) if isinstance(folder, str) and folder}
    return sorted(folders, key=len, reverse=True)[:100]


def _module_call() -> int:
    """Address of the code object of torch.nn.Module.__call__; 0 without torch."""
    module: Any = getattr(sys.modules.get("torch.nn.modules.module"), "Module", None)
    code = getattr(getattr(module, "__dict__", {}).get("__call__"), "__code__", None)
    return 0 if code is None else id(code)


_sessions: List[PythonCallsSession] = []
_opened: List[bool] = []  # not empty once this Python is known to be supported


def _after_fork_in_child() -> None:
    for session in list(_sessions):
        try:
            session.after_fork_in_child()
        except Exception:  # noqa: BLE001 - never into the program
            log("the profile function cannot be removed in a forked child")


os.register_at_fork(after_in_child=_after_fork_in_child)
