"""A global hook that torch's optimizers call after each of their steps, put among those of others without harm.

Theory of operation
    `register_optimizer_step_post_hook` puts hooks into an OrderedDict, and each step of an optimizer iterates over it.
    If it changes meanwhile, that step fails, unless there is one hook or none. So we wait for a moment in which no
    thread is inside torch's module, and change it in the same call of C. Otherwise another thread could get the GIL
    between the look and the change, and begin a step.

    Threads are not looked at by sys._current_frames(), which crashes CPython 3.12 and 3.13 if an interpreter has a GIL
    of its own. Where the stacks of this Python cannot be read, we join one other hook at most.
"""

import collections
import time
from types import ModuleType
from typing import Any, Callable, Dict, Optional

from kineto_agent.sources.interface import SourceError
from kineto_agent.system.debuglog import log_exception

_HOOKS = "_global_optimizer_post_hooks"  # from torch 2.0 on
REGISTER = "register_optimizer_step_post_hook"
_TRIES = 500
_PAUSE_S = 0.001


class OptimizerHook:
    """One hook among those of the optimizers. The caller keeps it until it is removed."""

    def __init__(self, hooks: Dict[Any, Any], file: str) -> None:
        self._hooks = hooks
        self._file = file
        self._key = -id(self)  # torch's own count up from 0

    @classmethod
    def installed(cls, module: ModuleType, function: Callable[..., None]) -> Optional["OptimizerHook"]:
        """The hook, once torch's module calls the function; None if that module is older, or no moment was found."""
        hooks = getattr(module, _HOOKS, None)
        code = getattr(getattr(module, REGISTER, None), "__code__", None)
        if type(hooks) is not collections.OrderedDict or code is None:
            return None
        hook = cls(hooks, code.co_filename)
        return hook if hook._change(function) else None

    def remove(self) -> bool:
        """Remove it; False if no moment was found. Then it still counts."""
        return self._change()

    def _change(self, *function: Callable[..., None]) -> bool:
        """Add the function, or remove what was added."""
        if len(self._hooks) <= 1:
            return self._change_now(*function)
        sampler = _sampler()
        for _ in range(_TRIES):
            time.sleep(_PAUSE_S)
            if len(self._hooks) <= 1 or (not function and self._key not in self._hooks):
                return self._change_now(*function)
            try:
                if sampler is not None and sampler.change_item(self._file, self._hooks, self._key, *function):
                    return True
            except KeyError:  # the program has cleared its hooks meanwhile
                return True
        return False

    def _change_now(self, *function: Callable[..., None]) -> bool:
        if function:
            self._hooks[self._key] = function[0]
        else:
            self._hooks.pop(self._key, None)
        return True


def _sampler() -> Any:
    """The process's stack sampler, which has just been verified; None if there is none."""
    try:
        from kineto_agent.sources.python import sampler_binding

        return sampler_binding.checked()
    except (ImportError, SourceError):
        log_exception("the hooks of optimizers")
        return None
