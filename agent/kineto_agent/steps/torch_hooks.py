"""Connects the iteration counter to torch: its optimizers, and the steps of its own profiler; and to JAX.

Theory of operation
    A global hook of torch's optimizers calls us after every step: also under GradScaler, DDP, FSDP, Lightning and the
    HF Trainer, which all step a torch.optim.Optimizer. torch.profiler has no hook: `torch.profiler.profile.step` and
    `KinetoStepTracker.increment_step` are shadowed on their classes by functions that call them first and then count
    (system/class_hooks.py).

    torch may be imported long after the agent has started.

Rules
    Nothing raised here reaches the program, and nothing that torch raises is changed.
    If somebody else has shadowed a method after us, it is left as it is, and our function stops counting.
"""

import _thread
import collections
import sys
import time
from types import ModuleType
from typing import Any, Callable, Dict, Optional

from kineto_agent.sources.interface import SourceError
from kineto_agent.steps.counting import StepCounter
from kineto_agent.system.class_hooks import MethodShadow, ModuleHook, ModuleHooks
from kineto_agent.system.debuglog import log_exception
from kineto_agent.system.threads import is_ours

_OPTIMIZER_MODULE = "torch.optim.optimizer"
_PROFILER_MODULE = "torch.profiler.profiler"
_TRACKER_MODULE = "torch.autograd.profiler"
_TRACKER = "KinetoStepTracker"
_OWN_REQUESTER = "ProfilerStep"  # torch.profiler's name in the tracker: already counted by its step()
_MAX_REQUESTERS = 256
_HOOKS = "_global_optimizer_post_hooks"  # from torch 2.0 on
REGISTER = "register_optimizer_step_post_hook"
_TRIES = 500
_PAUSE_S = 0.001


class _Requester:
    """Represents one requester of torch's step tracker, where requesters are only names."""


class StepHooks:
    """Connects a counter to torch, now or when torch is imported."""

    def __init__(self, counter: StepCounter) -> None:
        self._counter = counter
        self._optimizers: Optional[OptimizerHook] = None
        self._hooking = _thread.allocate_lock()
        self._shadows: Dict[str, MethodShadow] = {}
        self._requesters: Dict[Any, _Requester] = {}
        self._modules = ModuleHooks(
            {
                _OPTIMIZER_MODULE: ModuleHook(REGISTER, self._hook_optimizers),
                _PROFILER_MODULE: ModuleHook("profile", self._hook_profiler),
                _TRACKER_MODULE: ModuleHook(_TRACKER, self._hook_tracker),
            }
        )

    def install(self, wait_for_import: bool = True) -> None:
        """Hook torch if it is imported, otherwise optionally wait for its import. Idempotent."""
        self._modules.install(wait_for_import)

    def look(self) -> None:
        """Hook the optimizers on the agent's thread, if that could not be done on the program's thread."""
        module = sys.modules.get(_OPTIMIZER_MODULE)
        if module is not None and hasattr(module, REGISTER):
            self._hook_optimizers(module)

    def _hook_optimizers(self, module: ModuleType) -> None:
        if self._optimizers is not None or not self._hooking.acquire(False):  # another thread is doing it
            return
        try:
            self._optimizers = OptimizerHook.installed(module, self._counter.on_optimizer_step)
            if self._optimizers is not None:
                self._counter.hooked_ns = self._counter.hooked_ns or time.time_ns()
        finally:
            self._hooking.release()

    def _hook_profiler(self, module: ModuleType) -> None:
        self._shadow(getattr(module, "profile", None), "step", self._profiler_stepped)

    def _hook_tracker(self, module: ModuleType) -> None:
        self._shadow(getattr(module, _TRACKER, None), "increment_step", self._tracker_stepped)

    def _shadow(self, owner: Any, name: str, after: Callable[[Any], None]) -> None:
        if not isinstance(owner, type):
            return
        shadow = self._shadows.get(name)
        if shadow is None:
            shadow = self._shadows[name] = MethodShadow(owner, name, after)
        shadow.install()

    def _profiler_stepped(self, args: Any) -> None:
        self._counter.on_profiler_step(args[0])

    def _tracker_stepped(self, args: Any) -> None:
        requester = args[1] if len(args) > 1 else ""
        if isinstance(requester, str) and requester != _OWN_REQUESTER and len(self._requesters) < _MAX_REQUESTERS:
            self._counter.on_profiler_step(self._requesters.setdefault(requester, _Requester()))

    def remove(self) -> None:
        """Remove everything. A hook that cannot be removed safely right now stays and keeps counting."""
        self._modules.withdraw()
        for shadow in self._shadows.values():
            shadow.remove()
        if self._optimizers is not None and self._optimizers.remove():
            self._optimizers = None
            self._counter.hooked_ns = 0


# A global hook that torch's optimizers call after each step, added safely to the hooks of others.
#
# `register_optimizer_step_post_hook` puts hooks into an OrderedDict, and each step of an optimizer iterates over it.
# If it changes during that, the step fails, unless there is one hook or none. So we wait for a moment in which no
# thread is inside torch's module, and change the dictionary in the same C call. Otherwise another thread could get the
# GIL between the check and the change, and begin a step.
#
# The check does not use sys._current_frames(), which crashes CPython 3.12 and 3.13 if an interpreter has its own GIL.
# If the stacks of this Python cannot be read, we join at most one other hook. So do threads of the program: only the
# agent's thread waits and reads stacks.
class OptimizerHook:
    """One hook among those of the optimizers. The caller keeps it until it is removed."""

    def __init__(self, hooks: Dict[Any, Any], file: str) -> None:
        self._hooks = hooks
        self._file = file
        self._key = -id(self)  # torch's own count up from 0

    @classmethod
    def installed(cls, module: ModuleType, function: Callable[..., None]) -> Optional["OptimizerHook"]:
        """The hook, once torch's module calls the function; None for an older module, or without a safe moment."""
        hooks = getattr(module, _HOOKS, None)
        code = getattr(getattr(module, REGISTER, None), "__code__", None)
        if type(hooks) is not collections.OrderedDict or code is None:
            return None
        hook = cls(hooks, code.co_filename)
        return hook if hook._change(function) else None

    def remove(self) -> bool:
        """Remove it; False if no safe moment was found. Then it still counts."""
        return self._change()

    def _change(self, *function: Callable[..., None]) -> bool:
        """Add the function, or remove the one that was added."""
        if len(self._hooks) <= 1:
            return self._change_now(*function)
        if not is_ours(_thread.get_ident()):
            return False
        sampler = _sampler()
        for _ in range(_TRIES):
            time.sleep(_PAUSE_S)
            if len(self._hooks) <= 1 or (not function and self._key not in self._hooks):
                return self._change_now(*function)
            try:
                if sampler is not None and sampler.change_item(self._file, self._hooks, self._key, *function):
                    return True
            except KeyError:  # the program has cleared its hooks
                return True
        return False

    def _change_now(self, *function: Callable[..., None]) -> bool:
        if function:
            self._hooks[self._key] = function[0]
        else:
            self._hooks.pop(self._key, None)
        return True


def _sampler() -> Any:
    """The process's stack sampler, just verified; None if there is none."""
    try:
        from kineto_agent.sources.python import sampler_binding

        return sampler_binding.checked()
    except (ImportError, SourceError):
        log_exception("the optimizer hooks cannot use the stack sampler")
        return None


# Connects the iteration counter to JAX: to the steps that a program marks for JAX's own profiler.
#
# JAX has no optimizers of its own. A training loop prepared for profiling creates a jax.profiler.StepTraceAnnotation
# for each step, whether or not a profiler runs. Its __init__ is shadowed on the class by a function that calls it first
# and then counts (system/class_hooks.py). Annotations with different names, as for training and evaluation, count like
# different profilers: the largest count is the number of iterations.
#
# JAX may be imported long after the agent has started. Nothing raised here reaches the program.
_MODULE = "jax._src.profiler"
_CLASS = "StepTraceAnnotation"
_MAX_NAMES = 256


class _Steps:
    """Represents the annotations of one name."""


class JaxStepHooks:
    """Connects a counter to JAX, now or when JAX is imported."""

    def __init__(self, counter: StepCounter) -> None:
        self._counter = counter
        self._shadow: Optional[MethodShadow] = None
        self._names: Dict[str, _Steps] = {}
        self._modules = ModuleHooks({_MODULE: ModuleHook(_CLASS, self._hook)})

    def install(self, wait_for_import: bool = True) -> None:
        """Hook JAX if it is imported, otherwise optionally wait for its import. Idempotent."""
        self._modules.install(wait_for_import)

    def _hook(self, module: ModuleType) -> None:
        found = getattr(module, _CLASS, None)
        if isinstance(found, type):
            if self._shadow is None:
                self._shadow = MethodShadow(found, "__init__", self._stepped)
            self._shadow.install()

    def _stepped(self, args: Any) -> None:
        name = args[1] if len(args) > 1 and isinstance(args[1], str) else ""
        if name in self._names or len(self._names) < _MAX_NAMES:
            self._counter.on_profiler_step(self._names.setdefault(name, _Steps()))

    def remove(self) -> None:
        """Remove everything."""
        self._modules.withdraw()
        if self._shadow is not None:
            self._shadow.remove()
