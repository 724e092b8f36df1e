"""CUDA graphs that the program captures through torch: which operator made which node.

Theory of operation
    A replay of a graph runs no operator, so its kernels can be attributed only by what was seen when it was captured.
    torch.cuda.CUDAGraph.capture_begin and capture_end, which all of torch's captures go through, are shadowed. Between
    them agent/native/graphs/capture_watch.c notes which operator adds which nodes: about a microsecond for each
    operator. What it found stays in memory, and goes with every trace of GPU activities.

    Nothing is kept of a capture that fails. At most _MOST_BYTES are kept, of the graphs that were captured last: one
    whose nodes and operators are equal to an earlier one's takes no room. What is missing is counted and reported.

Rules
    Nothing raised here reaches the program. A forked child keeps nothing: it cannot replay its parent's graphs.
"""

import _thread
import os
import sys
from types import ModuleType
from typing import Any, Callable, Dict, List, NamedTuple

from kineto_agent.sources.interface import SourceError
from kineto_agent.system.class_hooks import MethodShadow, ModuleHook, ModuleHooks
from kineto_agent.system.debuglog import log, log_exception
from kineto_agent.system.threads import start_thread

_MODULE, _CLASS = "torch.cuda.graphs", "CUDAGraph"
_CUDA = "libcuda.so.1"
_C10_CUDA = b"/libc10_cuda.so"
_MOST_BYTES = 16 * 1024 * 1024
_MOST_OPEN = 64  # captures that have begun; a program has one at a time, or a few that never end
_LOOK_TIMEOUT_S = 5.0  # it takes less than a millisecond
TOO_OLD = "there was no more room for them"
OVERTAKEN = "another capture has begun since"


class KeptGraphs(NamedTuple):
    """What is known of the captured graphs."""

    graphs: List[bytes]  # each in the form of GRAPH_NODES_FORMAT
    dtypes: List[str]  # names of tensor types by torch's numbers
    left_out: Dict[str, int]  # reason -> how many others were captured


class GraphCaptures:
    """The captured graphs of this process."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._modules = ModuleHooks({_MODULE: ModuleHook(_CLASS, self._hook)})
        self._shadows: List[MethodShadow] = []
        self._watcher: Any = None
        self._refusal = ""  # why there is no watcher
        self._inputs = False
        self._dtypes: List[str] = []
        self.forget()

    def forget(self) -> None:
        """Keep nothing of what was captured so far."""
        self._lock = _thread.allocate_lock()
        self._kept: Dict[bytes, None] = {}  # in the order of their captures
        self._kept_bytes = 0
        self._left_out: Dict[str, int] = {}
        self._watched: Dict[int, int] = {}  # id() of torch's object -> number of the watch
        self._of_thread = _thread._local()  # sealed: the graph whose capture_end this thread is in

    def install(self, wait_for_import: bool = True) -> None:
        """Watch captures from now on, or once torch is imported, if wanted. May be repeated."""
        self._modules.install(wait_for_import)

    def remove(self) -> None:
        """Watch no further captures. What was captured is kept."""
        self._modules.withdraw()
        for shadow in self._shadows:
            shadow.remove()
        if self._watched:
            self._watcher.drop()
            self._watched.clear()

    def kept(self) -> KeptGraphs:
        """What is known now."""
        with self._lock:
            return KeptGraphs(list(self._kept), self._dtypes, dict(self._left_out))

    def _hook(self, module: ModuleType) -> None:
        owner = getattr(module, _CLASS, None)
        if not self._shadows and isinstance(owner, type):
            self._shadows = [
                MethodShadow(owner, "capture_begin", self._began, self._begins),
                MethodShadow(owner, "capture_end", self._ended, self._ends),
            ]
        for shadow in self._shadows:
            shadow.install()

    # ------------------------------------------------------------ the program's threads

    def _begins(self, _args: Any) -> None:
        """Before a capture: afterwards the program must not be disturbed."""
        if self._watcher is not None or self._refusal:
            return
        try:
            self._open()
        except SourceError as exc:
            self._refusal = exc.reason
            log("CUDA graphs cannot be watched: %s" % exc.reason)
        except Exception:  # noqa: BLE001 - never into the program
            self._refusal = "the agent has failed at the first capture"
            log_exception("CUDA graphs cannot be watched")

    def _open(self) -> None:
        from kineto_agent.sources import collector_library
        from kineto_agent.sources.torch import graph_binding, operators  # ctypes: only where it is needed
        from kineto_agent.sources.torch.object_layouts import LAYOUTS

        torch = sys.modules["torch"]
        watcher = graph_binding.GraphWatcher(collector_library.path())
        collector_library.loaded()
        layouts = LAYOUTS.get(operators.release_of(operators.torch_version()), ())
        layout = watcher.open(operators.library_path(), _CUDA, _mapped(_C10_CUDA), layouts)
        if layout is not None:
            self._inputs = _aside(lambda: operators.look_at_tensors(watcher, torch))
            self._dtypes = list(layout.dtype_names)
        self._watcher = watcher

    def _began(self, args: Any) -> None:
        if self._watcher is None:
            self._leave_out(self._refusal)
            return
        try:
            stream = sys.modules["torch"].cuda.current_stream()
            watch = self._watcher.begin(stream.cuda_stream, stream.device.index, self._inputs)
            self._watched.pop(id(args[0]), None)  # has never ended
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


def _aside(look: Callable[[], bool]) -> bool:
    """Whether the look succeeds on a thread of its own: what the program has set on this one (modes that see or replace
    all operators, a profiler) must not take notice. Raises RuntimeError if there can be no further thread."""
    answers: List[bool] = []
    start_thread("kineto-look", lambda: answers.append(look())).join(_LOOK_TIMEOUT_S)
    return answers == [True]


def _mapped(name: bytes) -> str:
    """Path of a mapped library. Raises SourceError."""
    from kineto_agent.system import mappings

    for line in mappings.read().split(b"\n"):
        if line.endswith(name):
            return os.fsdecode(line.split(None, 5)[5])
    raise SourceError("NO_CUDA", "this torch has no %s" % os.fsdecode(name[1:]))


CAPTURES = GraphCaptures()
os.register_at_fork(after_in_child=CAPTURES.forget)
