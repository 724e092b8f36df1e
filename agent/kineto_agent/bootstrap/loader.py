"""Loads the agent in a process that has none. Executed by the bootstrap of a live attach; nobody imports it.

Theory of operation
    The daemon sends this text with `HEADER = {...}` behind it in one packet, and the descriptors that the header
    names: "sources" (every module as pieces of text), "code" (the same, compiled by the daemon's Python, for targets
    of that very version) and "library" (the collector). All are sealed memfds; both module files are marshal
    documents, which needs no import here.

    The modules live in a dictionary of their own. Their `__builtins__` is a copy with another `__import__`, which
    serves `kineto_agent` from there, the standard library from `Standard` (standard_library.py) and passes everything
    else on: sys.modules, sys.path and the program's own kineto_agent are not affected.

    Compiling takes 30 ms in all, executing precompiled code 10 ms, and neither releases the GIL by itself. So the work
    is done in pieces, with rests between them (system/gil_rests.py).

    `state` is `sys._kineto_attach`. It keeps the loaded modules under "agent", so that the next attach of the same
    sources finds them, and fork hooks, which cannot be taken back, do not accumulate. Any version may find what any
    other version has left there: "digest", and "end", a function that ends a running agent. "ours", "in"
    and "out" belong to the bootstrap's filter of warnings: what it ignores, the name of the list in which it is to
    stand, and what takes it out.

    The texts of gil_rests.py and standard_library.py stand before this one in the packet. The global `turns` is the
    address for Turns; "calls" in `state` are those of dlopen and dlsym, for c_functions.py.
"""

from __future__ import annotations  # not evaluated: typing might not be imported yet

TYPE_CHECKING = False
if TYPE_CHECKING:
    import builtins
    import marshal
    import posix
    import sys
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any, Union

    from kineto_agent.bootstrap.standard_library import Standard
    from kineto_agent.system.gil_rests import Rests

    Piece = Union[bytes, tuple[int, str]]
    turns = dlopen = dlsym = 0

_PACKAGE = "kineto_agent"
_LIVE = "kineto_agent.bootstrap.live_attach"
_FORK_WARNINGS = "kineto_agent.system.fork_warnings"
HEADER: dict[str, Any] = {}  # the daemon's values follow in the packet


class _Modules:
    """The agent's modules in a namespace of their own."""

    def __init__(self, contents: dict[str, tuple[bool, list[Piece]]]) -> None:
        self.loaded: dict[str, ModuleType] = {}
        self._contents = contents  # name -> (is a package, pieces: compiled code or (first line, text))
        self._builtins = dict(builtins.__dict__, __import__=self.import_)
        self._standard = Standard(self._give_way)
        self._rests = Rests(self._standard.get("time"))

    def import_(
        self, name: str, namespace: Any = None, local: Any = None, fromlist: Any = (), level: int = 0
    ) -> ModuleType:
        """What the import statement calls in the agent's modules."""
        if level or name.partition(".")[0] != _PACKAGE:
            return self._standard.import_(name, namespace, local, fromlist, level)
        module = self.get(name)
        for attribute in fromlist or ():
            submodule = name + "." + attribute
            if submodule in self._contents and not hasattr(module, attribute):
                self.get(submodule)
        return module if fromlist else self.loaded[_PACKAGE]

    def get(self, name: str) -> ModuleType:
        """The module, executed when first asked for."""
        if name in self.loaded:
            return self.loaded[name]
        parent, _dot, last = name.rpartition(".")
        above = self.get(parent) if parent else None
        if name not in self._contents:
            raise ImportError("the agent has no module " + name, name=name)
        module = self.loaded[name] = self._make(name, parent)
        try:
            self._execute(name, module.__dict__)
        except BaseException:
            del self.loaded[name]
            raise
        self._contents[name] = (self._contents[name][0], [])  # most of what came would stay in memory for nothing
        if above is not None:
            setattr(above, last, module)
        return module

    def _make(self, name: str, parent: str) -> ModuleType:
        module = type(sys)(name)
        is_package = self._contents[name][0]
        module.__file__ = "<%s>" % name
        module.__package__ = name if is_package else parent
        module.__dict__["__builtins__"] = self._builtins
        if is_package:
            module.__path__ = []
        return module

    def _execute(self, name: str, namespace: dict[str, Any]) -> None:
        file = "<%s>" % name
        for piece in self._contents[name][1]:
            if isinstance(piece, bytes):
                code = marshal.loads(piece)  # noqa: S302 - the daemon's own code
            else:
                padded = "\n" * (piece[0] - 1) + piece[1]  # so that tracebacks show the right lines
                code = compile(padded, file, "exec", 0, True)
            exec(code, namespace)  # noqa: S102 - the daemon's own code
            self._give_way()

    def _give_way(self) -> None:
        self._rests.rest()


def _read(descriptor: int) -> bytes:
    size, data = posix.fstat(descriptor).st_size, b""
    while len(data) < size:
        data += posix.pread(descriptor, size - len(data), len(data))
    return data


def _modules(files: dict[str, int]) -> _Modules:
    same_python = HEADER["cache_tag"] == sys.implementation.cache_tag and HEADER["magic"] == _magic()
    return _Modules(marshal.loads(_read(files["code" if same_python else "sources"])))  # noqa: S302


def _magic() -> Any:
    return getattr(sys.modules.get("_frozen_importlib_external"), "MAGIC_NUMBER", None)


def load(state: dict[str, Any], channel: Any, descriptors: list[int]) -> Callable[[], None]:
    """Start the agent with `channel` as its link; returns its work, to be done on this thread. Raises whatever goes
    wrong; the bootstrap then closes the channel and the remaining `descriptors`.

    A bootstrap that the daemon has given up on may still be running beside the next one: each touches only its own
    part of state["open"].
    """
    files = dict(zip(HEADER["descriptors"], descriptors))
    state["calls"] = dlopen, dlsym
    if state.get("opening"):
        raise OSError("a library of the agent is half open: forked at that moment, or another thread opens one since")
    agent: Any = state.get("agent")
    if agent is not None:
        agent["end"]()
    modules: _Modules | None = None
    if agent is None or agent["digest"] != HEADER["digest"]:
        modules = _modules(files)
    for name in ("sources", "code"):
        for held in _held(state, files.pop(name)):
            held.close()
    if modules is not None:
        state["ours"] = modules.get(_FORK_WARNINGS).because_of_ours
        live = modules.get(_LIVE)
        agent = {"digest": HEADER["digest"], "live": live, "end": live.end}
    number = state["libraries"] = state.get("libraries", 0) + 1  # of this one
    if "out" in state:
        state["in"] = "filters"  # an agent that has just ended may have taken it back
    given = (files.get("library", -1), number, turns)
    agent_work: Callable[[], None] = agent["live"].run(channel, *given)

    def work() -> None:
        try:
            agent_work()
        finally:
            if "out" in state and state["libraries"] == number:
                state["out"]()
                state["in"] = ""

    state["agent"] = agent
    for ours in (channel, *descriptors):  # they belong to the agent now, in a forked child too
        for held in _held(state, ours):
            state["open"].remove(held)
    return work


def _held(state: dict[str, Any], opened: Any) -> list[Any]:
    """The entries for it that the bootstrap has made for its fork hook."""
    return [held for held in state["open"] if getattr(held, "x", None) == opened]
