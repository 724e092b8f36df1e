"""Yields to the program's own jax.profiler.

Theory of operation
    XLA's profiler serves one session per process. A second one is created without an error and fails at its end. So
    while a session of ours is open, one begun by the program would raise in its stop_trace(): ours must end before the
    program's begins, and never begin while the program's is open.

    All sessions that Python code begins (jax.profiler.start_trace, trace, automatic profile-guided optimisation) are
    objects of one class of jaxlib, which jax.profiler looks up for each of them. During a recording a derived class
    replaces it: there, on the program's thread, ours ends first. (Newer jaxlibs do not call an __init__ set on the
    class itself.) A profiler server begins its sessions in C++, which we cannot intercept: so no recording begins while
    a server runs, and start_server() is shadowed likewise.

    start_trace() holds the lock of jax.profiler's state from before it creates its session until it has recorded it,
    and stop_trace() until the session has been written. A holder of that lock profiles, or is about to: ours begins
    only if the lock is free, and holds it until its own session exists.

Rules
    An error of ours never reaches the program. In a forked child the shadows only call JAX's functions.
    If somebody else shadows the same functions in between, their shadows stay: ours then remain below theirs and only
    call JAX's.
"""

import _thread
import os
from typing import Any, Callable, List, Tuple

from kineto_agent.sources.interface import SourceError
from kineto_agent.sources.jax.jax_runtime import Profiler, profiles_by_itself
from kineto_agent.system.debuglog import log_exception

_ACTIVE = "USER_PROFILER_ACTIVE"
_REFUSED = "JAX_PROFILER_UNAVAILABLE"
END_LIMIT_S = 10.0  # for an XLA that does not end our session: the program's would fail beside it
TRACE, SERVER = "jax.profiler", "jax.profiler's server"


class SessionGuard:
    """Calls `before`, between `enter` and `remove`, on the program's thread before it begins to use the profiler.

    before: gets TRACE or SERVER; called under `lock`, which is reentrant since a signal handler may start a profiler.
    """

    def __init__(self, profiler: Profiler, before: Callable[[str], None]) -> None:
        self.lock = _thread.RLock()
        self._profiler = profiler
        self._before = before
        self._pid = os.getpid()
        self._ours = 0  # thread that creates a session of ours
        self._on = False
        self._shadows: List[Tuple[str, Any, Any]] = []  # name, JAX's own, ours

    def enter(self, begin: Callable[[], None]) -> None:
        """Begin our session with `begin`, unless the program's profiler is in use. Raises SourceError."""
        with self.lock:
            refuse_if_used(self._profiler)
            if not self._profiler.state.lock.acquire(False):
                raise SourceError(_ACTIVE, "the program's own jax.profiler is being started or stopped")
            try:
                refuse_if_used(self._profiler)
                self._install()
                self.begin(begin)
            except BaseException:
                self.remove()
                raise
            finally:
                self._profiler.state.lock.release()

    def begin(self, begin: Callable[[], None]) -> None:
        """Create a session of ours, for which we need not yield. With `lock` held."""
        self._ours = _thread.get_ident()
        try:
            begin()
        finally:
            self._ours = 0

    def remove(self) -> None:
        """Remove the shadows. Idempotent."""
        self._on = False
        for name, theirs, ours in self._shadows:
            if getattr(self._profiler.native, name, None) is ours:
                setattr(self._profiler.native, name, theirs)
        self._shadows = []

    def _install(self) -> None:
        if self._on:
            return
        self._on = True
        native, called = self._profiler.native, self._called
        their_session, their_start = native.ProfilerSession, native.start_server

        class ProfilerSession(their_session):  # type: ignore[misc, valid-type]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                called(TRACE)
                super().__init__(*args, **kwargs)

        def start_server(*args: Any, **kwargs: Any) -> Any:
            called(SERVER)
            return their_start(*args, **kwargs)

        for ours, theirs in ((ProfilerSession, their_session), (start_server, their_start)):
            name = ours.__name__
            ours.__module__, ours.__qualname__, ours.__doc__ = native.__name__, name, theirs.__doc__
            self._shadows.append((name, theirs, ours))
            setattr(native, name, ours)

    def _called(self, what: str) -> None:
        try:
            theirs = self._on and self._pid == os.getpid() and self._ours != _thread.get_ident()
            if theirs and self.lock.acquire(timeout=END_LIMIT_S):
                try:
                    if self._on:
                        self._before(what)
                finally:
                    self.lock.release()
        except Exception:  # noqa: BLE001 - never into the program
            log_exception("the guard of jax.profiler")


def refuse_if_used(profiler: Profiler) -> None:
    """Raise SourceError if the program profiles itself, or may do so unnoticed."""
    if profiler.state.profile_session is not None:
        raise SourceError(_ACTIVE, "the program's own jax.profiler is recording, and there can be only one session")
    if profiler.server_runs:
        raise SourceError(
            _REFUSED,
            "the program has a profiler server (jax.profiler.start_server), which could not serve trace "
            "requests while the agent records; stop the server, or request the trace from it",
        )
    if profiles_by_itself():
        raise SourceError(
            _REFUSED,
            "JAX's automatic profile-guided optimisation is on (jax_enable_pgle) and opens profiler sessions by "
            "itself: a session of the agent would make them fail",
        )
