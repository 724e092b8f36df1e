"""The thread of one plug-in: every call of its code runs there, and callers wait until a deadline.

Theory of operation
    A plug-in's code may hang, raise anything or end its thread. So the agent's thread does not run it: `call` hands a
    function to the worker's thread and waits. If the answer does not come in time, the plug-in is abandoned for the
    rest of the process: it is never called again, and later calls fail at once.

    A thread cannot be killed. If it runs Python code, it gets a SystemExit; if it waits in C, it stays there, which
    costs the program only its stack. If a call returns after it was abandoned, `late` undoes its effect: otherwise the
    vendor's library would continue to record for nobody.

    The thread begins with the first call and ends IDLE_S after the last, unless a recording is open (`keep`): start and
    stop of a vendor's library may have to come from the same thread.

Threads: `call` on the agent's, `begin` also on a program's thread that begins its own profiler (give_way).
"""

import _thread
import contextlib
from collections import deque
from typing import Any, Callable, Deque, Dict, List, Optional, Tuple

from kineto_agent.sources.interface import SourceError
from kineto_agent.system.c_functions import Long, program_function
from kineto_agent.system.debuglog import log, log_exception
from kineto_agent.system.threads import Thread, start_thread

# How long a plug-in may take for each call, in seconds. Milliseconds are usual.
#
# An abandoned plug-in stays abandoned: these limits suit a machine on which far more threads want a CPU than there are.
LOAD_S = ASK_S = PREPARE_S = START_S = STOP_S = CLOSE_S = GIVE_WAY_S = 5.0
GIVE_WAY_WAIT_S = 0.02  # part of that for which the program's thread waits


IDLE_S = 1.0
_MAX_TEXT_CHARS = 200
# looked up now: a program's thread may have to abandon a call
_raise_in = program_function("PyThreadState_SetAsyncExc")


class PluginViolation(Exception):
    """A plug-in returned something that the interface does not allow; the message says what."""


class Call:
    """One function to call on the worker's thread."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self.done = _thread.allocate_lock()
        self.done.acquire()
        self.finished = False
        self.result: Any = None
        self.error: Optional[Tuple[str, str]] = None  # code and text of a SourceError

    def run(self) -> None:
        """Call it, on the worker's thread."""
        try:
            self.result = self._function()
        except BaseException as exc:  # noqa: BLE001 - whatever it is, the program must not see it
            self.error = _described(exc)
        finally:
            self.finished = True
            self.done.release()

    def wait(self, limit_s: float) -> bool:
        """Whether it has returned within that time."""
        return self.finished or self.done.acquire(timeout=limit_s)

    def fail(self, code: str, text: str) -> None:
        """Fail it before it has run."""
        self.error = (code, text)
        self.finished = True
        self.done.release()


def _described(exc: BaseException) -> Tuple[str, str]:
    try:
        text = str(exc)[:_MAX_TEXT_CHARS]
        if type(exc) is SourceError:
            return "PLUGIN_DECLINED", str(exc.reason)[:_MAX_TEXT_CHARS]
        if type(exc) is PluginViolation:
            return "PLUGIN_INVALID", text
        log_exception("a plug-in raised")
    except BaseException:  # noqa: BLE001 - its __str__ may raise too
        text = "an exception without a message"
    return "PLUGIN_FAILED", "raised %s: %s" % (type(exc).__name__[:80], text)


class PluginWorker:
    """Runs the calls of one plug-in."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.given_up = ""  # why it is no longer called
        self.late: Callable[[], None] = lambda: None  # runs on the worker's thread after a call that returned too late
        self._lock = _thread.allocate_lock()
        self._arrived = _thread.allocate_lock()  # held while there is no new call
        self._arrived.acquire()
        self._calls: Deque[Call] = deque()
        self._thread: Optional[Thread] = None
        self._running: Optional[Call] = None
        self._kept = False

    def call(self, what: str, function: Callable[[], Any], deadline_s: float) -> Any:
        """Returns the function's result. what: name of the call, for people. Raises SourceError and nothing else."""
        return self.result(self.begin(function), what, deadline_s)

    def begin(self, function: Callable[[], Any]) -> Call:
        """Start the call without waiting for it. Raises SourceError."""
        call = Call(function)
        try:
            with self._lock:
                if not self.given_up:
                    self._calls.append(call)
                    if self._thread is None:
                        self._thread = start_thread("kineto-plugin", self._main)
        except RuntimeError as exc:
            self._calls.clear()
            raise SourceError("NO_THREAD", "cannot start a thread for its plug-in: %s" % exc) from exc
        if self.given_up:
            raise SourceError("PLUGIN_TIMEOUT", self.given_up)
        self._wake()
        return call

    def result(self, call: Call, what: str, deadline_s: float) -> Any:
        """Waits for the result of a call that has begun; see `call`."""
        if not call.wait(deadline_s):
            self._give_up(call, what, deadline_s)
        if call.error is not None:
            code, text = call.error
            raise SourceError(code, "%s: %s" % (what, text))
        return call.result

    def keep(self, kept: bool) -> None:
        """Keep the thread while a recording is open."""
        self._kept = kept
        self._wake()

    def interrupt(self) -> None:
        """Raise SystemExit in an abandoned call that still runs Python code."""
        running, thread = self._running, self._thread
        if not self.given_up or running is None or running.finished or thread is None:
            return
        _raise_in(Long(thread.ident), Long(id(SystemExit)))

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has already been released
            self._arrived.release()

    def _give_up(self, call: Call, what: str, deadline_s: float) -> None:
        """Abandon the plug-in, unless the call has just returned."""
        with self._lock:
            if call.finished:
                return
            text = "did not return within %g s; this plug-in is not used again in this process" % deadline_s
            self.given_up = self.given_up or "%s %s" % (what, text)
            while self._calls:
                self._calls.popleft().fail("PLUGIN_TIMEOUT", self.given_up)
        log("plug-in %s: %s", self.name, self.given_up)
        self.interrupt()
        if call.error is None:
            call.error = ("PLUGIN_TIMEOUT", text)

    # ------------------------------------------------------------ the worker's thread

    def _main(self) -> None:
        try:
            self._work()
        except BaseException:  # noqa: BLE001 - a SystemExit that came when the call had just returned
            log_exception("plug-in %s" % self.name)
        if self.given_up:
            log("plug-in %s: the abandoned call has ended", self.name)
            self.late()

    def _work(self) -> None:
        while not self.given_up:
            with self._lock:
                call = self._running = self._calls.popleft() if self._calls else None
            if call is not None:
                call.run()
                del call
            elif not self._arrived.acquire(timeout=-1 if self._kept else IDLE_S):
                with self._lock:
                    if not self._calls and not self._kept:
                        self._thread = None
                        return


def plain_strings(value: Any, most: int, what: str) -> List[str]:
    """Copies a list of at most `most` strings. Runs on the worker's thread. Raises PluginViolation."""
    found: List[str] = []
    for each in value:
        if type(each) is not str or len(each) > _MAX_TEXT_CHARS:
            raise PluginViolation("returned %s that are not short strings" % what)
        if len(found) == most:
            raise PluginViolation("returned more than %d %s" % (most, what))
        found.append(each)
    return found


def plain_int(value: Any, what: str) -> int:
    """An integer from 0 to 2^63 - 1. Raises PluginViolation."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise PluginViolation("returned %.60r as %s, which must be a non-negative integer" % (value, what))
    return value


def plain_json(value: Any, most_bytes: int, what: str) -> Dict[str, Any]:
    """A copy of a JSON object. Raises PluginViolation."""
    import json

    try:
        text = json.dumps(value, allow_nan=False)
        found: Any = json.loads(text)
    except (TypeError, ValueError, RecursionError) as exc:
        raise PluginViolation("returned %s that are not JSON: %s" % (what, exc)) from exc
    if type(found) is not dict or len(text) > most_bytes:
        raise PluginViolation("returned %s that are not a JSON object of at most %d bytes" % (what, most_bytes))
    return found
