"""Loads the agent in a process that has none. The bootstrap of a live attach executes it; it is never imported.

Theory of operation
    The daemon sends this text followed by `HEADER = {...}` in one packet, and the descriptors that the header lists:
    "sources" (every module as pieces of text), "code" (the same, compiled by the daemon's Python, for targets of that
    very version) and "library" (the collector). All are sealed memfds; both module files are marshal documents, which
    needs no import here.

    The modules live in a dictionary of their own. Their `__builtins__` is a copy with another `__import__`, which
    serves `kineto_agent` from there, the standard library from `Standard` (standard_library.py) and passes everything
    else on: sys.modules, sys.path and the program's own kineto_agent are not affected.

    Compiling takes 30 ms in all, executing precompiled code 10 ms, and neither releases the GIL by itself. So the work
    is done in pieces, with rests between them (system/gil_rests.py).

    Only one of the agent's threads loads modules at a time. Others see a module once it is complete, with all modules
    loaded for it; only the loading thread sees it before, as circular imports require. A thread of the program never
    loads and never waits: an import of a missing module fails, and the hook does without.

    `state` is `sys._kineto_attach`. It keeps the loaded modules under "agent", so that the next attach of the same
    sources finds them, and fork hooks, which cannot be taken back, do not accumulate; under "begun" also those of an
    attach that failed: no two modules import each other, so a module that is whole stays right. Any version may find
    what any other version has left there: "digest", and "end", a function that ends a running agent.

    The texts of gil_rests.py and standard_library.py precede this one in the packet. The global `turns` is the address
    for Turns; "calls" in `state` are the addresses of dlopen and dlsym, for c_functions.py.
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
    native: Callable[..., Any]

_PACKAGE = "kineto_agent"
_LIVE = "kineto_agent.bootstrap.live_attach"
_FORK_WARNINGS = "kineto_agent.system.fork_warnings"
_THREADS = "kineto_agent.system.threads"
_WAIT_S = 5.0  # for another thread of the agent, which loads modules within milliseconds
HEADER: dict[str, Any] = {}  # the daemon's values follow in the packet


class _Turn:
    """The right to load modules, for one of the agent's threads at a time; reentrant."""

    def __init__(self, thread: Any, is_ours: Callable[[int], bool]) -> None:
        self._ident, self._is_ours = thread.get_ident, is_ours
        self._lock = thread.allocate_lock()
        self._holder = 0
        self.depth = 0

    def __enter__(self) -> None:
        ident = self._ident()
        if self._holder != ident:
            if not self._is_ours(ident):
                raise ImportError("the agent does not load its modules on threads of the program")
            if not self._lock.acquire(timeout=_WAIT_S):
                raise ImportError("another thread of the agent is loading modules")
            self._holder = ident
        self.depth += 1

    def __exit__(self, *_error: object) -> None:
        self.depth -= 1
        if not self.depth:
            self._holder = 0
            self._lock.release()


class _StandardInTurn(Standard):
    """The standard library for several threads."""

    turn: Any = None  # there is only one thread until it is set

    def get(self, name: str) -> Any:
        """See Standard; raises ImportError if the module is not loaded and must not be loaded now."""
        if self.turn is None or name in self._found:
            return super().get(name)
        with self.turn:
            return super().get(name)


class _Modules:
    """The agent's modules in a namespace of their own."""

    def __init__(self, contents: dict[str, tuple[bool, list[Piece]]]) -> None:
        self.loaded: dict[str, ModuleType] = {}  # complete modules
        self._making: dict[str, ModuleType] = {}  # for the thread that holds the turn
        self._contents = contents  # name -> (is a package, pieces: compiled code or (first line, text))
        self._builtins = dict(builtins.__dict__, __import__=self.import_)
        self._rests: Rests | None = None  # the time module is not available yet
        self._standard = _StandardInTurn(self._give_way)
        self._time, self._thread = self._standard.get("time"), self._standard.get("_thread")
        self._pid = 0
        self._attaching: set[int] = set()  # threads: an abandoned attach may still load beside the next one

    def __enter__(self) -> _Modules:
        """Mark the calling thread as the agent's, which may load modules."""
        if self._pid != posix.getpid():  # in a forked child the loading thread does not exist
            self._pid = posix.getpid()
            self._making.clear()
            self._attaching.clear()
            self._turn = self._standard.turn = _Turn(self._thread, self._is_ours)
        self._attaching.add(self._thread.get_ident())
        self._rests = Rests(self._time, self._thread)
        return self

    def __exit__(self, *_error: object) -> None:
        self._attaching.discard(self._thread.get_ident())  # from now on `threads` knows the thread

    def _is_ours(self, ident: int) -> bool:
        threads = self.loaded.get(_THREADS)
        return ident in self._attaching or (threads is not None and threads.is_ours(ident))

    def import_(
        self, name: str, namespace: Any = None, local: Any = None, fromlist: Any = (), level: int = 0
    ) -> ModuleType:
        """Implements the import statement in the agent's modules."""
        if level or name.partition(".")[0] != _PACKAGE:
            try:
                return self._standard.import_(name, namespace, local, fromlist, level)
            except ImportError:
                if self._is_ours(self._thread.get_ident()):
                    raise
            # Not the agent's code: C code of the program called by a function of ours, such as XLA's profiler, imports
            # with that function's globals, and ends the process if that fails.
            return builtins.__import__(name, namespace, local, fromlist, level)
        module = self.get(name)
        for attribute in fromlist or ():
            if name + "." + attribute in self._contents:
                self.get(name + "." + attribute)
        return module if fromlist else self.get(_PACKAGE)

    def get(self, name: str) -> ModuleType:
        """Return the module, executed on first use."""
        if name in self.loaded:
            return self.loaded[name]
        with self._turn:
            try:
                return self.loaded.get(name) or self._making.get(name) or self._made(name)
            finally:
                if self._turn.depth == 1:
                    self._publish()

    def _publish(self) -> None:
        for name in self._making:
            # otherwise most of the received text would stay in memory for nothing
            self._contents[name] = (self._contents[name][0], [])
        self.loaded.update(self._making)
        self._making.clear()

    def _made(self, name: str) -> ModuleType:
        parent, _dot, last = name.rpartition(".")
        above = self.get(parent) if parent else None
        if name not in self._contents:
            raise ImportError("the agent has no module " + name, name=name)
        module = self._making[name] = self._make(name, parent)
        try:
            self._execute(name, module.__dict__)
        except BaseException:
            del self._making[name]
            raise
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
        if self._rests is not None:
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
    """Start the agent with `channel` as its link; returns its work, to be done on this thread. May raise anything; the
    bootstrap then closes the channel and the remaining `descriptors`.

    A bootstrap that the daemon has abandoned may still be running beside the next one: each touches only its own part
    of state["open"].
    """
    files = dict(zip(HEADER["descriptors"], descriptors))
    state["calls"] = dlopen, dlsym
    if state.get("opening"):
        raise OSError("an agent library is partly loaded: a fork interrupted that, or a thread is still loading it")
    agent: Any = state.get("agent")
    if agent is not None:
        agent["end"]()
    known = agent is not None and agent["digest"] == HEADER["digest"]
    kept = agent if known else state.get("begun")  # by an attach that ended while it loaded them
    modules = kept["modules"] if kept is not None and kept["digest"] == HEADER["digest"] else _modules(files)
    state["begun"] = {"digest": HEADER["digest"], "modules": modules}
    for name in ("sources", "code"):
        for held in _held(state, files.pop(name)):
            held.close()
    with modules:
        if not known:
            fork_warnings = modules.get(_FORK_WARNINGS)
            fork_warnings.keep_away()
            live = modules.get(_LIVE)
            agent = {"digest": HEADER["digest"], "live": live, "end": live.end, "modules": modules}
            agent["forks"] = fork_warnings
        try:
            return _begun(state, channel, descriptors, files, agent)
        except BaseException:
            if not known:
                agent["forks"].let_through()
            raise


def _begun(
    state: dict[str, Any], channel: Any, descriptors: list[int], files: dict[str, int], agent: dict[str, Any]
) -> Callable[[], None]:
    """Start the agent and return its work, as `load` does."""
    number = state["libraries"] = state.get("libraries", 0) + 1  # of this one
    agent["forks"].keep_away()  # an agent that has just ended may have let the warnings through again
    given = (files.get("library", -1), number, turns)
    agent_work: Callable[[], None] = agent["live"].run(channel, *given)

    def work() -> None:
        try:
            agent_work()
        finally:
            if state["libraries"] == number:
                native(b"", None, 0, 0, 1)  # noqa: F821 - given; those again until this thread has ended
                agent["forks"].let_through()

    native(b"", None, 0, 0, 0)  # noqa: F821 - given; takes the filters of the attach out of the interpreter's list
    state["agent"] = agent
    for ours in (channel, *descriptors):  # the agent owns them now, also in a forked child
        for held in _held(state, ours):
            state["open"].remove(held)
    return work


def _held(state: dict[str, Any], opened: Any) -> list[Any]:
    """The entries that the bootstrap has made for it for its fork hook."""
    return [held for held in state["open"] if getattr(held, "x", None) == opened]
