"""Python stacks: what every thread is executing, sampled at a fixed rate.

Theory of operation
    A thread of ours wakes at absolute deadlines, takes sys._current_frames() and writes one STACK_SAMPLE per
    thread. Stacks are a trie: a node is (parent node, code number), so that a sample is 24 bytes. Code objects
    and nodes are interned into the arena's string table the first time they are seen; the daemon reads nothing
    from this process. A whole stack seen before costs one walk and one dictionary look-up.

    The thread needs the GIL for each sample. While Python code runs it waits for it for at most the switch
    interval (5 ms), while a C call keeps the GIL it waits as long as that takes: such ticks are counted as
    missed. A sample holds the GIL for some microseconds a thread; if that comes to more than MAX_LOAD of the
    time the rate is lowered, and the outcome says so.

    A frame must not outlive its tick: its locals would (tensors, for example). And up to CPython 3.11 no garbage
    may be collected while frames are looked at: that happens inside any allocation, a finalizer that releases
    the GIL (a tensor's) lets the sampled thread go on, and the interpreter then links the new frame object to a
    frame that has ended: a crash, at once or later.

    A buffer is published every PUBLISH_PERIOD_NS at the latest, so a killed process loses no more than that.
    Interned code objects are kept alive during the session only, which makes their addresses good keys.
"""

import _thread
import gc
import struct
import sys
import time
from types import CodeType, FrameType
from typing import Any, Dict, FrozenSet, List, Optional, Tuple

from kineto_agent import arena
from kineto_agent.arena_writer import ArenaWriter
from kineto_agent.debuglog import log_exception
from kineto_agent.sources.interface import SourceCounts, SourceError, SourceOutcome, SourceRequest
from kineto_agent.threads import NativeIds, Thread, command_name, program_thread, start_thread

DEFAULT_HZ = 100
MAX_HZ = 1000
MAX_DEPTH = 256  # frames; of a deeper stack the innermost ones are kept
MAX_LOAD = 0.02  # of one core and of the GIL
PUBLISH_PERIOD_NS = 250_000_000
_BUDGET_PERIOD_NS = 500_000_000
_STRINGS_BYTES = 4 * 1024 * 1024  # about 100,000 code objects and nodes; touched only as used
_MAX_CACHED_STACKS = 4096
_STOP_TIMEOUT_S = 2.0
_NODE = struct.Struct("=II")  # parent node, code number
_S = 1_000_000_000
_ALLOCATION_COLLECTS = sys.version_info < (3, 12)  # later ones collect between bytecodes only


def sampling_rate(options: Dict[str, Any]) -> int:
    """The rate wanted by wire.Start.options, in Hz. Raises SourceError."""
    hz = options.get("stack_sample_hz") or DEFAULT_HZ
    if not isinstance(hz, int) or not 1 <= hz <= MAX_HZ:
        reason = "stack_sample_hz is %r: it must be a whole number from 1 to %d" % (hz, MAX_HZ)
        raise SourceError("INVALID_OPTION", reason)
    return hz


class PythonStacksSource:
    """Samples every Python thread of this process."""

    name = "python_stacks"
    on_request: FrozenSet[str] = frozenset()

    def activity_types(self) -> List[str]:
        """Always available, except in a free-threaded build: frames of a running thread cannot be read there."""
        with_gil = getattr(sys, "_is_gil_enabled", None)
        return ["python_function"] if with_gil is None or with_gil() else []

    def would_yield(self, request: SourceRequest) -> bool:
        """No: the program's own profiler may run beside it."""
        return False

    def prepare(self, request: SourceRequest) -> "PythonStacksSession":
        """Make the arena. Raises SourceError."""
        hz = sampling_rate(request.options)
        return PythonStacksSession(hz, ArenaWriter(self.name, request.buffer_limit_bytes, _STRINGS_BYTES))


class _StackTable:
    """Interns code objects and stacks into the arena."""

    def __init__(self, writer: ArenaWriter) -> None:
        self._writer = writer
        self._codes: Dict[int, int] = {}  # id -> number
        self._alive: List[CodeType] = []
        self._nodes: Dict[Tuple[int, int], int] = {}
        self._stacks: Dict[Tuple[int, ...], int] = {}

    def node(self, codes: List[CodeType]) -> int:
        """The node of a stack given innermost first; 0 if the string table is full."""
        key = tuple(map(id, codes))
        node = self._stacks.get(key)
        if node is None:
            node = self._intern(codes)
            if node:
                if len(self._stacks) >= _MAX_CACHED_STACKS:
                    self._stacks.clear()
                self._stacks[key] = node
        return node

    def _intern(self, codes: List[CodeType]) -> int:
        node = 0
        for code in reversed(codes):
            number = self._codes.get(id(code)) or self._intern_code(code)
            child = self._nodes.get((node, number)) if number else 0
            if child is None:
                child = self._intern_node(node, number)
            if not child:
                return 0
            node = child
        return node

    def _intern_code(self, code: CodeType) -> int:
        number = len(self._codes) + 1
        name = getattr(code, "co_qualname", code.co_name)  # 3.11 and later have the qualified one
        text = "%s\0%d\0%s" % (code.co_filename, code.co_firstlineno, name)
        if not self._writer.intern(number, arena.SPACE_PYTHON_CODE, text.encode("utf-8", "replace")):
            return 0
        self._codes[id(code)] = number
        self._alive.append(code)
        return number

    def _intern_node(self, parent: int, number: int) -> int:
        node = len(self._nodes) + 1
        if not self._writer.intern(node, arena.SPACE_STACK_NODE, _NODE.pack(parent, number)):
            return 0
        self._nodes[(parent, number)] = node
        return node


class _Rate:
    """Absolute deadlines, and a period that keeps the load under MAX_LOAD."""

    def __init__(self, hz: int) -> None:
        self.wanted_ns = self.period_ns = _S // hz
        self.longest_ns = self.period_ns
        self.missed = 0
        self.longest_cost_ns = 0
        self._deadline_ns = time.monotonic_ns()
        self._since_ns = self._deadline_ns
        self._samples = 0
        self._cost_ns = 0

    def spent(self, cost_ns: int) -> None:
        """One sample took this much CPU time."""
        self._samples += 1
        self._cost_ns += cost_ns
        now_ns = time.monotonic_ns()
        if now_ns - self._since_ns < _BUDGET_PERIOD_NS:
            return
        mean_ns = self._cost_ns // self._samples
        if self.period_ns > self.wanted_ns or self._cost_ns > MAX_LOAD * (now_ns - self._since_ns):
            self.period_ns = max(self.wanted_ns, int(mean_ns / MAX_LOAD))
        if self.period_ns > self.longest_ns:
            self.longest_ns, self.longest_cost_ns = self.period_ns, mean_ns
        self._since_ns, self._samples, self._cost_ns = now_ns, 0, 0

    def pause_s(self) -> float:
        """How long to wait for the next deadline; deadlines that have passed are counted as missed."""
        now_ns = time.monotonic_ns()
        self._deadline_ns += self.period_ns
        if self._deadline_ns <= now_ns:
            late = (now_ns - self._deadline_ns) // self.period_ns + 1
            self.missed += late
            self._deadline_ns += late * self.period_ns
        return (self._deadline_ns - now_ns) / _S

    def warnings(self) -> List[str]:
        """For people: was the rate lowered?"""
        if self.longest_ns == self.wanted_ns:
            return []
        text = "stacks were sampled at down to %.0f Hz instead of %.0f Hz: one sample of all threads took %.2f ms"
        return [text % (_S / self.longest_ns, _S / self.wanted_ns, self.longest_cost_ns / 1e6)]


class PythonStacksSession:
    """One recording; its thread is the only writer of the arena."""

    format = "python_stacks/1"
    yields = False

    def __init__(self, hz: int, writer: ArenaWriter) -> None:
        self.metadata: Dict[str, Any] = {
            "hz": hz,
            "python_version": "%d.%d.%d" % sys.version_info[:3],
            "max_depth": MAX_DEPTH,
        }
        self._writer = writer
        self.arena_fd = writer.fd
        self._hz = hz
        self._stop = _thread.allocate_lock()
        self._thread: Optional[Thread] = None
        self._table = _StackTable(writer)
        self._ids = NativeIds()
        self._rate = _Rate(hz)
        self._named: Dict[int, str] = {}
        self._ticks = self._truncated = self._unnamed = 0
        self._cpu_ns = 0
        self._failure = ""

    # ------------------------------------------------------------ the agent's thread

    def start(self) -> None:
        """Start the sampler's thread. Raises SourceError."""
        self._stop.acquire()
        try:
            self._thread = start_thread("kineto-stacks", self._run)
        except RuntimeError as exc:
            raise SourceError("NO_THREAD", "cannot start the sampler's thread: %s" % exc) from exc

    def counts(self) -> SourceCounts:
        """Samples so far; one sample is one thread at one time."""
        return self._writer.counts()

    def stop(self) -> SourceOutcome:
        """End sampling; never raises."""
        warnings = []
        if self._thread is not None:
            self._stop.release()
            self._thread.join(_STOP_TIMEOUT_S)
            if self._thread.is_alive():
                warnings.append(
                    "the stack sampler did not get the GIL for %.0f s: its last samples are lost" % _STOP_TIMEOUT_S
                )
        warnings += self._rate.warnings()
        if self._failure:
            warnings.append("the stack sampler failed: " + self._failure)
        if self._unnamed:
            warnings.append("%d samples were dropped: the table of stacks is full" % self._unnamed)
        metadata = {"ticks": self._ticks, "missed_ticks": self._rate.missed, "truncated_stacks": self._truncated}
        return SourceOutcome(self.counts(), metadata, warnings, detach_ns=0, cpu_ns=self._cpu_ns)

    def give_way(self) -> None:
        """The program's own profiler may run beside it."""

    def close(self) -> None:
        """Free the arena."""
        self._writer.close()

    # ------------------------------------------------------------ the sampler's thread

    def _run(self) -> None:
        began_ns = time.thread_time_ns()
        try:
            self._loop()
        except Exception as exc:  # noqa: BLE001 - the program must not see it; the outcome tells it
            self._failure = "%s: %s" % (type(exc).__name__, exc)
            log_exception("stack sampler")
        finally:
            self._cpu_ns = time.thread_time_ns() - began_ns

    def _loop(self) -> None:
        published_ns = time.monotonic_ns()
        self._sample()  # interns most of what there is; no measure for the others
        self._rate = rate = _Rate(self._hz)
        stopping = self._stop.acquire(timeout=rate.pause_s())
        while not stopping:
            before_ns = time.thread_time_ns()
            self._sample()
            rate.spent(time.thread_time_ns() - before_ns)
            now_ns = time.monotonic_ns()
            if now_ns - published_ns >= PUBLISH_PERIOD_NS:
                self._writer.publish()
                published_ns = now_ns
            stopping = self._stop.acquire(timeout=rate.pause_s())
        self._writer.finish()

    def _sample(self) -> None:
        now_ns = time.time_ns()
        self._ticks += 1
        collecting = _ALLOCATION_COLLECTS and gc.isenabled()
        if collecting:
            gc.disable()
        frames: Dict[int, FrameType] = {}
        try:
            frames = sys._current_frames()
            frames.pop(_thread.get_ident(), None)  # else this frame is part of a cycle that keeps all frames alive
            for ident, frame in frames.items():
                tid = self._ids.tid(ident)
                if tid:
                    self._sample_thread(now_ns, ident, tid, frame)
            if len(self._ids) > len(frames):
                self._ids.forget_all_but(frames)
        finally:
            frames.clear()
            if collecting:
                gc.enable()

    def _sample_thread(self, now_ns: int, ident: int, tid: int, leaf: FrameType) -> None:
        line = leaf.f_lineno or 0
        codes: List[CodeType] = []
        frame: Optional[FrameType] = leaf
        while frame is not None and len(codes) < MAX_DEPTH:
            codes.append(frame.f_code)
            frame = frame.f_back
        self._truncated += frame is not None
        if tid not in self._named:
            self._name(ident, tid)
        node = self._table.node(codes)
        if node:
            self._writer.append(arena.STACK_SAMPLE, now_ns, tid, node, line, 0)
        else:
            self._unnamed += 1
            self._writer.drop()

    def _name(self, ident: int, tid: int) -> None:
        thread = program_thread(ident)
        name = thread.name if thread is not None else command_name(tid)
        self._named[tid] = name
        self._writer.intern(tid, arena.SPACE_THREAD_NAME, name.encode("utf-8", "replace")[:256])
