"""Yields to the program's own torch.profiler.

Theory of operation
    CUPTI and torch's profiler state serve one user per process. The program's own profiler comes first: a recording
    that needs either does not begin while that one warms up or records, and ends before it begins.

    There are two sources of information. Kineto's isActive() (kineto_state.py) knows every session of any origin, but
    not in advance. So torch.autograd.profiler.profile, behind torch.profiler and all older profilers, has two of its
    methods wrapped during a capture: _prepare_trace, with which a session begins to warm up, and __exit__, with which
    it ends. In the former, on the program's thread, the recording gives way before torch's method runs.

    One lock decides who was first: under it, the wrapper marks its profile and makes the recording give way, and the
    recording checks the marks and registers what has to give way. It is free while sources start, and while torch's own
    methods run; the mark represents them until the session's end. It is reentrant: a signal handler may start a
    profiler. A thread of the program waits for it at most LIMIT_S: in that case another thread has just begun a
    session, and torch allows only one. A session that was beginning while the methods were wrapped has no mark; its
    thread is inside torch's method.

    A program may import torch later: until then look() is called from time to time. The class exists long before
    `import torch` ends.

Rules
    An error of ours never reaches the program. In a forked child the wrappers only call torch's methods.
    If somebody else wraps the same methods in between, their wrappers stay: ours then remain below theirs and only call
    torch's.
"""

import _thread
import enum
import os
import sys
import weakref
from types import CodeType
from typing import Any, Callable, Dict, List, Tuple

from kineto_agent.sources.interface import SourceError
from kineto_agent.sources.torch import kineto_state
from kineto_agent.system.debuglog import log_exception

_MODULE = "torch.autograd.profiler"
_PREPARE, _EXIT = "_prepare_trace", "__exit__"
LIMIT_S = 0.02


class UserProfiler(enum.Enum):
    """State of the program's own torch.profiler; the values are for messages."""

    IDLE = "is idle"
    WARMING_UP = "is warming up"
    RECORDING = "is recording"
    UNKNOWN = "is in an unknown state"

    @property
    def active(self) -> bool:
        """Whether it needs CUPTI and torch's profiler state now."""
        return self in (UserProfiler.WARMING_UP, UserProfiler.RECORDING)


def _nothing() -> None:
    """Do nothing."""


class ProfilerGuard:
    """Tracks the program's own torch.profiler between install() and remove(), and is notified before it begins.

    before: called on the program's thread, under `lock`, each time before a session of it begins.
    after: called on the program's thread after a session has ended.
    """

    def __init__(self, before: Callable[[], None] = _nothing, after: Callable[[], None] = _nothing) -> None:
        self.lock = _thread.RLock()
        self._before = before
        self._after = after
        self._pid = os.getpid()
        self._on = False
        self._sessions: Dict[int, Any] = {}  # id -> weak reference: profiles that have begun and not ended
        self._class: Any = None
        self._wrapped: List[Tuple[str, Any, Any]] = []  # method, torch's own, ours

    # ------------------------------------------------------------ the agent's thread

    def install(self) -> None:
        """Wrap the methods if torch is imported. Idempotent."""
        self._on = True
        self.look()

    @property
    def waits_for_torch(self) -> bool:
        """Whether look() should be called again."""
        return self._on and not self._wrapped

    def look(self) -> None:
        """Wrap the methods if torch has been imported by now. Call it between install() and remove()."""
        if self.waits_for_torch:
            self._wrap()

    def remove(self) -> None:
        """Restore the methods. Idempotent."""
        self._on = False
        for name, theirs, ours in self._wrapped:
            if self._class.__dict__.get(name) is ours:
                setattr(self._class, name, theirs)
        self._wrapped = []
        self._sessions = {}

    @property
    def on(self) -> bool:
        """Whether it is between install() and remove(), and not in a forked child."""
        return self._on and self._pid == os.getpid()

    def state(self, kineto_is_ours: bool = False, started: bool = False) -> UserProfiler:
        """The current state of the program's own torch.profiler.

        kineto_is_ours: a session of our own makes Kineto active now, so only the marks count. started: the recording
        runs, so every session that began since has a mark, and stacks (which the sampler is reading) are not read.
        """
        if not self._begun() and (started or not self._begins()):
            active = False if kineto_is_ours else kineto_state.active()
            if active is None and not _enabled():
                return UserProfiler.UNKNOWN
            if active is False:
                return UserProfiler.IDLE
        return UserProfiler.RECORDING if _enabled() else UserProfiler.WARMING_UP

    def _begun(self) -> bool:
        for key, reference in list(self._sessions.items()):
            if reference() is None:
                self._sessions.pop(key, None)
        return bool(self._sessions)

    def _begins(self) -> bool:
        """Whether a thread is inside torch's method without having passed through ours."""
        return any(name == _PREPARE and _runs(getattr(theirs, "__code__", None)) for name, theirs, _ in self._wrapped)

    # ------------------------------------------------------------ the wrappers, on the program's threads

    def _enter(self, profile: Any) -> None:
        try:
            self._sessions[id(profile)] = weakref.ref(profile)
            if self.lock.acquire(timeout=LIMIT_S):
                try:
                    if self.on:
                        self._before()
                finally:
                    self.lock.release()
        except Exception:  # noqa: BLE001 - never into the program
            log_exception("the guard of torch.profiler failed before a session")

    def _leave(self, profile: Any) -> None:
        try:
            if self.on:
                self._sessions.pop(id(profile), None)
                self._after()
        except Exception:  # noqa: BLE001 - never into the program
            log_exception("the guard of torch.profiler failed after a session")

    def _wrap(self) -> None:
        module = sys.modules.get(_MODULE)
        found = getattr(module, "profile", None)
        methods = getattr(found, "__dict__", {})
        if _PREPARE not in methods or _EXIT not in methods:
            return
        self._class = found
        prepare, leave = methods[_PREPARE], methods[_EXIT]

        def _prepare_trace(profile: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return prepare(profile, *args, **kwargs)
            self._enter(profile)
            try:
                return prepare(profile, *args, **kwargs)
            except BaseException:
                self._leave(profile)
                raise

        def __exit__(profile: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return leave(profile, *args, **kwargs)
            finally:
                self._leave(profile)

        self._wrapped = [(_PREPARE, prepare, _prepare_trace), (_EXIT, leave, __exit__)]
        for name, theirs, ours in self._wrapped:
            ours.__doc__, ours.__wrapped__ = theirs.__doc__, theirs
            setattr(found, name, ours)


def _runs(code: Any) -> bool:
    """Whether any thread is inside this code. False if stacks cannot be read; then Kineto's state must suffice.

    Does not use sys._current_frames(): that visits the threads of all interpreters, and crashes in CPython 3.12 and
    3.13 if one of them has its own GIL.
    """
    if not isinstance(code, CodeType):
        return False
    try:
        from kineto_agent.sources.python import sampler_binding

        return sampler_binding.checked().runs(code)
    except (ImportError, SourceError):
        log_exception("the guard of torch.profiler cannot read stacks")
        return False


def _enabled() -> bool:
    """torch's own flag: false while a profiler only warms up."""
    return bool(getattr(sys.modules.get(_MODULE), "_is_profiler_enabled", False))
