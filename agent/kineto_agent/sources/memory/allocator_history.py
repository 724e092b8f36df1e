"""torch's history of CUDA allocations: switched on for our recordings, never touched if it is the program's.

Theory of operation
    torch's caching allocator can record its actions (torch.cuda.memory._record_memory_history) and return all of it at
    once (_snapshot: segments, blocks, and the last `max_entries` actions of each device). A process has one such
    recording. If the program has switched it on, ours only takes snapshots. If the program switches it on or off while
    ours runs (torch's two entry points are wrapped during that time), it belongs to the program from then on.

    A snapshot is made with the GIL held, in time proportional to the number of entries: hence MAX_ENTRIES. Garbage
    collection is paused for that, since it would traverse all the new objects repeatedly. Snapshots are freed in
    slices, so that the program gets the GIL in between. `AllocatorSnapshot.took_ns` says how long a snapshot took.

    Stacks of the allocations cost 2 us each: only with option with_stack, and only Python's.

    Times of the entries are Unix microseconds: the allocator reads the time-stamp counter, and torch converts it when
    the snapshot is made (c10::ApproximateClockToUnixTimeConverter, linear between the loading of torch and now), then
    truncates it to whole microseconds. That is the error, plus any slew of the wall clock in between.
"""

import gc
import sys
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional

from kineto_agent.sources.interface import SourceError
from kineto_agent.system.debuglog import log_exception

MAX_ENTRIES = 20_000  # per device: 11 ms (17 with stacks) in which the program does not get the GIL
_WRAPPED = ("_cuda_record_memory_history", "_cuda_record_memory_history_legacy")
_SLICE = 500  # objects freed at once: well below a millisecond


class AllocatorSnapshot(NamedTuple):
    """torch's snapshot. value: torch's dictionary, which History.end frees."""

    value: Dict[str, Any]
    took_ns: int  # time torch took; GIL held, except for the first snapshot with stacks
    entries: int
    full: List[int]  # devices whose history has overwritten older entries
    end_ns: int  # Unix ns after its creation


def find_torch() -> Any:
    """torch, if the program has imported it completely; otherwise None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and sys.modules.get("torch.cuda.memory") is not None else None


def usable_torch(what: str) -> Any:
    """torch, if its history of CUDA allocations can be recorded now. Raises SourceError."""
    torch = find_torch()
    if torch is None:
        raise SourceError("NO_TORCH", "torch is not imported in this process: it has no %s" % what)
    if not torch.version.cuda and not getattr(torch.version, "hip", None):
        text = (
            "this torch (%s) is built without CUDA, and torch reports CPU allocations only to their own threads: no %s"
        )
        raise SourceError("NO_CUDA", text % (torch.__version__, what))
    if not torch.cuda.is_initialized():
        text = "the program has not used CUDA yet: there is no %s to take; try again once it has"
        raise SourceError("NO_CUDA", text % what)
    if not hasattr(torch._C, "_cuda_isHistoryEnabled") or not hasattr(torch.cuda.memory, "_record_memory_history_impl"):
        text = (
            "torch %s is too old for a %s: 2.1 is the first version that says whether the program itself is recording"
        )
        raise SourceError("TORCH_TOO_OLD", text % (torch.__version__, what))
    backend = torch._C._cuda_getAllocatorBackend()
    if backend != "native":
        text = "the program uses torch's allocator %r, which keeps no history; a %s needs the native one"
        raise SourceError("NO_CUDA_HISTORY", text % (backend, what))
    return torch


class History:
    """The recording of this process. Its methods belong to the agent's thread."""

    def __init__(self) -> None:
        self._torch: Any = None
        self._users = 0
        self._ours = False
        self._told: List[str] = []  # warnings about the program's own use of it
        self._originals: Dict[str, Callable[..., Any]] = {}
        self._wrappers: Dict[str, Callable[..., Any]] = {}
        self._latest: Optional[AllocatorSnapshot] = None

    @property
    def ours(self) -> bool:
        """Whether we switched it on and the program has not touched it since."""
        return self._ours

    def told(self) -> List[str]:
        """Warnings for the user: how the program itself used the recording."""
        return list(self._told)

    def begin(self, torch: Any, with_stack: bool) -> None:
        """Add a user; switches the history on if necessary. Raises SourceError."""
        if self._users == 0:
            self._latest = None
            self._told = []
            self._torch = torch
            try:
                self._switch_on(with_stack)
            except Exception as exc:  # torch's own errors have many types
                self._unwrap()
                raise SourceError("MEMORY_HISTORY_FAILED", "torch cannot record its allocations: %s" % exc) from exc
        self._users += 1

    def _switch_on(self, with_stack: bool) -> None:
        if self._torch._C._cuda_isHistoryEnabled():
            self._told.append("the program records its allocations itself: its own history was used and left on")
            return
        context = "all" if with_stack else None
        self._torch.cuda.memory._record_memory_history("all", context=context, stacks="python", max_entries=MAX_ENTRIES)
        self._ours = True
        self._wrap()

    def snapshot(self) -> AllocatorSnapshot:
        """The snapshot, which all users of one recording share. Raises SourceError."""
        if self._latest is None:
            try:
                self._latest = self._take()
            except Exception as exc:  # torch's own errors have many types
                raise SourceError("MEMORY_SNAPSHOT_FAILED", "torch cannot make a memory snapshot: %s" % exc) from exc
        return self._latest

    def _take(self) -> AllocatorSnapshot:
        collecting = gc.isenabled()
        if collecting:
            gc.disable()
        try:
            before_ns = time.perf_counter_ns()
            value: Dict[str, Any] = self._torch.cuda.memory._snapshot()
            took_ns = time.perf_counter_ns() - before_ns
        finally:
            if collecting:
                gc.enable()
        traces = value.get("device_traces", [])
        full = [device for device, trace in enumerate(traces) if len(trace) >= MAX_ENTRIES]
        return AllocatorSnapshot(value, took_ns, sum(map(len, traces)), full, time.time_ns())

    def end(self) -> None:
        """Remove a user; after the last one the history is switched off if it is ours. Never raises."""
        self._users -= 1
        if self._users > 0:
            return
        self._unwrap()
        if self._ours:
            self._ours = False
            try:
                self._torch.cuda.memory._record_memory_history(None)
            except Exception:  # noqa: BLE001 - nobody can do anything about it
                log_exception("torch's memory history cannot be switched off")
        latest, self._latest = self._latest, None
        if latest is not None:
            _free(latest.value)

    # ------------------------------------------------------------ the program's own calls

    def _wrap(self) -> None:
        module = self._torch._C
        for name in _WRAPPED:
            original = getattr(module, name, None)
            if original is not None:
                self._originals[name] = original
                self._wrappers[name] = self._wrapper(original)
                setattr(module, name, self._wrappers[name])

    def _wrapper(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def record_memory_history(enabled: Any, *args: Any, **kwargs: Any) -> Any:
            if self._ours:
                self._ours = False
                what = (
                    "on: its own history was used from there on"
                    if enabled
                    else "off: nothing was recorded from there on"
                )
                self._told.append("the program switched the recording of its allocations %s" % what)
            return original(enabled, *args, **kwargs)

        return record_memory_history

    def _unwrap(self) -> None:
        for name, wrapper in self._wrappers.items():
            if getattr(self._torch._C, name, None) is wrapper:
                setattr(self._torch._C, name, self._originals[name])
        self._wrappers.clear()
        self._originals.clear()


def _free(value: Dict[str, Any]) -> None:
    """Free a snapshot slice by slice."""
    for items in [value.get("segments", []), *value.get("device_traces", [])]:
        while items:
            del items[-_SLICE:]
    value.clear()


history = History()
