"""Records PyTorch's operators through torch's own profiler, if the observer (observer_binding.py) does not suffice.

That includes the kernels and calls of accelerators that registered a profiler with torch (device_profilers.py).

Theory of operation
    profiler_recorder.py manages the sessions of torch's profiler. If they can end without the GIL, one session is the
    whole recording: the program is affected by the recording itself and by a pause of some milliseconds at its end.
    Otherwise a thread of ours cuts the recording into pieces so short that no stop holds the GIL for more than
    MAX_STALL_NS: it begins with FIRST_PIECE_S and aims at half the limit. Ops between two pieces are missing, and the
    outcome says for how long.

    Torch keeps all events in the process, about 0.25 KB each, and needs 2 KB more for each when the session ends. It
    does not report its number of events, but the process's growth can be measured (system/memory_use.py): before ending
    would take MOST_GROWTH times the buffer limit, the same thread ends the session, writes it, releases the memory and
    begins another; if the memory is not released, it begins none. The outcome says how much time is missing.

    All sessions are written as JSON by Kineto itself, each into a private file, whose bytes go through the arena; the
    daemon reads them (decode/torch/kineto_json.py). Each document begins with the byte DOCUMENT, as in RFC 7464.

    Beginning or ending a session of torch's profiler requires `_lock`. The program's own profiler takes precedence:
    `give_way` ends ours on its thread, before its own begins. The results of ended sessions are independent, and are
    written in stop() under `_write_lock`, whatever the program's profiler does at that time.

    A process that exits with a session on crashes. `_at_exit` is called by the interpreter before it ends (after
    sys.exit, an exception, the end of the script), and switches its collection off, which suffices and takes 1 ms; the
    exit waits only while a thread of ours is inside torch. Data not written by then is lost, since the exit would have
    to wait for it. os._exit and signals run no C++ destructors, so they are harmless.
"""

import _thread
import atexit
import os
import time
from typing import Any, Dict, List, Optional, Set

from kineto_agent.protocol.records import TORCH_PROFILER_FORMAT
from kineto_agent.sources.file_arena import FileArena
from kineto_agent.sources.interface import SourceCounts, SourceError, SourceOutcome, SourceRequest
from kineto_agent.sources.torch import kineto_state, libtorch_symbols
from kineto_agent.sources.torch.device_profilers import DeviceProfiler
from kineto_agent.sources.torch.profiler_recorder import Flags, PrivateFile, Recorder, Times
from kineto_agent.system.debuglog import log_exception
from kineto_agent.system.memory_use import Growth
from kineto_agent.system.threads import Thread, start_thread

DOCUMENT = b"\x1e"
FIRST_PIECE_S = 0.02
SHORTEST_PIECE_S = 0.005
LONGEST_PIECE_S = 2.0
MOST_GROWTH = 2  # of memory, in buffer limits: 0.05 M events with the default limit of 128 MiB
# Growth at the end of a session, relative to before: 5 to 11 were measured. Doubled, since events that torch stored on
# the program's threads are in its own heap, which does not shrink.
END_GROWTH = 20
_WATCH_S = 0.02
MAX_STALL_NS = 200_000_000
_END_LIMIT_S = 10.0  # for a torch that never returns, while the program's own profiler or its exit waits
_MIB = 1 << 20


def flags(options: Dict[str, Any]) -> Flags:
    """The flags for torch, which computes FLOPs from shapes. Its tracer of calls is never used (call_tracing.py)."""
    flops = bool(options.get("with_flops"))
    return Flags(record_shapes=bool(options.get("record_shapes")) or flops, with_flops=flops)


def prepare(request: SourceRequest, why: str, device: Optional[DeviceProfiler] = None) -> "TorchProfilerSession":
    """Return a session that records through torch's profiler. why: what the observer lacks. Raises SourceError.

    device: the accelerator to record as well.
    """
    if kineto_state.active():
        raise SourceError("USER_PROFILER_ACTIVE", "the program's own torch.profiler is warming up or recording")
    why_pieces = libtorch_symbols.why_not()
    functions = None if why_pieces else libtorch_symbols.load()
    recorder = Recorder(flags(request.options), functions, device.activity if device else "")
    metadata = {
        "way": "torch.profiler: " + why,
        "torch_version": libtorch_symbols.version_text(),
        "activity_types": sorted(request.activity_types),
        "flops": bool(request.options.get("with_flops")),
    }
    if device is not None:
        metadata["accelerator"] = device.name
    arena = FileArena("torch_ops", request.buffer_limit_bytes)
    return TorchProfilerSession(recorder, arena, metadata, why_pieces, MOST_GROWTH * request.buffer_limit_bytes)


class PieceLength:
    """The length of the next piece, chosen so that ending it holds the GIL for half of the limit."""

    def __init__(self) -> None:
        self.seconds = FIRST_PIECE_S
        self.longest_stall_ns = 0

    def ended(self, stall_ns: int) -> None:
        """Adjust the length to how long at a time the piece held the GIL."""
        self.longest_stall_ns = max(self.longest_stall_ns, stall_ns)
        factor = min(max(MAX_STALL_NS / 2 / max(stall_ns, 1), 0.1), 2.0)
        self.seconds = min(max(self.seconds * factor, SHORTEST_PIECE_S), LONGEST_PIECE_S)


class TorchProfilerSession:
    """One recording."""

    format = TORCH_PROFILER_FORMAT
    yields = True

    def __init__(
        self,
        recorder: Recorder,
        arena: FileArena,
        metadata: Dict[str, Any],
        why_pieces: str,
        most_growth_bytes: int = 1 << 62,
    ) -> None:
        self.metadata = metadata
        self.arena_fd = arena.fd
        self._recorder = recorder
        self._arena = arena
        self._why_pieces = why_pieces or "this torch does not report whether its profiler is on"
        self._lock = _thread.RLock()  # a signal handler of the program may start its profiler anywhere
        self._write_lock = _thread.allocate_lock()
        self._pid = os.getpid()
        self._over = False  # no new session may begin
        self._exiting = False  # nothing is written any more
        self._over_ns = 0  # since then; monotonic
        self._growth = Growth(most_growth_bytes, END_GROWTH)
        self._given_up_ns = 0  # since then nothing is recorded, as memory was not released; monotonic
        self._stopping = _thread.allocate_lock()  # released to end the cutting thread
        self._worker: Optional[Thread] = None
        self._length = PieceLength()
        self._times: List[Times] = []
        self._missing_ns = 0  # time between pieces
        self._written_bytes = 0
        self._warnings: List[str] = []
        self._cpu_ns = 0

    # ------------------------------------------------------------ the agent's thread

    def start(self) -> None:
        """Begin to record. Raises SourceError."""
        with self._lock:
            if self._over or kineto_state.active():
                raise SourceError("USER_PROFILER_ACTIVE", "the program's own torch.profiler has just started")
            atexit.register(self._at_exit)
            _sessions.add(self)
            self._recorder.begin()
        self._stopping.acquire()
        try:
            self._worker = start_thread("kineto-torch", self._cut if self._recorder.keeps_the_gil else self._watch)
        except RuntimeError as exc:
            raise SourceError("NO_THREAD", "cannot start the thread that watches torch's profiler: %s" % exc) from exc

    def counts(self) -> SourceCounts:
        """Records so far; a record is a buffer of JSON text."""
        return self._arena.counts()

    def give_way(self) -> None:
        """End the session now; its events are kept. Any thread; never raises."""
        if self._pid == os.getpid():
            self._ends_now()
            if self._lock.acquire(timeout=_END_LIMIT_S):
                try:
                    self._end()
                finally:
                    self._lock.release()

    def stop(self) -> SourceOutcome:
        """End recording and write the data. Never raises."""
        begin_ns = time.thread_time_ns()
        with self._lock:
            self._end()
        if self._worker is not None:
            self._stopping.release()
            self._worker.join()
            self._worker = None
        self._write_all()
        self._growth.ended()
        if self._given_up_ns:
            self._missing_ns += self._over_ns - self._given_up_ns
        try:
            self._arena.finish()
        except Exception as exc:  # noqa: BLE001 - the outcome tells it
            self._warn("the last events could not be published: %s" % exc)
        if self._arena.lost_bytes:
            self._warn(
                "%d MiB of torch's events is missing: it did not reach the daemon in time"
                % (self._arena.lost_bytes // _MIB + 1)
            )
        self._leave()
        self._cpu_ns += time.thread_time_ns() - begin_ns
        return SourceOutcome(
            self.counts(),
            self._outcome_metadata(),
            self._warnings,
            detach_ns=0,
            cpu_ns=self._cpu_ns,
            incomplete=self._incomplete(),
        )

    def close(self) -> None:
        """Free the arena, and end what start() began if stop() was not called. Never raises."""
        if self._recorder.on or self._recorder.pending:
            self.stop()
        self._leave()
        self._arena.close()

    def _incomplete(self) -> str:
        """Why ops are missing, if memory is the reason."""
        if self._recorder.keeps_the_gil or not self._missing_ns:
            return ""
        return (
            "to limit memory use, torch's profiler recorded in %d pieces, and %.2f s between them are missing; request "
            "a shorter capture or a larger buffer limit" % (len(self._times), self._missing_ns / 1e9)
        )

    def _outcome_metadata(self) -> Dict[str, Any]:
        way = self.metadata["way"]
        if self._recorder.keeps_the_gil:
            way += " (in %d pieces: %s)" % (len(self._times), self._why_pieces)
            if self._missing_ns:
                self._warnings.append(
                    "torch's profiler was restarted %d times to avoid stopping the program for long: operators of the "
                    "%.2f s in between are missing" % (max(len(self._times) - 1, 0), self._missing_ns / 1e9)
                )
        return {
            "way": way,
            "pieces": len(self._times),
            "end_ns": max((times.end_ns for times in self._times), default=0),
            "save_ns": max((times.save_ns for times in self._times), default=0),
            "free_ns": max((times.free_ns for times in self._times), default=0),
            "json_bytes": self._written_bytes,
        }

    # ------------------------------------------------------------ under the lock

    def _end(self) -> None:
        self._ends_now()
        self._end_piece()

    def _ends_now(self) -> None:
        self._over_ns = self._over_ns or time.monotonic_ns()
        self._over = True

    def _end_piece(self) -> int:
        try:
            return self._recorder.end()
        except Exception as exc:  # noqa: BLE001 - the outcome tells it
            self._warn(_text(exc))
            return 0

    # ------------------------------------------------------------ ended sessions

    def _write_all(self) -> None:
        with self._write_lock:
            while self._recorder.pending and not self._exiting:
                self._write_piece()
        if self._recorder.pending:
            self._arena.mark_cut()
            self._warn("torch's events are missing: the process exited before they were written")

    def _write_piece(self) -> int:
        """Write one piece. Returns the longest time in ns that torch took for a step."""
        file: Optional[PrivateFile] = None
        if self._exiting:
            return 0
        try:
            file = PrivateFile()
            times = self._recorder.write_oldest(file, self._growth.ending)
            self._times.append(times)
            self._written_bytes += os.fstat(file.fd).st_size
            self._arena.copy_from(DOCUMENT)
            self._arena.copy_from(file.fd)
            return max(times.save_ns, times.free_ns)
        except Exception as exc:  # noqa: BLE001 - the outcome tells it
            if file is None:
                self._recorder.drop_oldest()
            self._arena.mark_cut()
            self._warn("torch's events are missing: " + _text(exc))
            return 0
        finally:
            if file is not None:
                file.close()

    def _warn(self, text: str) -> None:
        log_exception(text)
        if text not in self._warnings:
            self._warnings.append(text)

    # ------------------------------------------------------------ the thread that watches, or cuts

    def _watch(self) -> None:
        began_ns = time.thread_time_ns()
        try:
            self._watch_on()
        except Exception as exc:  # noqa: BLE001 - the outcome tells it
            with self._lock:
                self._end()
                self._warn("the recording ended early: " + _text(exc))
        self._cpu_ns += time.thread_time_ns() - began_ns

    def _watch_on(self) -> None:
        self._growth.begin()
        while not self._stopping.acquire(timeout=_WATCH_S):
            if not self._growth.is_near():
                continue
            with self._lock:
                if self._over:
                    break
                begun_ns = time.monotonic_ns()
                self._end_piece()
            with self._write_lock:
                self._write_piece()
            returned = self._growth.ended()
            with self._lock:
                if self._over:  # in between: data written since then is no loss
                    self._missing_ns += self._over_ns - begun_ns
                    break
                if kineto_state.active():  # the program's own session has begun, unnoticed by the guard
                    raise SourceError("USER_PROFILER_ACTIVE", "the program's own torch.profiler started")
                if not returned:
                    self._given_up_ns = begun_ns
                    break
                self._growth.begin()
                self._recorder.begin()
                self._missing_ns += time.monotonic_ns() - begun_ns

    def _cut(self) -> None:
        began_ns = time.thread_time_ns()
        try:
            while not self._stopping.acquire(timeout=self._length.seconds):
                with self._lock:
                    if self._over:
                        break
                    stall_ns = self._cut_once()
                with self._write_lock:
                    self._length.ended(max(stall_ns, self._write_piece()))
        except Exception as exc:  # noqa: BLE001 - the outcome tells it
            with self._lock:
                self._end()
                self._warn("the recording ended early: " + _text(exc))
        finally:
            self._cpu_ns += time.thread_time_ns() - began_ns

    def _cut_once(self) -> int:
        ended_ns = time.monotonic_ns()
        stall_ns = self._end_piece()
        self._recorder.begin()
        self._missing_ns += time.monotonic_ns() - ended_ns
        return stall_ns

    # ------------------------------------------------------------ the end of the process, and its children

    def _at_exit(self) -> None:
        """Runs on the program's main thread. Waits until no thread of ours is inside torch."""
        if self._pid != os.getpid():
            return
        self._exiting = True
        self._ends_now()
        try:
            if self._lock.acquire(timeout=_END_LIMIT_S):
                try:
                    self._recorder.leave_to_exit()
                finally:
                    self._lock.release()
            if self._write_lock.acquire(timeout=_END_LIMIT_S):
                self._write_lock.release()
        except Exception:  # noqa: BLE001 - never into the program
            log_exception("torch's profiler failed when the process exited")

    def _leave(self) -> None:
        atexit.unregister(self._at_exit)
        _sessions.discard(self)

    def after_fork_in_child(self) -> None:
        """Stop recording in a forked child, where nothing uses this session any more."""
        self._recorder.forget_in_child()
        self._leave()


def _text(exc: Exception) -> str:
    return exc.reason if isinstance(exc, SourceError) else "%s: %s" % (type(exc).__name__, exc)


_sessions: Set[TorchProfilerSession] = set()


def _after_fork_in_child() -> None:
    for session in list(_sessions):
        session.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
