"""A plug-in as an activity source: every call goes to its worker with a deadline, and every answer is checked.

Theory of operation
    Every failure of a plug-in becomes a SourceError with one of these codes (docs/errors.md), and the capture continues
    without it:

        PLUGIN_DECLINED  it raised SourceError: it cannot record, and says why
        PLUGIN_FAILED    it raised anything else, or its files cannot be executed
        PLUGIN_TIMEOUT   it did not return in time, and is abandoned in this process (worker.py)
        PLUGIN_INVALID   it returned something that the interface does not allow

    Answers are converted to plain values of ours on the worker's thread, because any access to its objects runs its
    code. Counts come from the arena itself: the daemon reads that, not what a plug-in says.

    The files are compiled and executed when the process first shows the plug-in's signs. Signs persist: a loaded
    library is not expected to go away.
"""

import _thread
import os
import re
import sys
import time
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any, Callable, Dict, FrozenSet, List, Optional, Tuple

from kineto_agent.protocol.plugin_bundle import DETACH_NEVER, PLUGIN_API, SOURCE_FILE, Plugin, Signs
from kineto_agent.sources.interface import SourceError, SourceRequest
from kineto_agent.sources.plugins.plugin_session import PluginSession
from kineto_agent.sources.plugins.worker import ASK_S, LOAD_S, PluginViolation, PluginWorker, plain_strings
from kineto_agent.system import mappings
from kineto_agent.system.descriptors import list_folder
from kineto_agent.system.gil_rests import Rests

_MAX_TYPES = 64
_PACKAGE = "kineto_plugin"  # prefix of names in tracebacks
_LIBRARY = os.__file__.rpartition("/")[0]


# Checks whether a process shows the signs of an accelerator: mapped files, variables and imports. Loads nothing.
_FILE = re.compile(rb"/([^/\n]+)$", re.MULTILINE)
_WILD = frozenset("*?[")


class ProcessView:
    """What a process shows at one moment. The mapped files are read once, when a plug-in needs them."""

    def __init__(self, maps: str = "/proc/self/maps") -> None:
        self._maps = maps
        self._libraries: Optional[FrozenSet[str]] = None

    def libraries(self) -> FrozenSet[str]:
        """Names of the mapped files, without folders; none if they cannot be read."""
        if self._libraries is None:
            try:
                text = mappings.read(self._maps).replace(b" (deleted)\n", b"\n")
            except OSError:
                text = b""
            self._libraries = frozenset(os.fsdecode(name) for name in _FILE.findall(text))
        return self._libraries

    def matches(self, signs: Signs) -> bool:
        """Whether each declared kind of sign has a match. Cheap ones are checked first."""
        return (
            _any(signs.modules, lambda name: name in sys.modules)
            and _any(signs.environment, is_set)
            and _any(signs.device_files, _exists)
            and _any(signs.libraries, self._is_mapped)
        )

    def _is_mapped(self, pattern: str) -> bool:
        return any(fnmatchcase(name, pattern) for name in self.libraries())


def _any(patterns: Tuple[str, ...], matches: Callable[[str], bool]) -> bool:
    return not patterns or any(map(matches, patterns))


def is_set(pattern: str) -> bool:
    """Whether a variable is set or matches a pattern: "NAME" or "NAME=pattern"."""
    name, equals, value = pattern.partition("=")
    found = os.environ.get(name)
    return found is not None and (not equals or fnmatchcase(found, value))


def _exists(pattern: str) -> bool:
    folder, _, name = pattern.rpartition("/")
    if not _WILD & set(name):
        return os.path.exists(pattern)
    try:
        return any(fnmatchcase(entry, name) for entry in list_folder(folder or "/"))
    except OSError:
        return False


class PluginSource:
    """The source of one plug-in. Used by the agent's thread."""

    def __init__(self, plugin: Plugin, worker: Optional[PluginWorker] = None) -> None:
        self.plugin = plugin
        self.name = plugin.name
        self.declared_types = plugin.activity_types
        self.on_request: FrozenSet[str] = plugin.activity_types if plugin.detach == DETACH_NEVER else frozenset()
        self.worker = worker or PluginWorker(plugin.name)
        self._present = False
        self._source: Any = None
        self._broken: Optional[SourceError] = None  # why its files cannot be executed here
        self._trouble: Optional[SourceError] = None

    # ------------------------------------------------------------ what it could record

    def look(self, view: ProcessView) -> None:
        """Look for the accelerator in this process."""
        self._present = self._present or view.matches(self.plugin.signs)
        self.worker.interrupt()

    def activity_types(self) -> List[str]:
        """The types that it can record now, if the accelerator is present and was started as required."""
        if not self._present or self._lacks_variable():
            return []
        try:
            types: List[str] = self._loaded(self._ask)
            self._trouble = None
        except SourceError as exc:
            self._trouble = exc
            return []
        return types

    def trouble(self, wanted: FrozenSet[str]) -> Optional[SourceError]:
        """Why it records nothing although the accelerator is present and requested. wanted: empty: the defaults.

        As of the last call of activity_types().
        """
        asked = wanted & self.declared_types if wanted else self.declared_types - self.on_request
        return self._trouble if self._present and asked else None

    def needs_start(self) -> str:
        """What the process needs to be recorded, for people; "" if nothing, or without such an accelerator."""
        if not self._present or not self._lacks_variable():
            return ""
        text = "%s records only processes that were started with the variable %s"
        return text % (self.name, self.plugin.needs_from_start)

    @property
    def is_present(self) -> bool:
        """Whether the process has shown the signs of the accelerator."""
        return self._present

    def looks_for(self) -> str:
        """The signs by which it recognises the accelerator, for people."""
        return "%s looks for %s" % (self.name, _words(self.plugin.signs))

    def why_missing(self) -> str:
        """Why one of the declared types is not offered, for people."""
        if not self._present:
            return "%s finds no sign of its accelerator in this process (%s)" % (self.name, _words(self.plugin.signs))
        if self._trouble is not None:
            return "%s: %s" % (self.name, self._trouble.reason)
        return self.needs_start() or "%s does not offer it at the moment" % self.name

    def _lacks_variable(self) -> bool:
        return bool(self.plugin.needs_from_start) and not is_set(self.plugin.needs_from_start)

    def _loaded(self, ask: Any) -> Any:
        if self._broken is not None:
            raise self._broken
        if self._source is None:
            try:
                self._source = self.worker.call("loading it", Namespace(self.plugin).source, LOAD_S)
                self.on_request |= self.worker.call("on_request", self._on_request, ASK_S)
            except SourceError as exc:
                self._broken, self._source = exc, None
                raise
        return self.worker.call("activity_types()", ask, ASK_S)

    def _on_request(self) -> FrozenSet[str]:
        named = plain_strings(getattr(self._source, "on_request", ()), _MAX_TYPES, "on_request")
        return frozenset(self._declared(named))

    def _ask(self) -> List[str]:
        return self._declared(plain_strings(self._source.activity_types(), _MAX_TYPES, "activity types"))

    def _declared(self, named: List[str]) -> List[str]:
        strange = sorted(set(named) - self.declared_types)
        if strange:
            raise PluginViolation("returned the activity type %s, which its schema does not declare" % strange[0])
        return named

    # ------------------------------------------------------------ recording

    def would_yield(self, request: SourceRequest) -> bool:
        """The value that the plug-in declares."""
        return "torch" in self.plugin.conflicts

    def prepare(self, request: SourceRequest) -> PluginSession:
        """Let the plug-in create its arena, and check the result. Raises SourceError."""
        kind = PluginSession
        if "jax" in self.plugin.conflicts:
            from kineto_agent.sources.plugins.beside_jax import SessionBesideJax as kind
        session = kind(self.plugin, self.worker, self._source)
        session.prepare(request)
        return session


def _words(signs: Signs) -> str:
    kinds = ((kind.replace("_", " "), ", ".join(each)) for kind, each in signs._asdict().items() if each)
    return "; ".join("%s %s" % kind for kind in kinds)


# Executes the Python files of a plug-in, in a namespace of their own.
#
# The files never get into sys.modules or sys.path, and import from three places only: each other (`from . import
# NAME`), the standard library, and the agent's modules for plug-ins (plugin_bundle.PLUGIN_API). Nothing of the program
# is imported: modules that it has imported itself are in sys.modules. Imports go through this module's own
# `__import__`, which a live attach has replaced (bootstrap/loader.py): so a plug-in gets the same agent and standard
# library as we do.
#
# A file is compiled and executed in pieces, with rests between them, on the plug-in's thread.
class Namespace:
    """The modules of one plug-in."""

    def __init__(self, plugin: Plugin) -> None:
        self._plugin = plugin
        self._builtins: Dict[str, Any] = dict(_own_builtins(), __import__=self._import)
        self._loaded: Dict[str, ModuleType] = {}

    def source(self) -> Any:
        """SOURCE of the plug-in, called on its thread. Raises whatever its files raise."""
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
        """Implements the import statement in the plug-in's files."""
        if level == 1 and name:
            return self._get(name)
        if level == 1:
            package = ModuleType("%s.%s" % (_PACKAGE, self._plugin.name))
            for each in fromlist:
                setattr(package, each, self._get(each))
            return package
        if level or not may_import(name):
            raise ImportError(
                "a plug-in can import only the standard library and %s, not %s" % (" and ".join(PLUGIN_API), name)
            )
        if name == PLUGIN_API[0] and fromlist:
            return self._api()
        return __import__(name, globals(), None, fromlist, 0)

    def _api(self) -> ModuleType:
        """The plug-in's copy of that module, which knows whose libraries to load."""
        from kineto_agent.sources.plugins import api, libraries

        copy = ModuleType(api.__name__)
        copy.__dict__.update(vars(api), load_library=libraries.PluginLibraries(self._plugin.libraries).load)
        return copy


def may_import(name: str) -> bool:
    """Whether plug-ins may import this module."""
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
