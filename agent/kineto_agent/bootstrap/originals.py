"""Gives an agent that starts with the program the interpreter's own functions, whatever the program replaces later.

Theory of operation
    eventlet and gevent put functions of their own into _thread, time, select and os. If a thread of the agent takes one
    of their locks, it acts as one of the program's green threads: the hub prints "Cannot switch to a different thread",
    or the program hangs. An attached agent has copies of these modules (standard_library.py). An agent imported from
    files gets them here: a finder of ours, in sys.path_importer_cache for their folders only, finds its packages, and
    its modules see the copies through their own `__import__`. Modules imported before this one have none, so everything
    that starts an agent imports it first.

    For functions that the program replaced earlier, the originals kept by these two are used.

Threads: any.
Blocks: never; it opens no file.
"""

import builtins
import importlib
import os
import sys
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, ModuleSpec, SourceFileLoader
from types import ModuleType
from typing import Any, Dict, Iterable, Optional

_REPLACED = ("_thread", "os", "select", "time")


def _find_in(folders: Iterable[str]) -> None:
    sys.path_importer_cache.update((folder, _Finder(folder)) for folder in folders if os.path.isdir(folder))


def _copy(name: str) -> ModuleType:
    module, made = importlib.import_module(name), ModuleType(name)
    made.__dict__.update(module.__dict__)
    made.__dict__.update(getattr(sys.modules.get("__original_module_" + name), "__dict__", {}))  # eventlet's
    saved = getattr(sys.modules.get("gevent.monkey"), "saved", None)
    made.__dict__.update(saved.get(name, {}) if isinstance(saved, dict) else {})
    return made


_copies: Dict[str, ModuleType] = {name: _copy(name) for name in _REPLACED}


def _import(name: str, *arguments: Any, **more: Any) -> ModuleType:
    found: ModuleType = builtins.__import__(name, *arguments, **more)
    return _copies.get(name, found)


class _Loader(SourceFileLoader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__dict__["__builtins__"] = dict(builtins.__dict__, __import__=_import)
        return module


class _Finder(FileFinder):
    def __init__(self, folder: str) -> None:
        super().__init__(folder, (_Loader, SOURCE_SUFFIXES))

    def find_spec(self, fullname: str, target: Optional[ModuleType] = None) -> Optional[ModuleSpec]:
        spec = super().find_spec(fullname, target)
        _find_in((spec is not None and spec.submodule_search_locations) or ())
        return spec


for _name, _module in list(sys.modules.items()):
    if _name.partition(".")[0] == "kineto_agent":
        _find_in(getattr(_module, "__path__", ()))
