"""Watches methods of classes in a library that the program may import later.

Theory of operation
    A finder on sys.meta_path waits for the modules in question, lets the import system do all the work, and removes
    itself once it has seen all of them. A function that calls the method shadows it on its class.

Rules
    Nothing raised by the import system or the method is changed.
    If somebody else has shadowed a method after us, it is left as it is, and our function only calls the method.
"""

import functools
import sys
from types import ModuleType
from typing import Any, Callable, Dict, NamedTuple, Optional

from kineto_agent.system.debuglog import log_exception


class ModuleHook(NamedTuple):
    """A module and what to do with it."""

    complete: str  # attribute whose presence shows that the import has progressed far enough
    hook: Callable[[ModuleType], None]


class _ModuleFinder:
    """Waits on sys.meta_path for some modules and ignores everything else."""

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
            try:
                on_loaded(module)
            except Exception:  # noqa: BLE001 - the program's import has succeeded
                log_exception("%s cannot be hooked" % module.__name__)

        try:
            loader.exec_module = exec_and_tell
        except AttributeError:  # a loader that takes no attributes
            return


class ModuleHooks:
    """Hooks modules by name, now or when they are imported."""

    def __init__(self, hooks: Dict[str, ModuleHook]) -> None:
        self._hooks = hooks
        self._finder: Optional[_ModuleFinder] = None
        self._awaited: Dict[str, Callable[[ModuleType], None]] = {}

    def install(self, wait_for_import: bool = True) -> None:
        """Hook the imported modules and optionally wait for the others. Idempotent."""
        if self._finder is not None:
            return
        for name, wanted in self._hooks.items():
            module = sys.modules.get(name)
            if module is not None and hasattr(module, wanted.complete):
                wanted.hook(module)
            elif wait_for_import:
                self._await(name, wanted.hook)
        if self._awaited:
            self._finder = _ModuleFinder(self._awaited)
            sys.meta_path.insert(0, self._finder)

    def _await(self, name: str, hook: Callable[[ModuleType], None]) -> None:
        def loaded(module: ModuleType) -> None:
            self._awaited.pop(name, None)
            if not self._awaited:
                self.withdraw()
            hook(module)

        self._awaited[name] = loaded

    def withdraw(self) -> None:
        """Stop waiting for modules."""
        if self._finder is not None and self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        self._finder = None
        self._awaited.clear()


class MethodShadow:
    """One method of one class, replaced by a function that calls it and notifies us before and after.

    Both get the method's positional arguments, and must not raise. A call that raises has no `after`.
    """

    def __init__(
        self,
        owner: Any,
        name: str,
        after: Callable[[Any], None],
        before: Optional[Callable[[Any], None]] = None,
    ) -> None:
        self._owner, self._name, self._after, self._before = owner, name, after, before
        self._original: Any = None
        self._shadow: Any = None
        # the function inside the shadow; earlier ones, which others may still reference, stay inactive
        self._installed: Any = None
        self._active = False

    def install(self) -> None:
        """Install it; if it is still in place, or below somebody else's function, only activate it."""
        present = vars(self._owner).get(self._name)
        if self._shadow is not None and present is not self._original:
            self._active = True
            return
        function = present.__func__ if isinstance(present, classmethod) else present
        if not callable(function):
            return

        @functools.wraps(function)
        def call_and_tell(*args: Any, **kwargs: Any) -> Any:
            if self._before is not None and args and self._tells(call_and_tell):
                self._before(args)
            result = function(*args, **kwargs)
            if args and self._tells(call_and_tell):
                self._after(args)
            return result

        call_and_tell._torchdynamo_disable = True  # type: ignore[attr-defined]  # it must not be traced into
        self._original, self._installed = present, call_and_tell
        self._shadow = classmethod(call_and_tell) if isinstance(present, classmethod) else call_and_tell
        self._active = True
        setattr(self._owner, self._name, self._shadow)

    def _tells(self, function: Any) -> bool:
        return self._active and self._installed is function

    def remove(self) -> None:
        """Remove it, or deactivate it if it is below somebody else's function."""
        self._active = False
        if self._shadow is not None and vars(self._owner).get(self._name) is self._shadow:
            setattr(self._owner, self._name, self._original)
            self._original = self._shadow = self._installed = None
