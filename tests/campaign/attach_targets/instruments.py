"""Targets that look at themselves: with tracers, profilers, monitoring tools and audit hooks. Each must see its own."""

import cProfile
import pstats
import sys
import threading
from typing import Any, Callable, Dict, List

from campaign.attach_targets.control import Target, must_be
from campaign.attach_targets.loops import Loop, python_work

MOST_FOREIGN = 20


class Seen:
    """Events of code that is not the program's: its file is called <this>, or it runs on a thread of another's."""

    def __init__(self) -> None:
        self._main = threading.get_ident()
        self.foreign: List[str] = []

    def code(self, code: Any, what: str) -> None:
        """Counts an event of this code object."""
        named = code.co_filename.startswith("<") and not code.co_filename.startswith("<frozen")
        if (named or threading.get_ident() != self._main) and len(self.foreign) < MOST_FOREIGN:
            self.foreign.append("%s %s %s" % (what, code.co_filename, code.co_name))


class _Watched(Loop):
    """The work, under an instrument that is never taken away."""

    def __init__(self) -> None:
        self.seen = Seen()
        super().__init__(python_work)

    def close(self) -> None:
        must_be("what the program's instrument saw", self.seen.foreign, [])


class Traced(_Watched):
    """sys.setprofile or sys.settrace, and threading's for new threads; `everywhere`: all threads there are (3.12)."""

    def __init__(self, name: str, everywhere: str = "") -> None:
        super().__init__()
        getattr(threading, name)(self._event)
        getattr(sys, name)(self._event)
        self._everywhere = getattr(threading, everywhere, None)

    def _event(self, frame: Any, event: str, argument: Any) -> Any:
        self.seen.code(frame.f_code, event)
        return self._event

    def lap(self) -> None:
        super().lap()
        if self._everywhere is not None:
            self._everywhere(self._event)


class Monitored(_Watched):
    """All events of sys.monitoring, as a debugger uses them."""

    def __init__(self) -> None:
        super().__init__()
        monitoring: Any = getattr(sys, "monitoring", None)
        if monitoring is None:
            return
        events = monitoring.events
        monitoring.use_tool_id(monitoring.DEBUGGER_ID, "debugger")
        for name in ("PY_START", "PY_RESUME", "PY_RETURN", "PY_YIELD", "CALL", "LINE", "JUMP", "RAISE", "PY_UNWIND"):
            monitoring.register_callback(monitoring.DEBUGGER_ID, getattr(events, name), self._event)
        wanted = events.PY_START | events.PY_RESUME | events.PY_RETURN | events.CALL | events.RAISE | events.PY_UNWIND
        monitoring.set_events(monitoring.DEBUGGER_ID, wanted | events.LINE)

    def _event(self, code: Any, *_arguments: Any) -> None:
        if sys is not None and not sys.is_finalizing():
            threading.current_thread()  # as debuggers ask: a thread that threading does not know becomes a Dummy
            self.seen.code(code, "event")


class Profiled(Loop):
    """cProfile, switched on all the time."""

    def __init__(self) -> None:
        super().__init__(python_work)
        self._profile = cProfile.Profile()
        self._profile.enable()

    def close(self) -> None:
        self._profile.disable()
        files = {str(entry[0]) for entry in pstats.Stats(self._profile).stats}  # type: ignore[attr-defined]
        must_be("what cProfile lists", sorted(file for file in files if "kineto" in file or file[:2] == "<s"), [])


class Vetoed(Loop):
    """An audit hook that allows nothing of what it is told of, but to the program's own thread."""

    def __init__(self, *events: str) -> None:
        super().__init__(python_work)
        main = threading.get_ident()
        self._events = events

        def hook(event: str, _arguments: Any) -> None:
            if event in events and (threading.get_ident() != main or events[0] == "compile"):
                raise RuntimeError("the program allows no " + event)

        self._hook = hook
        super().lap()
        sys.addaudithook(hook)


class AtTheLimit(Target):
    """Works where one call more would be too deep."""

    def __init__(self) -> None:
        self._limit = sys.getrecursionlimit()

    def _deep(self) -> int:
        try:
            return self._deep()
        except RecursionError:
            number = 0
            while number < 20000:
                number += 1
            return number

    def lap(self) -> None:
        must_be("the sum at the limit", self._deep(), 20000)
        must_be("the recursion limit", sys.getrecursionlimit(), self._limit)


VETOES = {
    "veto_compile": ("compile", "exec"),
    "veto_exec": ("exec",),
    "veto_import": ("import", "marshal.loads", "open"),
}
KINDS: Dict[str, Callable[[], Target]] = {
    "profile": lambda: Traced("setprofile"),
    "trace": lambda: Traced("settrace"),
    "profile_all": lambda: Traced("setprofile", "setprofile_all_threads"),
    "trace_all": lambda: Traced("settrace", "settrace_all_threads"),
    "monitoring": Monitored,
    "cprofile": Profiled,
    "at_the_limit": AtTheLimit,
    **{kind: (lambda events=events: Vetoed(*events)) for kind, events in VETOES.items()},  # type: ignore[misc]
}
