"""Records HLO operations, annotations and device activity through sessions of JAX's own profiler.

Theory of operation
    session_guard.py says how our sessions avoid the program's. XLA's records, about 0.2 KB per operation, stay in the
    process until the session ends, and ending it needs several times as much: XLA builds its own profile, which we get
    as bytes. That happens without the GIL, except for creating the bytes. It takes about as long as the recording if
    operations follow each other within microseconds.

    A thread of ours therefore watches the process's growth. Before ending a session would take MOST_GROWTH times the
    buffer limit, the session ends, its bytes go through the arena, the memory is released, and another session begins.
    This bounds memory, the time that the program's own profiler waits for us, and the time that the bytes hold the GIL.
    The outcome lists the gaps in the recording.

    Beginning or ending a session of ours requires the guard's lock.

    When the process exits, that thread ends the session, and the exit waits 20 ms for it (`_at_exit`): data that XLA
    has not delivered by then is lost, and the thread may still be inside XLA (ExitGuard). In a forked child the
    session's object must never be freed: its destructor takes locks that threads of the parent may have held. So it has
    one more reference than Python knows of.
"""

import _thread
import atexit
import os
import time
from typing import Any, Dict, FrozenSet, Iterable, List, Optional, Set

from kineto_agent.protocol.records import PART_HEAD, XPLANE_FORMAT
from kineto_agent.sources.file_arena import FileArena
from kineto_agent.sources.interface import SourceCounts, SourceError, SourceOutcome, SourceRequest, Takeover
from kineto_agent.sources.jax import jax_runtime
from kineto_agent.sources.jax.session_guard import SessionGuard, refuse_if_used
from kineto_agent.sources.native_interface import NativeInterface
from kineto_agent.system.debuglog import log_exception
from kineto_agent.system.memory_use import Growth
from kineto_agent.system.threads import Thread, command_name, program_threads, start_thread

MOST_GROWTH = 2  # of memory, in buffer limits
END_GROWTH = 5  # growth at the end of a session, relative to before: 4.4 was measured
SHORTEST_PIECE_S = 0.2
_WATCH_S = 0.02
_MOST_GAPS = 64  # listed in the outcome
_MOST_THREADS = 256  # likewise
_MIB = 1 << 20
_EXIT_LIMIT_S = 0.02


class ExitGuard(NativeInterface):
    """Keeps a thread of ours that is inside C++ when the interpreter ends from ending the process with SIGABRT
    (agent/native/common/exit_guard.c).
    """

    ABI_FUNCTION = "kc_exit_guard_abi"
    ABI = 1
    USE = " for the exit"
    BY_PROGRAM = ("kc_exit_guard_place",)

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._library.kc_exit_guard_prepare()

    def place(self) -> None:
        """Guard from now on. Called on the program's thread, while it exits."""
        self._library.kc_exit_guard_place()


def _exit_guard() -> Optional[ExitGuard]:
    """None without the native library, which JAX's operations do not need otherwise."""
    try:
        return ExitGuard.of_process()
    except SourceError:
        return None


class XlaSession:
    """One recording."""

    format = XPLANE_FORMAT
    yields = False  # to torch.profiler; the guard handles jax.profiler

    def __init__(
        self,
        profiler: jax_runtime.Profiler,
        arena: FileArena,
        metadata: Dict[str, Any],
        most_growth_bytes: int,
    ) -> None:
        self.metadata = metadata
        self.arena_fd = arena.fd
        self._profiler = profiler
        self._session_class = profiler.native.ProfilerSession
        self._options = jax_runtime.options(profiler)
        self._arena = arena
        self._growth = Growth(most_growth_bytes, END_GROWTH)
        self._guard = SessionGuard(profiler, self._make_way)
        self._pid = os.getpid()
        self._session: Any = None
        self._pieces: List[bytes] = []  # of ended sessions, not yet written
        self._pieces_lock = _thread.allocate_lock()
        self._count = 0
        self._over = False  # no new session may begin
        self._taken: Optional[Takeover] = None
        self._gaps: List[List[int]] = []  # Unix ns from and until
        self._problem = ""
        self._stopping = _thread.allocate_lock()  # released to end the thread that watches
        self._worker: Optional[Thread] = None
        self._exiting = False
        self._written = _thread.allocate_lock()  # released once the thread has written what there was at the exit
        self._written.acquire()
        self._cpu_ns = 0
        self._longest_end_ns = 0
        self._exit_guard = _exit_guard()

    # ------------------------------------------------------------ the agent's thread

    def start(self) -> None:
        """Begin to record. Raises SourceError."""
        self._guard.enter(self._begin)
        atexit.register(self._at_exit)
        _sessions.add(self)
        self._stopping.acquire()
        try:
            self._worker = start_thread("kineto-jax", self._watch)
        except RuntimeError as exc:
            raise SourceError("NO_THREAD", "cannot start the thread that watches JAX's profiler: %s" % exc) from exc

    def counts(self) -> SourceCounts:
        """Records so far; a record is a buffer of a serialised XSpace."""
        return self._arena.counts()

    def taken(self) -> Optional[Takeover]:
        """When and why the program's own profiler has ended the recording."""
        return self._taken

    def give_way(self) -> None:
        """Do nothing: torch.profiler runs beside it."""

    def stop(self) -> SourceOutcome:
        """End recording and write the data. Raises SourceError if there is none."""
        begin_ns = time.thread_time_ns()
        with self._guard.lock:
            self._end()
        if self._worker is not None:
            if not self._exiting:
                self._stopping.release()
            self._worker.join()
            self._worker = None
        self._guard.remove()
        self._write()
        self._growth.ended()
        if self._gaps and not self._gaps[-1][1]:
            self._gaps[-1][1] = time.time_ns()
        self._arena.finish()
        self._leave()
        self._cpu_ns += time.thread_time_ns() - begin_ns
        if not self._count and self._problem:
            raise SourceError("JAX_PROFILER_FAILED", self._problem)
        warnings = [self._problem] if self._problem else []
        if self._arena.lost_bytes:
            text = "%d MiB of XLA's profile is missing: it did not reach the daemon in time"
            warnings.append(text % (self._arena.lost_bytes // _MIB + 1))
        metadata = {
            "pieces": self._count,
            "gaps_ns": self._gaps[:_MOST_GAPS],
            "end_ns": self._longest_end_ns,
            "threads": _python_threads(),
        }
        return SourceOutcome(
            self.counts(), metadata, warnings, detach_ns=0, cpu_ns=self._cpu_ns, incomplete=self._incomplete()
        )

    def close(self) -> None:
        """Free the arena, and end what start() began if stop() was not called. Never raises."""
        with self._guard.lock:
            self._end()
        self._guard.remove()
        self._leave()
        self._arena.close()

    def _incomplete(self) -> str:
        missing_ns = sum(end - begin for begin, end in self._gaps)
        if not missing_ns:
            return ""
        return (
            "to limit memory use, JAX's profiler recorded in %d pieces, and %.2f s between them are missing; request a "
            "shorter capture or a larger buffer limit" % (self._count, missing_ns / 1e9)
        )

    # ------------------------------------------------------------ under the guard's lock

    def _begin(self) -> None:
        try:
            session = self._session_class(self._options)
        except Exception as exc:
            raise SourceError("JAX_PROFILER_FAILED", "JAX's profiler did not start: %s" % _first_line(exc)) from exc
        _keep(session, True)
        self._session = session

    def _end(self) -> None:
        """End the session, if one is open, and keep its bytes; no session of ours begins afterwards. Never raises."""
        self._over = True
        self._end_piece()

    def _end_piece(self) -> None:
        session = self._session
        if session is None:
            return
        begin_ns = time.monotonic_ns()
        try:
            piece = session.stop()  # a signal handler may run after it and come here again: it then raises
            self._longest_end_ns = max(self._longest_end_ns, time.monotonic_ns() - begin_ns)
            with self._pieces_lock:
                self._pieces.append(piece)
            self._count += 1
        except Exception as exc:  # noqa: BLE001 - the outcome tells it
            if self._session is session:
                self._problem = "JAX's profiler returned no result: %s" % _first_line(exc)
                log_exception(self._problem)
        if self._session is session:
            self._session = None
            _keep(session, False)

    # ------------------------------------------------------------ on the program's thread, under the guard's lock

    def _make_way(self, what: str) -> None:
        if self._taken is None and not self._over:
            self._taken = Takeover(time.time_ns(), what, "the program's own %s" % what)
        self._end()

    # ------------------------------------------------------------ the thread that watches

    def _watch(self) -> None:
        began_ns = time.thread_time_ns()
        try:
            self._watch_on()
        except Exception as exc:  # noqa: BLE001 - the outcome tells it
            with self._guard.lock:
                self._end()
            self._problem = "the recording ended early: %s" % _first_line(exc)
            log_exception(self._problem)
        self._cpu_ns += time.thread_time_ns() - began_ns

    def _watch_on(self) -> None:
        self._growth.begin()
        begun_ns = time.monotonic_ns()
        while not self._stopping.acquire(timeout=_WATCH_S):
            young = time.monotonic_ns() - begun_ns < SHORTEST_PIECE_S * 1e9
            if not self._growth.is_near() or young:
                continue
            gap_ns = time.time_ns()
            with self._guard.lock:
                if self._over:
                    break
                self._end_piece()
            self._write()
            returned = self._growth.ended()
            with self._guard.lock:
                if self._over:
                    break
                if not returned:
                    self._gaps.append([gap_ns, 0])
                    break
                refuse_if_used(self._profiler)
                self._growth.begin()
                begun_ns = time.monotonic_ns()
                self._guard.begin(self._begin)
                self._gaps.append([gap_ns, time.time_ns()])
        if self._exiting:
            with self._guard.lock:
                self._end()
            self._write()
            self._written.release()

    def _write(self) -> None:
        """Write the bytes of ended sessions into the arena."""
        with self._pieces_lock:
            self._growth.ending()
            while self._pieces:
                piece = self._pieces.pop(0)
                self._arena.copy_from(PART_HEAD.pack(len(piece)))
                self._arena.copy_from(piece)

    # ------------------------------------------------------------ the end of the process, and its children

    def _at_exit(self) -> None:
        """Runs on the program's main thread. The exit is safe whether or not the session has ended by then."""
        if self._pid != os.getpid() or self._worker is None or not self._stopping.locked():
            return
        self._exiting = self._over = True
        self._stopping.release()
        if not self._written.acquire(timeout=_EXIT_LIMIT_S) and self._exit_guard is not None:
            self._exit_guard.place()

    def _leave(self) -> None:
        atexit.unregister(self._at_exit)
        _sessions.discard(self)

    def after_fork_in_child(self) -> None:
        """Forget the session in a forked child, where nothing uses it any more."""
        self._session = None
        self._over = True
        self._guard.remove()
        self._leave()


def _python_threads() -> Dict[str, List[int]]:
    """Maps the kernel's thread names to the ids of the program's Python threads: XLA knows threads only by name."""
    found: Dict[str, List[int]] = {}
    for tid in [getattr(thread, "native_id", None) for thread in program_threads()][:_MOST_THREADS]:
        if tid is not None:
            found.setdefault(command_name(tid), []).append(tid)
    return found


def _keep(session: Any, wanted: bool) -> None:
    """Add the reference that keeps the object forever, or remove it."""
    if not _counts:
        import ctypes  # on the agent's thread: a session of ours begins before one of the program's

        from kineto_agent.system.libraries import interpreter

        _counts[:] = [ctypes.py_object, interpreter().Py_IncRef, interpreter().Py_DecRef]
    as_object, increase, decrease = _counts
    (increase if wanted else decrease)(as_object(session))


_counts: List[Any] = []


def _first_line(exc: BaseException) -> str:
    if isinstance(exc, SourceError):
        return exc.reason
    return (str(exc).splitlines() or [type(exc).__name__])[0][:200]


_sessions: Set[XlaSession] = set()


def _after_fork_in_child() -> None:
    for session in list(_sessions):
        session.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)


# HLO operations of JAX programs: the activity types that a process offers, and why others are missing.
#
# A session of JAX's profiler has two kinds of planes. On the host: HLO operations that a CPU ran (cpu_op), and
# annotations of the program and of XLA's runtime (user_annotation). On a device: what ran there (kernel). These are
# Kineto's own names, so that everything that reads a trace of PyTorch reads one of JAX.
#
# With a CPU alone a session is part of a capture by default: the program's steps take some 1.1 to 1.3 times as long
# (docs/measurements.md). With other devices it is recorded only if one of its types is named, since the cost of their
# plug-ins has not been measured. On NVIDIA's and AMD's GPUs XLA's profiler would take CUPTI or rocprofiler away from
# us, or fail where we were first: there it is not used. CUPTI has the kernels, and hlo_modules.py maps them to HLO
# operations.
_HOST_TYPES = ("cpu_op", "user_annotation")
_DEVICE_TYPES = ("kernel",)
_GPUS = ("cuda", "rocm")
_HOST = ["cpu"]


class JaxSource:
    """HLO operations through JAX's own profiler."""

    name = "jax"

    @property
    def on_request(self) -> FrozenSet[str]:
        """All types, unless the program computes only on a CPU."""
        platforms = jax_runtime.platforms()
        return frozenset() if platforms == _HOST else frozenset((*_HOST_TYPES, *_DEVICE_TYPES))

    def activity_types(self) -> List[str]:
        """All types, once the program has created a backend, if nothing prevents a session."""
        return [] if not jax_runtime.platforms() or self._refusal() else self._types()

    def why_not(self, missing: Iterable[str]) -> str:
        """Why these types are not offered; "" if they are not this source's, or without JAX."""
        own = {*_HOST_TYPES, *_DEVICE_TYPES}.intersection(missing)
        if not own or not jax_runtime.imported():
            return ""
        on_cpu = jax_runtime.platforms() == _HOST and own.issubset(_DEVICE_TYPES)
        return self._refusal() or ("JAX uses only the CPU here, which has no kernels" if on_cpu else "")

    def would_yield(self, request: SourceRequest) -> bool:
        """False: torch.profiler runs beside it."""
        return False

    def prepare(self, request: SourceRequest) -> XlaSession:
        """Create the arena. Raises SourceError."""
        refusal = self._refusal()
        if refusal:
            raise SourceError("JAX_PROFILER_UNAVAILABLE", refusal)
        profiler = jax_runtime.find()
        refuse_if_used(profiler)
        metadata = {
            "jax_version": jax_runtime.version(),
            "platforms": jax_runtime.platforms(),
            "activity_types": sorted(request.activity_types),
        }
        arena = FileArena(self.name, request.buffer_limit_bytes)
        return XlaSession(profiler, arena, metadata, MOST_GROWTH * request.buffer_limit_bytes)

    def _types(self) -> List[str]:
        devices = _DEVICE_TYPES if jax_runtime.platforms() != _HOST else ()
        return [*_HOST_TYPES, *devices]

    def _refusal(self) -> str:
        """Why this program allows no session at all; "" if it does."""
        platforms = jax_runtime.platforms()
        if not platforms:
            return "the program has not used a device yet (JAX has no backend)"
        gpus = [name for name in platforms if name in _GPUS]
        if gpus:
            return "JAX uses %s here, where its profiler would take the GPU's records from the agent" % gpus[0]
        if jax_runtime.logs_sessions():
            return "XLA would write to the program's standard error (TF_CPP_MIN_LOG_LEVEL is 0)"
        try:
            profiler = jax_runtime.find()
            jax_runtime.options(profiler)
            if profiler.state.profile_session is None:  # otherwise the refusal is temporary, and prepare() reports it
                refuse_if_used(profiler)
        except SourceError as error:
            return error.reason
        return ""
