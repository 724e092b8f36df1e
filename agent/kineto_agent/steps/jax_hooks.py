"""Connects the iteration counter to JAX: to the steps that a program marks for JAX's own profiler.

Theory of operation
    JAX has no optimizers of its own. A training loop prepared for profiling creates a jax.profiler.StepTraceAnnotation
    for each step, whether or not a profiler runs. Its __init__ is shadowed on the class by a function that calls it
    first and then counts (system/class_hooks.py). Annotations with different names, as for training and evaluation,
    count like different profilers: the largest count is the number of iterations.

    JAX may be imported long after the agent has started. Nothing raised here reaches the program.
"""

from types import ModuleType
from typing import Any, Dict, Optional

from kineto_agent.steps.counting import StepCounter
from kineto_agent.system.class_hooks import MethodShadow, ModuleHook, ModuleHooks

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
