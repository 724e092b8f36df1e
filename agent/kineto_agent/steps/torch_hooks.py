"""Connects the counter of iterations to torch: its optimizers, and the steps of its own profiler.

Theory of operation
    `register_optimizer_step_post_hook` of torch calls us after every step of every optimizer: also under GradScaler,
    DDP, FSDP, Lightning and the HF Trainer, which all step a torch.optim.Optimizer. For torch.profiler there is no
    hook: `torch.profiler.profile.step` and `KinetoStepTracker.increment_step` are shadowed on their classes by
    functions that call them first and then count.

    torch may be imported long after the agent has started. A finder on sys.meta_path waits for the modules in question,
    lets the import system do all the work, and removes itself once it has seen all of them.

Rules
    Nothing raised here reaches the program, and nothing that torch raises is changed.
    If somebody else has shadowed a method after us, it is left as it is, and our function stops counting.
"""

import functools
import sys
import time
from types import ModuleType
from typing import Any, Callable, Dict, Optional

from kineto_agent.sources.interface import SourceError
from kineto_agent.steps.counting import StepCounter
from kineto_agent.system.debuglog import log_exception

_OPTIMIZER_MODULE = "torch.optim.optimizer"
_REGISTER = "register_optimizer_step_post_hook"
_HOOKS = "_global_optimizer_post_hooks"  # where it puts them: an OrderedDict
_PROFILER_MODULE = "torch.profiler.profiler"
_TRACKER_MODULE = "torch.autograd.profiler"
_TRACKER = "KinetoStepTracker"
_OWN_REQUESTER = "ProfilerStep"  # how torch.profiler calls the tracker: counted by its step() already
_MAX_REQUESTERS = 256
_QUIET_TRIES = 500
_QUIET_PAUSE_S = 0.001


class _ModuleFinder:
    """Waits on sys.meta_path for some modules of torch and ignores everything else."""

    def __init__(self, on_loaded: Dict[str, Callable[[ModuleType], None]]) -> None:
        self._on_loaded = on_loaded

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """The spec that the next finder returns, its loader prepared to notify us."""
        on_loaded = self._on_loaded.get(fullname)
        if on_loaded is None:
            return None
        for finder in list(sys.meta_path):
            find_spec = getattr(finder, "find_spec", None)
            if finder is self or find_spec is None:
                continue
            spec = find_spec(fullname, path, target)
            if spec is not None:
                self._prepare(spec.loader, on_loaded)
                return spec
        return None

    def _prepare(self, loader: Any, on_loaded: Callable[[ModuleType], None]) -> None:
        """Shadow exec_module on this one loader object, until it has run once."""
        exec_module = getattr(loader, "exec_module", None)
        if exec_module is None:
            return

        def exec_and_tell(module: ModuleType) -> None:
            del loader.exec_module
            exec_module(module)
            on_loaded(module)

        try:
            loader.exec_module = exec_and_tell
        except AttributeError:  # a loader that takes no attributes
            return


def _between_steps(module: Any, action: Callable[[], None]) -> bool:
    """Change torch's global hooks while no optimizer of another thread iterates over them: its step would fail.

    With one hook or none, an iteration does not notice. Otherwise wait for a moment in which nothing of that module
    runs; after a sleep this thread has just got the GIL and keeps it for Python's switch interval. A look that took
    more than half of that is not believed, since a step may begin before the change. Returns False if there was no such
    moment; then nothing is changed.
    """
    if len(getattr(module, _HOOKS, ())) <= 1:
        action()
        return True
    runs = _who_runs(module)
    for _ in range(_QUIET_TRIES):
        time.sleep(_QUIET_PAUSE_S)
        looked_s = time.monotonic()
        quiet = len(getattr(module, _HOOKS, ())) <= 1 or not runs()
        if quiet and time.monotonic() - looked_s < sys.getswitchinterval() / 2:
            action()
            return True
    return False


def _who_runs(module: Any) -> Callable[[], bool]:
    """A function that says whether a thread may be inside a function of the module, or in one called by it.

    Not by sys._current_frames(), which crashes CPython 3.12 and 3.13 if an interpreter has a GIL of its own.
    """
    try:
        from kineto_agent.sources.python import sampler_binding

        sampler = sampler_binding.checked()
        return functools.partial(sampler.runs_file, getattr(module, _REGISTER).__code__.co_filename)
    except (ImportError, AttributeError, SourceError):
        log_exception("the hooks of optimizers")
        return lambda: True


class _Shadow:
    """One method of one class of torch, replaced by a function that calls it and then tells us."""

    def __init__(self, owner: Any, name: str, after: Callable[[Any], None]) -> None:
        self._owner, self._name, self._after = owner, name, after
        self._original = vars(owner).get(name)
        self._shadow: Any = None

    def install(self) -> None:
        """Install it; if it is still there, below somebody else's function, only activate it."""
        if self._shadow is not None:
            self._active = True
            return
        original = self._original
        function = original.__func__ if isinstance(original, classmethod) else original
        if not callable(function):
            return
        self._active = True

        @functools.wraps(function)
        def call_and_tell(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if self._active and args:
                self._after(args)
            return result

        call_and_tell._torchdynamo_disable = True  # type: ignore[attr-defined]  # it must not be traced into
        self._shadow = classmethod(call_and_tell) if isinstance(original, classmethod) else call_and_tell
        setattr(self._owner, self._name, self._shadow)

    def remove(self) -> None:
        """Remove it, or deactivate it if it lies below somebody else's function."""
        self._active = False
        if self._shadow is not None and vars(self._owner).get(self._name) is self._shadow:
            setattr(self._owner, self._name, self._original)
            self._shadow = None


class _Requester:
    """Stands for one requester of torch's step tracker, where requesters are only names."""


class StepHooks:
    """Connects a counter to torch, now or when torch is imported."""

    def __init__(self, counter: StepCounter) -> None:
        self._counter = counter
        self._finder: Optional[_ModuleFinder] = None
        self._awaited: Dict[str, Callable[[ModuleType], None]] = {}
        self._handle: Any = None
        self._module: Any = None
        self._shadows: Dict[str, _Shadow] = {}
        self._requesters: Dict[Any, _Requester] = {}

    def install(self, wait_for_import: bool = True) -> None:
        """Hook torch if it is imported, else wait for its import, if wanted. May be repeated."""
        if self._finder is not None:
            return
        for name, hook in self._hooks().items():
            module = sys.modules.get(name)
            if module is not None and self._is_complete(name, module):
                hook(module)
            elif wait_for_import:
                self._await(name, hook)
        if self._awaited:
            self._finder = _ModuleFinder(self._awaited)
            sys.meta_path.insert(0, self._finder)

    def _hooks(self) -> Dict[str, Callable[[ModuleType], None]]:
        return {
            _OPTIMIZER_MODULE: self._hook_optimizers,
            _PROFILER_MODULE: self._hook_profiler,
            _TRACKER_MODULE: self._hook_tracker,
        }

    def _is_complete(self, name: str, module: ModuleType) -> bool:
        """Whether its import has progressed far enough."""
        return hasattr(module, {_OPTIMIZER_MODULE: _REGISTER, _PROFILER_MODULE: "profile"}.get(name, _TRACKER))

    def _await(self, name: str, hook: Callable[[ModuleType], None]) -> None:
        def loaded(module: ModuleType) -> None:
            self._awaited.pop(name, None)
            if not self._awaited:
                self._withdraw()
            hook(module)

        self._awaited[name] = loaded

    def _hook_optimizers(self, module: ModuleType) -> None:
        register = getattr(module, _REGISTER, None)  # torch 2.0 and later
        if register is None or self._handle is not None:
            return

        def hook() -> None:
            self._handle, self._module = register(self._counter.on_optimizer_step), module
            self._counter.hooked_ns = self._counter.hooked_ns or time.time_ns()

        _between_steps(module, hook)

    def _hook_profiler(self, module: ModuleType) -> None:
        self._shadow(getattr(module, "profile", None), "step", self._profiler_stepped)

    def _hook_tracker(self, module: ModuleType) -> None:
        self._shadow(getattr(module, _TRACKER, None), "increment_step", self._tracker_stepped)

    def _shadow(self, owner: Any, name: str, after: Callable[[Any], None]) -> None:
        if not isinstance(owner, type):
            return
        shadow = self._shadows.get(name)
        if shadow is None:
            shadow = self._shadows[name] = _Shadow(owner, name, after)
        shadow.install()

    def _profiler_stepped(self, args: Any) -> None:
        self._counter.on_profiler_step(args[0])

    def _tracker_stepped(self, args: Any) -> None:
        requester = args[1] if len(args) > 1 else ""
        if isinstance(requester, str) and requester != _OWN_REQUESTER and len(self._requesters) < _MAX_REQUESTERS:
            self._counter.on_profiler_step(self._requesters.setdefault(requester, _Requester()))

    def _withdraw(self) -> None:
        if self._finder is not None and self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        self._finder = None
        self._awaited.clear()

    def remove(self) -> None:
        """Remove everything. A hook that cannot be removed safely right now stays and keeps counting."""
        self._withdraw()
        for shadow in self._shadows.values():
            shadow.remove()
        if self._handle is not None and _between_steps(self._module, self._handle.remove):
            self._handle = self._module = None
            self._counter.hooked_ns = 0
