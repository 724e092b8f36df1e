"""Counting training iterations: torch's optimizers, or the program's own `kineto_agent.step()`.

Theory of operation
    `register_optimizer_step_post_hook` of torch calls us after every step of every optimizer. With several
    optimizers an iteration ends when the largest count per optimizer grows, as in Kineto; an optimizer that
    joins later continues at the current count. Once the program calls step() itself, only that counts.

    `count` is the number of finished iterations and so the number of the running one; -1 before the first.
    Iteration N begins when the count becomes N; a ring keeps when that was for the last RING_ITERATIONS.

    Everything here runs in the program's training thread: no lock, no raise, about a microsecond. A pipe is
    written only when somebody waits for this very iteration.

    torch may be imported long after the agent has started. A finder on sys.meta_path waits for
    `torch.optim.optimizer`, lets the import system do all the work, and takes itself away afterwards.
"""

import sys
import time
import weakref
from types import FrameType, ModuleType
from typing import Any, Callable, Dict, List, Optional, Sequence

RING_ITERATIONS = 1024
_MASK = RING_ITERATIONS - 1
_NEVER = 1 << 62
_BASELINE_ITERATIONS = 256  # the median of so many is steady, and sorting them is cheap
_MIN_SAMPLES = 3
_OPTIMIZER_MODULE = "torch.optim.optimizer"
_REGISTER = "register_optimizer_step_post_hook"
_HOOKS = "_global_optimizer_post_hooks"  # where it puts them: an OrderedDict
_QUIET_TRIES = 500
_QUIET_PAUSE_S = 0.001


def _ignore() -> None:
    """Nobody waits."""


def median_ns(durations: Sequence[int]) -> int:
    """The median, 0 if there are too few for one to mean anything."""
    return sorted(durations)[len(durations) // 2] if len(durations) >= _MIN_SAMPLES else 0


class StepCounter:
    """Counts iterations and wakes whoever waits for one."""

    def __init__(self, time_ns: Callable[[], int] = time.time_ns) -> None:
        self.count = -1
        self._time_ns = time_ns
        self._ring = [0] * RING_ITERATIONS
        self._explicit = False
        self._optimizers: Dict[int, List[Any]] = {}  # id -> [count, weak reference]
        self._wake: Callable[[], None] = _ignore
        self._wake_at = _NEVER

    def step(self) -> None:
        """The program says that an iteration has ended."""
        self._explicit = True
        self._advance(max(self.count, 0) + 1)

    def on_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """torch's hook."""
        if self._explicit:
            return
        entry = self._optimizers.get(id(optimizer))
        if entry is None:
            self._join(optimizer)
            return
        entry[0] += 1
        if entry[0] > self.count:
            self._advance(entry[0])

    # torch.compile must not trace into the hook: it calls it as it is.
    on_optimizer_step._torchdynamo_disable = True  # type: ignore[attr-defined]

    def _join(self, optimizer: Any) -> None:
        key = id(optimizer)
        optimizers = self._optimizers
        try:
            reference = weakref.ref(optimizer, lambda _dead: optimizers.pop(key, None))
        except TypeError:  # a class with __slots__: it stays uncounted
            return
        first = max(self.count, 1)
        optimizers[key] = [first, reference]
        if first > self.count:
            self._advance(first)

    def _advance(self, count: int) -> None:
        self._ring[count & _MASK] = self._time_ns()
        self.count = count
        if count >= self._wake_at:
            self._wake_at = _NEVER
            self._wake()

    # ------------------------------------------------------------ for the agent's thread

    def watch(self, iteration: Optional[int], wake: Callable[[], None] = _ignore) -> bool:
        """Call `wake` once when this iteration begins. True: it has begun already. None: no longer."""
        self._wake_at = _NEVER
        self._wake = wake
        if iteration is None:
            return False
        self._wake_at = iteration
        return self.count >= iteration

    def time_of(self, iteration: int) -> int:
        """When this iteration began (Unix ns), 0 if that is not known (any more)."""
        known = 0 <= self.count - iteration < RING_ITERATIONS - 1 and iteration >= 0
        return self._ring[iteration & _MASK] if known else 0

    def durations_ns(self, start_ns: int, end_ns: int) -> List[int]:
        """The lengths of the latest iterations that lie within [start_ns, end_ns]."""
        last = self.count
        times = [self.time_of(number) for number in range(max(last - _BASELINE_ITERATIONS, 0), last + 1)]
        pairs = zip(times, times[1:])
        return [
            after - before for before, after in pairs if 0 < before <= after and start_ns <= before and after <= end_ns
        ]


class _OptimizerFinder:
    """Waits on sys.meta_path for torch's optimizers. Everything else passes by untouched."""

    def __init__(self, on_loaded: Callable[[ModuleType], None]) -> None:
        self._on_loaded = on_loaded

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """The spec that the next finder gives, its loader prepared to tell us."""
        if fullname != _OPTIMIZER_MODULE:
            return None
        for finder in list(sys.meta_path):
            find_spec = getattr(finder, "find_spec", None)
            if finder is self or find_spec is None:
                continue
            spec = find_spec(fullname, path, target)
            if spec is not None:
                self._prepare(spec.loader)
                return spec
        return None

    def _prepare(self, loader: Any) -> None:
        """Shadow exec_module on this one loader object, until it has run once."""
        exec_module = getattr(loader, "exec_module", None)
        if exec_module is None:
            return

        def exec_and_tell(module: ModuleType) -> None:
            del loader.exec_module
            exec_module(module)
            self._on_loaded(module)

        try:
            loader.exec_module = exec_and_tell
        except AttributeError:  # a loader that takes no attributes
            return


def _between_steps(module: Any, action: Callable[[], None]) -> bool:
    """Change torch's global hooks while no optimizer of another thread walks through them: its step would fail.

    A walk that is in the only hook, or finds none, does not notice. Else wait for a moment in which nothing of that
    module runs; after a sleep this thread has just got the GIL and keeps it for some milliseconds. False: there was
    no such moment, nothing is done.
    """
    for _ in range(_QUIET_TRIES):
        if len(getattr(module, _HOOKS, ())) <= 1 or not _runs(module):
            action()
            return True
        time.sleep(_QUIET_PAUSE_S)
    return False


def _runs(module: Any) -> bool:
    """Whether a thread executes a function of the module, or one called by it."""
    for frame in sys._current_frames().values():
        inner: Optional[FrameType] = frame
        while inner is not None:
            if inner.f_globals is module.__dict__:
                return True
            inner = inner.f_back
    return False


class OptimizerHook:
    """Connects a counter to torch's optimizers, now or when torch is imported."""

    def __init__(self, counter: StepCounter) -> None:
        self._counter = counter
        self._finder: Optional[_OptimizerFinder] = None
        self._handle: Any = None
        self._module: Any = None

    def install(self, wait_for_import: bool = True) -> None:
        """Hook torch if it is there, else wait for its import, if wanted. Harmless to repeat."""
        if self._finder is not None:
            return
        module = sys.modules.get(_OPTIMIZER_MODULE)
        if module is not None and hasattr(module, _REGISTER):
            self._hook(module)
        elif wait_for_import:
            self._finder = _OptimizerFinder(self._loaded)
            sys.meta_path.insert(0, self._finder)

    def _loaded(self, module: ModuleType) -> None:
        self._withdraw()
        self._hook(module)

    def _hook(self, module: ModuleType) -> None:
        register = getattr(module, _REGISTER, None)  # torch 2.0 and later
        if register is None or self._handle is not None:
            return

        def hook() -> None:
            self._handle, self._module = register(self._counter.on_optimizer_step), module

        _between_steps(module, hook)

    def _withdraw(self) -> None:
        if self._finder is not None and self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        self._finder = None

    def remove(self) -> None:
        """Take everything back. A hook for which there is no good moment stays and counts on."""
        self._withdraw()
        if self._handle is not None and _between_steps(self._module, self._handle.remove):
            self._handle = self._module = None


COUNTER = StepCounter()
"""The iterations of this process."""
