"""Samples the Python stacks of all threads at a fixed rate.

Theory of operation
    The sampler is a thread in C that never takes the GIL (agent/native/python/stack_sampler.c): a sample is taken when
    it is due, even while a C call keeps the GIL or Python code keeps releasing it. This module starts and stops it and
    passes on the program's own thread names. sampler_binding.py verifies beforehand that it reads this interpreter
    correctly.

    A sample is one thread at one time: its stack, whether it was on a CPU, waited for the GIL or for anything else, and
    its CPU time since its last sample. Threads without Python are sampled whenever they have used CPU time. Sampling
    uses at most MAX_LOAD of a core: otherwise the rate is lowered, and the outcome says so.
"""

import sys
from typing import Any, Dict, FrozenSet, List, Optional

from kineto_agent.protocol.records import PYTHON_STACKS_FORMAT
from kineto_agent.sources.interface import SourceCounts, SourceError, SourceOutcome, SourceRequest
from kineto_agent.sources.python.interpreter_layouts import known
from kineto_agent.system.threads import program_threads

DEFAULT_HZ = 100
MAX_HZ = 1000
MAX_DEPTH = 256  # STACK_DEPTH_MOST in frame_walk.h
MAX_LOAD_PPM = 20_000  # of one core
BUFFER_BYTES = 64 * 1024
_STRINGS_BYTES = 8 * 1024 * 1024  # about 100,000 nodes and 5,000 code objects; touched only as used
_STOP_LIMIT_MS = 2000
_S = 1_000_000_000
_TOLD_TORN = 0.01  # of all samples, and more than the standard error of the share: 0.5 / sqrt(samples)


def sampling_rate(options: Dict[str, Any]) -> int:
    """The sampling rate requested in wire.Start.options, in Hz. Raises SourceError."""
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
        """Offered in every CPython that has known structures and a GIL."""
        with_gil = getattr(sys, "_is_gil_enabled", None)
        there = known(sys.version_info[:2]) and (with_gil is None or with_gil())
        return ["python_function"] if there else []

    def would_yield(self, request: SourceRequest) -> bool:
        """False: the program's own profiler may run beside it."""
        return False

    def prepare(self, request: SourceRequest) -> "PythonStacksSession":
        """Check the sampler against this interpreter and create the arena. Raises SourceError."""
        hz = sampling_rate(request.options)
        try:
            from kineto_agent.sources.python import sampler_binding
        except ImportError as exc:
            reason = "stacks cannot be sampled: this Python has no ctypes (%s)" % exc
            raise SourceError("STACKS_UNREADABLE", reason) from exc
        sampler = sampler_binding.checked()
        config = sampler_binding.SamplerConfig(
            request.buffer_limit_bytes, BUFFER_BYTES, _STRINGS_BYTES, hz, MAX_LOAD_PPM
        )
        return PythonStacksSession(hz, sampler, sampler.prepare(config))


class PythonStacksSession:
    """One recording."""

    format = PYTHON_STACKS_FORMAT
    yields = False

    def __init__(self, hz: int, sampler: Any, arena_fd: int) -> None:
        self.metadata: Dict[str, Any] = {
            "hz": hz,
            "python_version": "%d.%d.%d" % sys.version_info[:3],
            "max_depth": MAX_DEPTH,
        }
        opcodes = opcode_table()
        if opcodes is not None:
            self.metadata["opcodes"] = opcodes
        self.arena_fd = arena_fd
        self._hz = hz
        self._sampler = sampler
        self._named: Dict[int, str] = {}

    def start(self) -> None:
        """Start the sampler's thread. Raises SourceError."""
        self._name_threads()
        self._sampler.start()

    def ticks(self) -> int:
        """How often all threads have been sampled so far."""
        return int(self._sampler.ticks())

    def counts(self) -> SourceCounts:
        """Samples so far; one sample is one thread at one time."""
        counts = self._sampler.counts()
        return SourceCounts(counts.records, counts.bytes, counts.dropped)

    def stop(self) -> SourceOutcome:
        """End sampling; never raises."""
        result = self._sampler.stop(_STOP_LIMIT_MS)
        self._name_threads()
        counts = SourceCounts(result.counts.records, result.counts.bytes, result.counts.dropped)
        told = ("ticks", "missed_ticks", "truncated_stacks", "torn_samples", "partial_stacks")
        metadata = {name: getattr(result, name) for name in told}
        return SourceOutcome(counts, metadata, self._warnings(result), detach_ns=0, cpu_ns=result.cpu_ns)

    def give_way(self) -> None:
        """Do nothing: the program's own profiler may run beside it."""

    def close(self) -> None:
        """Free the arena."""
        self._sampler.close()

    def _name_threads(self) -> None:
        """Pass on the program's own thread names; the sampler knows the kernel's."""
        for thread in program_threads():
            tid = getattr(thread, "native_id", None)  # eventlet's have none
            if tid is not None and self._named.get(tid) != thread.name:
                self._named[tid] = thread.name
                self._sampler.name(tid, thread.name)

    def _warnings(self, result: Any) -> List[str]:
        """Warnings for the user."""
        warnings = []
        if result.timed_out:
            warnings.append(
                "the stack sampler did not stop within %.0f s: its last samples are lost" % (_STOP_LIMIT_MS / 1e3)
            )
        if result.longest_period_ns > _S // self._hz:
            text = "the stack sampling rate dropped from %d Hz to %.0f Hz: one sample of all threads took %.2f ms"
            lowest = _S / result.longest_period_ns
            warnings.append(text % (self._hz, lowest, result.longest_cost_ns / 1e6))
        if result.unnamed_samples:
            warnings.append("%d samples were dropped: the table of stacks is full" % result.unnamed_samples)
        looks = result.counts.records + result.torn_samples
        if result.torn_samples > max(looks * _TOLD_TORN, looks**0.5 / 2):
            text = "%d of %d stack samples were left out: the stacks changed while being read"
            warnings.append(text % (result.torn_samples, looks))
        if result.threads_left_out:
            warnings.append("%d threads were left out of the stacks: there were too many" % result.threads_left_out)
        return warnings


# Maps the running interpreter's opcodes to instructions, so that bytecode can be read out of process.
#
# The interpreter specialises bytecode while it runs: it replaces opcodes by others without stable numbers. Python's
# module dis knows them. It is never imported here: torch and inspect have done so, and without it there is no table.
def opcode_table() -> Optional[Dict[str, List[int]]]:
    """For each instruction, the number of cache units that follow it, then its opcodes; None if unknown.

    From 3.11 on. Excludes instrumented opcodes, which profilers and debuggers insert.
    """
    dis = sys.modules.get("dis")
    try:
        return _table(dis) if dis is not None and sys.version_info >= (3, 11) else None
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        return None  # another release stores them differently


def _table(dis: Any) -> Dict[str, List[int]]:
    caches = dis._inline_cache_entries
    counts = dict(zip(dis.opname, caches)) if isinstance(caches, list) else caches
    table: Dict[str, List[int]] = {}
    for name, number in dis._all_opmap.items():
        if number < 256 and not name.startswith("INSTRUMENTED_") and name != "ENTER_EXECUTOR":
            base = dis.deoptmap.get(name, name)
            table.setdefault(base, [int(counts.get(base, 0))]).append(int(number))
    return table
