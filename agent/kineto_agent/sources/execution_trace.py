"""PyTorch's execution trace: operators with their inputs, as torch.profiler.ExecutionTraceObserver writes them.

Theory of operation
    The observer is one for the whole process. The agent's thread registers it with a private file, which loses its
    name at once (nothing is left behind by a process that dies), and starts it; a thread of ours copies what torch has
    written into the arena every COPY_PERIOD_S, so that little is left to do at the end and a file that gets too
    large, or that nobody takes, ends the recording early.

    torch says nothing when the observer is registered already: then our file is not opened, which shows that the
    observer is the program's. It is left alone, and the capture refused. When the program registers its own while
    ours runs, ours ends first, in the program's thread, and what there was until then is kept.

    torch frees the observer without waiting for threads that are inside its callbacks. They stay there for
    microseconds, and none enters once it is stopped: DRAIN_S lies between the stop and the removal.

    A forked child inherits the observer, running, and torch's buffered stream. There it is stopped (another thread of
    the parent may have held its lock: the child's next operator would wait for ever) and the stream's descriptor is
    led to /dev/null, else the child would write into the middle of the parent's file.

    The file begins with the recording, not with the capture's window: nodes carry no time by which they could be cut.
"""

import _thread
import contextlib
import os
import sys
import time
from typing import Any, Callable, Dict, FrozenSet, List, Optional, Set

from kineto_agent.debuglog import log, log_exception
from kineto_agent.sources.file_arena import FileArena
from kineto_agent.sources.interface import SourceCounts, SourceError, SourceOutcome, SourceRequest
from kineto_agent.threads import Thread, start_thread

ACTIVITY_TYPE = "execution_trace"
COPY_PERIOD_S = 0.25
DRAIN_S = 0.1
MAX_FILE_BYTES = 1 << 30
_JOIN_TIMEOUT_S = 5.0
_MARK = b"-"  # torch truncates the file when it opens it
_ADD = "_add_execution_trace_observer"

_running: "Set[ExecutionTraceSession]" = set()


def _profiler_module() -> Any:
    """torch.profiler.profiler, if the program has it and it has the observer; None otherwise."""
    module = sys.modules.get("torch.profiler.profiler")
    return module if hasattr(module, "ExecutionTraceObserver") and hasattr(module, _ADD) else None


class ExecutionTraceSource:
    """Drives torch's ExecutionTraceObserver."""

    name = ACTIVITY_TYPE
    on_request: FrozenSet[str] = frozenset((ACTIVITY_TYPE,))

    def activity_types(self) -> List[str]:
        """Offered as soon as the program has imported torch."""
        return [] if _profiler_module() is None else [ACTIVITY_TYPE]

    def would_yield(self, request: SourceRequest) -> bool:
        """The observer and torch's profiler run beside each other."""
        return False

    def prepare(self, request: SourceRequest) -> "ExecutionTraceSession":
        """Make the arena. Raises SourceError."""
        module = _profiler_module()
        if module is None:
            raise SourceError("NO_TORCH", "torch is not imported in this process, or has no ExecutionTraceObserver")
        return ExecutionTraceSession(module, FileArena(self.name, request.buffer_limit_bytes))


class _OutputFile:
    """The nameless file between torch and us. torch's own descriptor of it is found by its inode."""

    def __init__(self) -> None:
        import tempfile  # torch has imported it

        self._directory = tempfile.mkdtemp(prefix="kineto-")
        self.path = os.path.join(self._directory, "execution_trace.json")  # torch warns about any other ending
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.write(self.fd, _MARK)
        os.lseek(self.fd, 0, os.SEEK_SET)
        self.torch_fd = -1

    def size(self) -> int:
        """Bytes that torch has written."""
        return os.fstat(self.fd).st_size

    def was_opened(self) -> bool:
        """Whether torch has truncated it; finds torch's descriptor."""
        if self.size() and os.pread(self.fd, 1, 0) == _MARK:
            return False
        ours = os.fstat(self.fd)
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found = os.fstat(int(name))
                if int(name) != self.fd and (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino):
                    self.torch_fd = int(name)
        return True

    def unname(self) -> None:
        """Take its name and folder away."""
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        with contextlib.suppress(OSError):
            os.rmdir(self._directory)

    def close(self) -> None:
        """Give the disk space back, once torch has closed it too. Safe to call twice."""
        self.unname()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class ExecutionTraceSession:
    """One recording. `_lock` guards the observer: the program's threads may end it too."""

    format = "file/1"
    yields = False

    def __init__(self, module: Any, arena: FileArena) -> None:
        self.metadata: Dict[str, Any] = {"file": ACTIVITY_TYPE}
        self.arena_fd = arena.fd
        self._arena = arena
        self._module = module
        self._file: Optional[_OutputFile] = None
        self._observer: Any = None  # not None: registered, and ours
        self._original: Any = None  # of torch's function that registers an observer
        self._lock = _thread.allocate_lock()
        self._stop = _thread.allocate_lock()
        self._thread: Optional[Thread] = None
        self._warnings: List[str] = []
        self._cpu_ns = 0

    # ------------------------------------------------------------ the agent's thread

    def start(self) -> None:
        """Register and start the observer. Raises SourceError."""
        try:
            self._file = _OutputFile()
        except OSError as exc:
            raise SourceError("NO_TEMPORARY_FILE", "cannot make a file for torch to write to: %s" % exc) from exc
        observer = self._module.ExecutionTraceObserver()
        try:
            observer.register_callback(self._file.path)
            opened = self._file.was_opened()
        finally:
            self._file.unname()
        if not observer.is_registered:
            raise SourceError("EXECUTION_TRACE_FAILED", "torch could not write to its file; its stderr says why")
        if not opened:
            _forget(observer)
            raise SourceError(
                "USER_OBSERVER_ACTIVE",
                "the program uses torch.profiler.ExecutionTraceObserver itself, and there can be only one; take the "
                "execution trace after the program has unregistered its own",
            )
        self._observer = observer
        _running.add(self)
        self._watch_registrations()
        observer.start()
        self._stop.acquire()
        try:
            self._thread = start_thread("kineto-et", self._run)
        except RuntimeError as exc:
            self._end_observer()
            raise SourceError("NO_THREAD", "cannot start the thread that copies the file: %s" % exc) from exc

    def counts(self) -> SourceCounts:
        """Buffers of the file."""
        return self._arena.counts()

    def stop(self) -> SourceOutcome:
        """End the observer and copy the rest of its file; never raises."""
        self._end_observer()
        if self._thread is not None:
            self._stop.release()
            self._thread.join(_JOIN_TIMEOUT_S)
            if self._thread.is_alive():
                self._warnings.append("the execution trace could not be copied in time")
                return SourceOutcome(self.counts(), {}, self._warnings, detach_ns=0, cpu_ns=0)
        self._copy()
        self._arena.finish()
        size = self._arena.written_bytes + self._arena.lost_bytes
        return SourceOutcome(self.counts(), {"size_bytes": size}, self._warnings, detach_ns=0, cpu_ns=self._cpu_ns)

    def give_way(self) -> None:
        """Nothing: it runs beside the program's own profiler."""

    def close(self) -> None:
        """Free the arena and the file."""
        self._end_observer()
        if self._file is not None and not (self._thread is not None and self._thread.is_alive()):
            self._file.close()
        self._arena.close()

    # ------------------------------------------------------------ any thread

    def _end_observer(self) -> None:
        """Stop and remove the observer, if it is still ours; the file is whole then. Never raises."""
        with self._lock:
            observer, self._observer = self._observer, None
            if observer is None:
                return
            self._unwatch_registrations()
            try:
                try:
                    observer.stop()
                    time.sleep(DRAIN_S)
                finally:
                    observer.unregister_callback()
            except Exception:  # noqa: BLE001 - the program must not see it; the file shows that it is not whole
                log_exception("the execution trace observer cannot be ended")
            finally:
                _running.discard(self)

    def _watch_registrations(self) -> None:
        original: Callable[..., Any] = getattr(self._module, _ADD)

        def add(*args: Any, **kwargs: Any) -> Any:
            if self._observer is not None:
                log("the program registers an execution trace observer of its own: ours ends")
                self._warnings.append(
                    "the program registered an ExecutionTraceObserver of its own: the execution trace ends there"
                )
                self._end_observer()
            return original(*args, **kwargs)

        self._original, self._watcher = original, add
        setattr(self._module, _ADD, add)

    def _unwatch_registrations(self) -> None:
        if getattr(self._module, _ADD) is self._watcher:
            setattr(self._module, _ADD, self._original)

    # ------------------------------------------------------------ the copying thread

    def _run(self) -> None:
        began_ns = time.thread_time_ns()
        try:
            while not self._stop.acquire(timeout=COPY_PERIOD_S):
                self._copy()
                self._check_limits()
        except Exception:  # noqa: BLE001 - the program must not see it; the file shows that it is not whole
            log_exception("copying the execution trace")
        finally:
            self._cpu_ns = time.thread_time_ns() - began_ns

    def _copy(self) -> None:
        if self._file is not None and self._file.fd >= 0:
            try:
                self._arena.copy_from(self._file.fd)
            except OSError as exc:
                self._arena.mark_cut()
                self._warnings.append("the execution trace cannot be read back: %s" % exc)

    def _check_limits(self) -> None:
        size = self._arena.written_bytes + self._arena.lost_bytes
        if self._observer is None or (size <= MAX_FILE_BYTES and not self._arena.lost_bytes):
            return
        why = "nobody takes it" if self._arena.lost_bytes else "it has reached %d MiB" % (MAX_FILE_BYTES >> 20)
        self._warnings.append("the execution trace ends early: %s" % why)
        self._end_observer()

    # ------------------------------------------------------------ a forked child

    def abandon_in_child(self) -> None:
        """Make the inherited observer harmless."""
        observer, self._observer = self._observer, None
        if self._file is not None and self._file.torch_fd >= 0:
            null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(null, self._file.torch_fd, inheritable=False)
            os.close(null)
        if observer is not None:
            self._unwatch_registrations()
            observer.stop()
            _forget(observer)
        if self._file is not None and self._file.fd >= 0:
            os.close(self._file.fd)
            self._file.fd = -1


def _forget(observer: Any) -> None:
    """An observer object that is not the registered one must not end it when it is collected."""
    observer._registered = observer._execution_trace_running = False


def _abandon_all_in_child() -> None:
    for session in list(_running):
        with contextlib.suppress(Exception):
            session.abandon_in_child()
    _running.clear()


os.register_at_fork(after_in_child=_abandon_all_in_child)
