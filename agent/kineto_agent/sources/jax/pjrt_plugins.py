"""Records the devices of a PJRT plug-in in a program that uses XLA without JAX (torch_xla, other languages).

Theory of operation
    Such a program has the plug-in's library mapped, but no Python profiler. The plug-in's own profiler is called
    through its C interface (pjrt_api.py): it returns the planes of devices, and none of the host.

    It is recorded only on request. A plug-in may allow only one session at a time, and does not show whether the
    program has one: then ours fails with the plug-in's message, and the program's would fail while ours runs. Plug-ins
    for NVIDIA's and AMD's GPUs are left alone: their profilers would take CUPTI or rocprofiler away from ours.
"""

import _thread
import atexit
import os
import time
from typing import Any, Dict, FrozenSet, List

from kineto_agent.protocol.records import PART_HEAD, XPLANE_FORMAT
from kineto_agent.sources.file_arena import FileArena
from kineto_agent.sources.interface import SourceCounts, SourceError, SourceOutcome, SourceRequest
from kineto_agent.sources.jax import jax_runtime, pjrt_api
from kineto_agent.system.debuglog import log_exception

_TYPES = ["kernel"]
_EXIT_LIMIT_S = 0.02
_GPUS = ("cuda", "rocm")


class PjrtSession:
    """One recording."""

    format = XPLANE_FORMAT
    yields = False

    def __init__(self, profiler: pjrt_api.PluginProfiler, arena: FileArena, metadata: Dict[str, Any]) -> None:
        self.metadata = metadata
        self.arena_fd = arena.fd
        self._profiler = profiler
        self._arena = arena
        self._lock = _thread.allocate_lock()
        self._pid = os.getpid()
        self._on = False

    def start(self) -> None:
        """Begin to record. Raises SourceError."""
        self.metadata["started_ns"] = time.time_ns()
        self._profiler.create()
        atexit.register(self._end)
        self._profiler.start()
        self._on = True

    def counts(self) -> SourceCounts:
        """Records so far; a record is a buffer of a serialised XSpace."""
        return self._arena.counts()

    def stop(self) -> SourceOutcome:
        """End recording and write the data. Raises SourceError."""
        begin_ns = time.thread_time_ns()
        with self._lock:
            if self._on:
                self._on = False
                self._profiler.stop()
                data = self._profiler.collect()
                self._arena.copy_from(PART_HEAD.pack(len(data)))
                self._arena.copy_from(data)
        self._arena.finish()
        metadata = {"started_ns": self.metadata["started_ns"]}
        return SourceOutcome(self.counts(), metadata, [], detach_ns=0, cpu_ns=time.thread_time_ns() - begin_ns)

    def give_way(self) -> None:
        """Do nothing: torch.profiler does not use the plug-in."""

    def close(self) -> None:
        """Free everything."""
        self._end()
        self._arena.close()

    def _end(self) -> None:
        """End the session, also when the process exits; a forked child must not touch it. Never raises."""
        atexit.unregister(self._end)
        if self._pid != os.getpid():
            return
        if not self._lock.acquire(timeout=_EXIT_LIMIT_S):
            return  # our thread is inside the plug-in while the process exits
        try:
            try:
                if self._on:
                    self._on = False
                    self._profiler.stop()
            except SourceError:
                log_exception("the profiler of a PJRT plug-in")
            try:
                self._profiler.destroy()
            except SourceError:
                log_exception("the profiler of a PJRT plug-in")
        finally:
            self._lock.release()


class PluginsSource:
    """Devices of PJRT plug-ins."""

    name = "pjrt"
    on_request: FrozenSet[str] = frozenset(_TYPES)

    def __init__(self, maps: str = "/proc/self/maps") -> None:
        self._maps = maps

    def activity_types(self) -> List[str]:
        """Kernels, if a plug-in is loaded and JAX is not imported."""
        return _TYPES if self._paths() else []

    def would_yield(self, request: SourceRequest) -> bool:
        """False: torch.profiler does not use plug-ins."""
        return False

    def prepare(self, request: SourceRequest) -> PjrtSession:
        """Find the profiler and create the arena. Raises SourceError."""
        refusals = []
        for path in self._paths():
            try:
                functions = pjrt_api.functions_of(path)
            except SourceError as error:
                refusals.append(error.reason)
                continue
            name = os.path.basename(path)
            metadata: Dict[str, Any] = {"plugin": name, "activity_types": sorted(request.activity_types)}
            arena = FileArena(self.name, request.buffer_limit_bytes)
            return PjrtSession(pjrt_api.PluginProfiler(functions, name), arena, metadata)
        raise SourceError("PJRT_PROFILER_UNAVAILABLE", "; ".join(refusals) or "the process has no PJRT plug-in")

    def _paths(self) -> List[str]:
        if jax_runtime.imported():
            return []
        found = pjrt_api.plugins(self._maps)
        return [path for path in found if not any(name in os.path.basename(path).lower() for name in _GPUS)]
