"""Connects the counter of iterations to torch: its optimizers, and the steps of its own profiler.

Theory of operation
    A global hook of torch's optimizers calls us after every step: also under GradScaler, DDP, FSDP, Lightning and the
    HF Trainer, which all step a torch.optim.Optimizer (see optimizer_hook). For torch.profiler there is no
    hook: `torch.profiler.profile.step` and `KinetoStepTracker.increment_step` are shadowed on their classes by
    functions that call them first and then count (system/class_hooks.py).

    torch may be imported long after the agent has started.

Rules
    Nothing raised here reaches the program, and nothing that torch raises is changed.
    If somebody else has shadowed a method after us, it is left as it is, and our function stops counting.
"""

import time
from types import ModuleType
from typing import Any, Callable, Dict, Optional

from kineto_agent.steps.counting import StepCounter
from kineto_agent.steps.optimizer_hook import REGISTER, OptimizerHook
from kineto_agent.system.class_hooks import MethodShadow, ModuleHook, ModuleHooks

_OPTIMIZER_MODULE = "torch.optim.optimizer"
_PROFILER_MODULE = "torch.profiler.profiler"
_TRACKER_MODULE = "torch.autograd.profiler"
_TRACKER = "KinetoStepTracker"
_OWN_REQUESTER = "ProfilerStep"  # how torch.profiler calls the tracker: counted by its step() already
_MAX_REQUESTERS = 256


class _Requester:
    """Stands for one requester of torch's step tracker, where requesters are only names."""


class StepHooks:
    """Connects a counter to torch, now or when torch is imported."""

    def __init__(self, counter: StepCounter) -> None:
        self._counter = counter
        self._optimizers: Optional[OptimizerHook] = None
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
        """Hook torch if it is imported, else wait for its import, if wanted. May be repeated."""
        self._modules.install(wait_for_import)

    def _hook_optimizers(self, module: ModuleType) -> None:
        if self._optimizers is None:
            self._optimizers = OptimizerHook.installed(module, self._counter.on_optimizer_step)
            if self._optimizers is not None:
                self._counter.hooked_ns = self._counter.hooked_ns or time.time_ns()

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
