"""CUDA graphs that the program captures through torch: maps their nodes to the operators that added them.

Theory of operation
    A replay of a graph runs no operator, so its kernels can be attributed only by observing its capture.
    torch.cuda.CUDAGraph.capture_begin and capture_end, which all of torch's captures go through, are shadowed. Between
    them agent/native/graphs/capture_watch.c records which operator adds which nodes: about a microsecond for each
    operator. The result stays in memory, and is part of every trace of GPU activities.

    look() prepares what the shadows need (libraries, functions of the driver, a check of tensors) on the agent's
    thread: the program's threads import, open and wait for nothing. The driver can be queried once torch has
    initialised CUDA. Torch calls us then, like other callbacks for this moment; a graph captured before everything is
    ready is left out.

    Failed captures are discarded. At most _MOST_BYTES are kept, of the latest graphs: one with the same nodes and
    operators as an earlier one takes no room. Missing graphs are counted and reported.

Rules
    Nothing raised here reaches the program. A forked child keeps nothing: it cannot replay its parent's graphs.
"""

import _thread
import os
import sys
from types import ModuleType
from typing import Any, Callable, Dict, List, NamedTuple, Optional

from kineto_agent.protocol.records import GRAPH_NODES_FORMAT
from kineto_agent.sources.file_arena import BUFFER_BYTES, FileArena
from kineto_agent.sources.interface import SourceCounts, SourceError, SourceOutcome
from kineto_agent.system import mappings
from kineto_agent.system.class_hooks import MethodShadow, ModuleHook, ModuleHooks
from kineto_agent.system.debuglog import log, log_exception

_MODULE, _CLASS = "torch.cuda.graphs", "CUDAGraph"
_CUDA = "libcuda.so.1"
_C10_CUDA = b"/libc10_cuda.so"
_MOST_BYTES = 16 * 1024 * 1024
_MOST_OPEN = 64  # captures in progress; a program has one at a time, or a few that never end
TOO_OLD = "there was no more room for them"
NOT_READY = "the agent was not ready yet"
OVERTAKEN = "another capture has begun since"


def _nothing() -> None:
    """Do nothing."""


class KeptGraphs(NamedTuple):
    """The known facts about captured graphs."""

    graphs: List[bytes]  # each in the form of GRAPH_NODES_FORMAT
    dtypes: List[str]  # names of tensor types by torch's numbers
    left_out: Dict[str, int]  # reason -> number of other captured graphs


class GraphCaptures:
    """The captured graphs of this process."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._modules = ModuleHooks({_MODULE: ModuleHook(_CLASS, self._found)})
        self._wake = _nothing
        self._owner: Any = None  # torch's class, until everything is ready
        self._asked = False  # torch will call us when it initialises CUDA
        self._initialises = False
        self._shadows: List[MethodShadow] = []
        self._watcher: Any = None
        self._refusal = ""  # why there is no watcher
        self._c10_cuda = ""
        self._inputs = False
        self._dtypes: List[str] = []
        self.forget()

    def forget(self) -> None:
        """Discard all captures so far."""
        self._lock = _thread.allocate_lock()
        self._kept: Dict[bytes, None] = {}  # in the order of their captures
        self._kept_bytes = 0
        self._left_out: Dict[str, int] = {}
        self._watched: Dict[int, int] = {}  # id() of torch's object -> number of the watch
        self._of_thread = _thread._local()  # sealed: the graph whose capture_end this thread is in

    def install(self, wait_for_import: bool = True, wake: Callable[[], None] = _nothing) -> None:
        """Watch captures, optionally also if torch is imported later. Idempotent.

        wake: asks the agent's thread for a look(); called on the program's threads.
        """
        self._wake = wake
        self._modules.install(wait_for_import)

    def look(self) -> bool:
        """Shadow torch's methods, and prepare what that needs. Returns whether to call it again soon."""
        owner = self._owner
        if owner is None:
            return False
        ready = self._is_ready()
        if not self._shadows:
            self._shadows = [
                MethodShadow(owner, "capture_begin", self._began),
                MethodShadow(owner, "capture_end", self._ended, self._ends),
            ]
        for shadow in self._shadows:
            shadow.install()
        if self._owner is None:  # remove() has been called in between, by a program that stops its agent
            self.remove()
        elif ready:
            self._owner = None
        return self._owner is not None and (self._initialises or not self._asked)

    def remove(self) -> None:
        """Stop watching captures. Earlier ones are kept."""
        self._modules.withdraw()
        self._owner, self._wake = None, _nothing
        for shadow in self._shadows:
            shadow.remove()
        if self._watched:
            self._watcher.drop()
            self._watched.clear()

    def kept(self) -> KeptGraphs:
        """The graphs known now."""
        with self._lock:
            return KeptGraphs(list(self._kept), self._dtypes, dict(self._left_out))

    def _found(self, module: ModuleType) -> None:
        owner = getattr(module, _CLASS, None)
        if isinstance(owner, type):
            self._owner = owner
            self._wake()

    def _is_ready(self) -> bool:
        """Whether there is a watcher, or a reason why there is none."""
        if self._watcher is not None or self._refusal:
            return True
        try:
            self._c10_cuda = self._c10_cuda or _mapped(_C10_CUDA)
            if not self._is_initialised():
                return False
            self._open()
        except SourceError as exc:
            self._refusal = exc.reason
            log("CUDA graphs cannot be watched: %s" % exc.reason)
        except Exception:  # noqa: BLE001 - the agent goes on
            self._refusal = "the agent has failed"
            log_exception("CUDA graphs cannot be watched")
        return True

    def _is_initialised(self) -> bool:
        """Whether torch has initialised CUDA. If not, it calls us when it does."""
        cuda: Any = sys.modules.get("torch.cuda")
        calls = getattr(cuda, "_queued_calls", None)
        if not self._asked and isinstance(calls, list) and not getattr(cuda, "_initialized", False):
            self._asked = True
            calls.append((self._cuda_comes, []))  # permanently: torch may be iterating over the list
        return bool(getattr(cuda, "_initialized", False))

    def _open(self) -> None:
        from kineto_agent.sources.torch import operators  # ctypes: only where it is needed
        from kineto_agent.sources.torch.object_layouts import LAYOUTS
        from kineto_agent.sources.torch.observer_binding import GraphWatcher

        watcher = GraphWatcher.of_process()
        layouts = LAYOUTS.get(operators.release_of(operators.torch_version()), ())
        layout = watcher.open(operators.library_path(), _CUDA, self._c10_cuda, layouts)
        if layout is not None:
            self._inputs = operators.look_at_tensors(watcher, sys.modules["torch"])
            self._dtypes = list(layout.dtype_names)
        self._watcher = watcher

    # ------------------------------------------------------------ the program's threads

    def _cuda_comes(self) -> None:
        self._initialises = True
        self._wake()

    def _began(self, args: Any) -> None:
        if self._watcher is None:
            self._leave_out(self._refusal or NOT_READY)
            return
        try:
            stream = sys.modules["torch"].cuda.current_stream()
            watch = self._watcher.begin(stream.cuda_stream, stream.device.index, self._inputs)
            self._watched.pop(id(args[0]), None)  # it has never ended
            self._watched[id(args[0])] = watch
            if len(self._watched) > _MOST_OPEN:
                del self._watched[next(iter(self._watched))]
                self._leave_out(OVERTAKEN)
        except SourceError as exc:
            self._leave_out(exc.reason)
        except Exception:  # noqa: BLE001 - never into the program
            log_exception("a capture of a CUDA graph cannot be watched")
            self._leave_out("the agent has failed")

    def _ends(self, args: Any) -> None:
        self._of_thread.sealed = None
        watch = self._watched.pop(id(args[0]), None)
        if watch is None:
            return
        try:
            self._of_thread.sealed = self._watcher.seal(watch)
        except SourceError as exc:
            self._leave_out(exc.reason)
        except Exception:  # noqa: BLE001 - never into the program
            log_exception("a captured CUDA graph cannot be read")
            self._leave_out("the agent has failed")

    def _ended(self, _args: Any) -> None:
        sealed, self._of_thread.sealed = getattr(self._of_thread, "sealed", None), None
        if sealed is not None:
            self._keep(sealed)

    def _keep(self, graph: bytes) -> None:
        with self._lock:
            if graph in self._kept:
                del self._kept[graph]
            else:
                self._kept_bytes += len(graph)
            self._kept[graph] = None
            while self._kept_bytes > self._most_bytes:
                oldest = next(iter(self._kept))
                del self._kept[oldest]
                self._kept_bytes -= len(oldest)
                self._count(TOO_OLD)

    def _leave_out(self, reason: str) -> None:
        with self._lock:
            self._count(reason)

    def _count(self, reason: str) -> None:
        self._left_out[reason] = self._left_out.get(reason, 0) + 1


def _mapped(name: bytes) -> str:
    """Path of a mapped library. Raises SourceError."""
    for line in mappings.read().split(b"\n"):
        if line.endswith(name):
            return os.fsdecode(line.split(None, 5)[5])
    raise SourceError("NO_CUDA", "this torch has no %s" % os.fsdecode(name[1:]))


CAPTURES = GraphCaptures()
os.register_at_fork(after_in_child=CAPTURES.forget)


# Sends the captured CUDA graphs (graph_captures.py) to the daemon at the end of a recording.
#
# Graphs are mostly captured before a recording, some during it. So there is no recording of them: one session, created
# when everything else has stopped, writes all of them into its own arena.
NAME = "graphs"


class GraphNodesSession:
    """A SourceSession that is not selected by activity type."""

    format = GRAPH_NODES_FORMAT
    yields = False

    def __init__(self, kept: KeptGraphs, buffer_limit_bytes: int) -> None:
        """Create the arena. Raises SourceError."""
        self.metadata: Dict[str, Any] = {"dtypes": kept.dtypes, "left_out": kept.left_out}
        self._graphs = kept.graphs
        size = sum(map(len, kept.graphs))
        self._arena = FileArena(NAME, min(size + BUFFER_BYTES, buffer_limit_bytes))
        self.arena_fd = self._arena.fd

    def start(self) -> None:
        """Write the graphs."""
        for graph in self._graphs:
            self._arena.write(graph)

    def counts(self) -> SourceCounts:
        """Counts of the written graphs."""
        return self._arena.counts()

    def stop(self) -> SourceOutcome:
        """Publish the rest."""
        self._arena.finish()
        return SourceOutcome(self.counts(), {}, [], detach_ns=0, cpu_ns=0)

    def give_way(self) -> None:
        """Do nothing: it uses no library."""

    def close(self) -> None:
        """Free the arena."""
        self._arena.close()


def session(buffer_limit_bytes: int, captures: GraphCaptures = CAPTURES) -> Optional[GraphNodesSession]:
    """Return a session for all graphs known now; None if there are none. Raises SourceError."""
    kept = captures.kept()
    return GraphNodesSession(kept, buffer_limit_bytes) if kept.graphs or kept.left_out else None
