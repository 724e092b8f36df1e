"""Executes the Python files of a plug-in, in a namespace of their own.

Theory of operation
    The files never get into sys.modules or sys.path, and import from three places only: each other (`from . import
    NAME`), the standard library, and what the agent offers to plug-ins (plugin_bundle.PLUGIN_API). Nothing of the
    program is imported: what it has imported itself is in sys.modules. Imports go through this module's own
    `__import__`, which a live attach has replaced (bootstrap/loader.py): so a plug-in gets the same agent and the same
    standard library as we do.

    A file is compiled and executed in pieces, with rests between them, on the plug-in's thread.
"""

import _thread
import os
import sys
import time
from types import ModuleType
from typing import Any, Dict, List

from kineto_agent.protocol.plugin_bundle import PLUGIN_API, SOURCE_FILE, Plugin
from kineto_agent.system.gil_rests import Rests

_PACKAGE = "kineto_plugin"  # of the names in tracebacks
_LIBRARY = os.__file__.rpartition("/")[0]


class Namespace:
    """The modules of one plug-in."""

    def __init__(self, plugin: Plugin) -> None:
        self._plugin = plugin
        self._builtins: Dict[str, Any] = dict(_own_builtins(), __import__=self._import)
        self._loaded: Dict[str, ModuleType] = {}

    def source(self) -> Any:
        """SOURCE of the plug-in, on its thread. Raises whatever its files raise."""
        self._rests = Rests(time, _thread)
        return self._get(SOURCE_FILE[: -len(".py")]).SOURCE

    def _get(self, name: str) -> ModuleType:
        if name in self._loaded:
            return self._loaded[name]
        file = self._plugin.files.get(name + ".py")
        if file is None:
            raise ImportError("the plug-in %s has no file %s.py" % (self._plugin.name, name))
        package = "%s.%s" % (_PACKAGE, self._plugin.name)
        module = self._loaded[name] = ModuleType("%s.%s" % (package, name))
        module.__file__ = "<%s.%s>" % (package, name)
        module.__package__ = package
        module.__dict__["__builtins__"] = self._builtins
        flags = _annotations() if file.annotations else 0
        try:
            for line, text in file.pieces:
                code = compile("\n" * (line - 1) + text, module.__file__, "exec", flags, True)
                exec(code, module.__dict__)  # noqa: S102 - the operator's own plug-in, from a daemon vouched for
                self._rests.rest()
        except BaseException:
            del self._loaded[name]
            raise
        return module

    def _import(
        self, name: str, namespace: Any = None, local: Any = None, fromlist: Any = (), level: int = 0
    ) -> ModuleType:
        """What the import statement calls in the plug-in's files."""
        if level == 1 and name:
            return self._get(name)
        if level == 1:
            package = ModuleType("%s.%s" % (_PACKAGE, self._plugin.name))
            for each in fromlist:
                setattr(package, each, self._get(each))
            return package
        if level or not may_import(name):
            raise ImportError(
                "a plug-in imports the standard library and %s, not %s" % (" and ".join(PLUGIN_API), name)
            )
        if name == PLUGIN_API[0] and fromlist:
            return self._api()
        return __import__(name, globals(), None, fromlist, 0)

    def _api(self) -> ModuleType:
        """The plug-in's copy of that module: it knows whose libraries it loads."""
        from kineto_agent.sources.plugins import api, libraries

        copy = ModuleType(api.__name__)
        copy.__dict__.update(vars(api), load_library=libraries.PluginLibraries(self._plugin.libraries).load)
        return copy


def may_import(name: str) -> bool:
    """Whether a module is one of those that plug-ins may import."""
    top = name.partition(".")[0]
    if top == "kineto_agent":
        return name in PLUGIN_API
    known = getattr(sys, "stdlib_module_names", None)  # from 3.10 on
    return top in known if known is not None else _lies_in_library(top)


def _lies_in_library(name: str) -> bool:
    files = {entry.partition(".")[0] for place in (_LIBRARY, _LIBRARY + "/lib-dynload") for entry in _listed(place)}
    return name in sys.builtin_module_names or (name in files and name != "site-packages")


def _listed(folder: str) -> List[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _own_builtins() -> Dict[str, Any]:
    found: Any = globals()["__builtins__"]
    return found if isinstance(found, dict) else vars(found)


def _annotations() -> int:
    import __future__

    return __future__.annotations.compiler_flag
