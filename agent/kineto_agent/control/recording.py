"""The activity sources of one capture: prepare, announce, start, stop, count, close.

The failure of one source does not affect the others: as long as one records, the capture continues, and `problems` says
what is missing. Any exception of a source becomes a SourceError here.

If one of the sources cannot run beside the program's own torch.profiler, the guard (sources/torch/profiler_guard.py)
is installed from before the start until the sources have stopped. Once that profiler's state has been checked, its
start calls `give_way`, and a session that has given way before its start refuses to start: no lock is held while a
source starts. Except at exit, `give_way` is the only method that the program's threads call.

Iterations are recorded in addition to the sources, from the first one on: a process without iterations has no arena for
them. Data about the program's captured CUDA graphs and XLA modules is sent at the end, if GPU activities were recorded.
"""

import _thread
import sys
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set, Tuple

from kineto_agent.control.events import TORCH_PROFILER, Refusal
from kineto_agent.protocol import wire
from kineto_agent.protocol.records import CUPTI_FORMAT, TORCH_PROFILER_FORMAT
from kineto_agent.sources.interface import (
    SourceError,
    SourceOutcome,
    SourceRequest,
    SourceSession,
    Takeover,
    TellCall,
)
from kineto_agent.sources.registry import RecordingPlan, SourceChoice
from kineto_agent.sources.torch import graph_captures
from kineto_agent.sources.torch.profiler_guard import ProfilerGuard, UserProfiler
from kineto_agent.steps import step_marks
from kineto_agent.steps.counting import StepCounter
from kineto_agent.system.debuglog import log, log_exception

_NOT_OFFERED = "no source in this process can record it"
Announce = Callable[[wire.Arena, int], None]


class _Part(NamedTuple):
    name: str
    session: SourceSession


class IterationCounts(NamedTuple):
    """Counter of the program's iterations. wake: makes the agent call Recording.mark_iterations soon."""

    counter: StepCounter
    wake: Callable[[], None]


def _as_source_error(name: str, exc: Exception) -> SourceError:
    if isinstance(exc, SourceError):
        return SourceError(exc.reason_code, "%s: %s" % (name, exc.reason))
    log_exception("source %s failed" % name)
    return SourceError("SOURCE_FAILED", "%s: unexpected %s: %s" % (name, type(exc).__name__, exc))


class ProfilerInTheWay(Exception):
    """Nothing was announced or started: the program's own profiler is active. The text is for people."""


def source_request(choice: SourceChoice, wanted: wire.Start) -> SourceRequest:
    """The part of a request that concerns one source."""
    return SourceRequest(
        choice.activity_types,
        wanted.buffer_limit_bytes,
        wanted.options,
        named=bool(wanted.activity_types),
        gpu_drain_ms=wanted.gpu_drain_ms,
    )


def profiler_in_the_way(plan: RecordingPlan, request: wire.Start, guard: ProfilerGuard) -> str:
    """Why the recording could not start now because of the program's own profiler; "" if it could."""
    yielding = [choice.source.name for choice in plan.choices if _would_yield(choice, request)]
    state = guard.state() if yielding else UserProfiler.IDLE
    return _in_the_way(state, yielding) if state.active else ""


def _would_yield(choice: SourceChoice, request: wire.Start) -> bool:
    try:
        return choice.source.would_yield(source_request(choice, request))
    except Exception:  # noqa: BLE001 - its prepare() will say what is wrong
        log_exception("source %s" % choice.source.name)
        return False


def _in_the_way(state: UserProfiler, names: List[str]) -> str:
    text = "the program's own torch.profiler %s, and %s cannot record at the same time"
    return text % (state.value, " and ".join(names))


def _taken(session: SourceSession) -> Optional[Takeover]:
    ask: Optional[Callable[[], Optional[Takeover]]] = getattr(session, "taken", None)
    try:
        return ask() if ask is not None else None
    except Exception:  # noqa: BLE001 - stop() will say what is wrong
        log_exception("cannot determine which profiler has taken the library of a source")
        return None


class Recording:
    """Runs the sources of one capture. Used by the agent's thread."""

    def __init__(
        self,
        plan: RecordingPlan,
        request: wire.Start,
        guard: Optional[ProfilerGuard] = None,
        iterations: Optional[IterationCounts] = None,
        tell_call: TellCall = lambda _call, _since_ns: None,
    ) -> None:
        self._tell_call = tell_call
        self._plan = plan
        self._iterations = iterations  # None: not recorded, or no longer
        self._first_iteration = 1
        self._marks: Optional[step_marks.StepMarkSession] = None
        self._announcer: Announce = lambda _message, _descriptor: None
        self._request = request
        self._guard = ProfilerGuard(self.give_way) if guard is None else guard
        self._yielding: Tuple[_Part, ...] = ()  # parts that have to give way
        self.gave_way_ns = 0  # Unix ns; 0: has not
        self.gave_way_to = TORCH_PROFILER
        self._prepared: List[_Part] = []
        self._running: List[_Part] = []
        self._outcomes: Dict[str, SourceOutcome] = {}
        self._covered_ns: Dict[str, List[int]] = {}  # by source: start and end of its recording (Unix ns)
        self._failed: Dict[str, str] = {}  # by source that could not start: the reason
        self._hurried = False
        self._ended = _thread.allocate_lock()  # released once nothing is recording any more
        self._ended.acquire()
        self.problems = [Refusal(problem.reason_code, problem.reason) for problem in plan.problems]
        if plan.missing:
            self.problems.append(Refusal("ACTIVITY_TYPE_UNAVAILABLE", plan.cannot()))

    def start(self, announce: Announce) -> None:
        """Prepare, announce and start all sources. Raises SourceError if none records, and ProfilerInTheWay."""
        reason = profiler_in_the_way(self._plan, self._request, self._guard)
        if reason:
            raise ProfilerInTheWay(reason)
        for choice in self._plan.choices:
            self._prepare(choice)
        seen = [problem.reason for problem in self.problems if problem.reason_code == "USER_PROFILER_ACTIVE"]
        if seen:  # by a source
            self._close_prepared()
            raise ProfilerInTheWay(seen[0])
        yielding = [part for part in self._prepared if part.session.yields]
        if yielding:
            self._guard.install()
        with self._guard.lock:
            reason = self._in_the_way_now(yielding)
            if not reason:
                self._yielding = tuple(yielding)
        if reason:
            self._close_prepared()
            raise ProfilerInTheWay(reason)
        for part in list(self._prepared):
            self._announce(part, announce)
        for part in self._prepared:
            self._start(part)
        if not self._running:
            raise SourceError(self.problems[-1].reason_code, "; ".join(problem.reason for problem in self.problems))
        self._announcer = announce
        if self._iterations is not None:
            running = self._iterations.counter.count
            self._first_iteration = max(running, 1)
            if running < 0:
                self._iterations.counter.copy_after(1, self._iterations.wake)
        self.mark_iterations()

    def mark_iterations(self) -> None:
        """Record the iterations that have begun since the last call. Never raises."""
        if self._iterations is None or not self._running or self._iterations.counter.count < 0:
            return
        try:
            if self._marks is not None:
                self._marks.copy()
                return
            counter, wake = self._iterations.counter, self._iterations.wake
            limit = self._request.buffer_limit_bytes
            self._marks = step_marks.StepMarkSession(counter, self._first_iteration, wake, limit)
            if not self._join(_Part(step_marks.NAME, self._marks)):  # announcing it failed, which is noted
                self._iterations = None
        except Exception as exc:  # noqa: BLE001 - translated
            self._note(_as_source_error(step_marks.NAME, exc))
            self._iterations = None

    def _hand_over(self, name: str, make: Callable[[int], Optional[SourceSession]]) -> None:
        """Add a session that explains the recorded kernels. Never raises."""
        try:
            session = make(self._request.buffer_limit_bytes)
            if session is not None:
                self._join(_Part(name, session))
        except Exception as exc:  # noqa: BLE001 - translated
            self._note(_as_source_error(name, exc))

    def _join(self, part: _Part) -> bool:
        """Announce and start a session outside the plan. Returns whether it could be announced."""
        self._prepared.append(part)
        self._announce(part, self._announcer)
        announced = part in self._prepared
        if announced:
            self._start(part)
        return announced

    def _in_the_way_now(self, yielding: List[_Part]) -> str:
        state = self._guard.state() if yielding else UserProfiler.IDLE
        if state is UserProfiler.UNKNOWN:
            log("this torch does not report what its profiler is doing; assuming that it is idle")
        return _in_the_way(state, [part.name for part in yielding]) if state.active else ""

    def _prepare(self, choice: SourceChoice) -> None:
        name = choice.source.name
        try:
            request = source_request(choice, self._request)._replace(tell_call=self._tell_call)
            self._prepared.append(_Part(name, choice.source.prepare(request)))
        except Exception as exc:  # noqa: BLE001 - translated
            self._note_failure(name, exc)

    def _announce(self, part: _Part, announce: Announce) -> None:
        session = part.session
        try:
            announce(
                wire.Arena(self._request.capture_id, part.name, session.format, session.metadata), session.arena_fd
            )
        except Exception as exc:  # noqa: BLE001 - translated
            self._prepared.remove(part)
            self._note_failure(part.name, exc)
            session.close()

    def _start(self, part: _Part) -> None:
        try:
            part.session.start()
            self._covered_ns[part.name] = [time.time_ns(), 0]
            self._running.append(part)
        except Exception as exc:  # noqa: BLE001 - translated
            self._note_failure(part.name, exc)

    def give_way(self) -> None:
        """Yield to the program's own profiler, which is about to begin on this thread with the guard's lock held. Never
        raises.
        """
        parts, self._yielding = self._yielding, ()
        if not parts:
            return
        self.gave_way_ns = time.time_ns()
        for part in reversed(parts):  # as in stop()
            self._end(part, self.gave_way_ns)
            try:
                part.session.give_way()
            except Exception:  # noqa: BLE001 - never into the program
                log_exception("source %s failed to give way" % part.name)

    @property
    def needs_look(self) -> bool:
        """Whether look() should be called again."""
        return not self.gave_way_ns and any(hasattr(part.session, "taken") for part in self._running)

    def look(self) -> None:
        """Note a session that has ended by itself, in favour of another user of its vendor's library. Never raises."""
        for part in self._running:
            self._look_at(part)

    def _look_at(self, part: _Part) -> None:
        taken = _taken(part.session)
        if taken is not None:
            self._end(part, taken.time_ns)
        if taken is not None and not self.gave_way_ns:
            self.gave_way_ns = taken.time_ns
            self.gave_way_to = taken.profiler or "another profiler of the program (in %s)" % taken.who

    def hurry(self) -> None:
        """Skip work that is not needed because the process exits. Any thread; never raises."""
        self._hurried = True
        for part in list(self._running):
            hurry: Optional[Callable[[], None]] = getattr(part.session, "hurry", None)
            try:
                if hurry is not None:
                    hurry()
            except Exception:  # noqa: BLE001 - never into the program
                log_exception("source %s failed to hurry" % part.name)

    def _note(self, error: SourceError) -> None:
        self.problems.append(Refusal(error.reason_code, error.reason))

    def _note_failure(self, name: str, exc: Exception) -> None:
        error = _as_source_error(name, exc)
        self._failed[name] = error.reason
        self._note(error)

    def stop(self) -> None:
        """Stop every running source. Never raises."""
        self._note_unannounced()
        self.mark_iterations()
        if self._iterations is not None:
            self._iterations.counter.copy_after(None)
            self._iterations = None
        kernels = any(part.session.format == CUPTI_FORMAT for part in self._running)
        if kernels:
            self._hand_over(graph_captures.NAME, graph_captures.session)
        self._stop_running()
        if kernels and not self._hurried and "jax" in sys.modules:  # this takes longer: nothing records meanwhile
            from kineto_agent.sources.jax import hlo_modules

            self._hand_over(hlo_modules.NAME, hlo_modules.session)
            self._stop_running()
        self._yielding = ()
        self._guard.remove()
        if self._ended.locked():
            self._ended.release()

    def await_end(self, limit_s: float) -> bool:
        """Wait until nothing is recording any more. Returns False on timeout."""
        return self._ended.acquire(timeout=limit_s)

    def _stop_running(self) -> None:
        while self._running:
            part = self._running.pop()
            ended_ns = time.time_ns()
            try:
                outcome = self._outcomes[part.name] = part.session.stop()
                self._look_at(part)
                if outcome.incomplete:
                    self._note(SourceError("INCOMPLETE", "%s: %s" % (part.name, outcome.incomplete)))
            except Exception as exc:  # noqa: BLE001 - translated
                self._note(_as_source_error(part.name, exc))
            self._end(part, ended_ns)

    def _end(self, part: _Part, time_ns: int) -> None:
        """Note when a source ended, unless it had ended before."""
        covered = self._covered_ns.get(part.name)
        if covered is not None:  # it has begun
            covered[1] = covered[1] or time_ns

    def _note_unannounced(self) -> None:
        """Note a Kineto session that the guard could not see in advance, such as one requested through dynolog."""
        ours = any(part.session.format == TORCH_PROFILER_FORMAT for part in self._yielding)
        with self._guard.lock:
            seen = self._yielding and self._guard.state(kineto_is_ours=ours, started=True).active
        if seen:
            reason = (
                "Kineto began its own trace during the capture (requested through Dynolog or a file): either trace may "
                "lack events"
            )
            self.problems.append(Refusal("USER_PROFILER_STARTED", reason))

    def close(self) -> None:
        """Free the arenas. Never raises."""
        self.stop()
        self._close_prepared()

    def _close_prepared(self) -> None:
        while self._prepared:
            part = self._prepared.pop()
            try:
                part.session.close()
            except Exception:  # noqa: BLE001 - nobody left to tell
                log_exception("source %s cannot be closed" % part.name)

    # ------------------------------------------------------------ for the Result

    @property
    def problem(self) -> Optional[Refusal]:
        """All problems of this recording as one; None if there are none."""
        if not self.problems:
            return None
        return Refusal(self.problems[0].reason_code, "; ".join(problem.reason for problem in self.problems))

    def counts(self) -> Dict[str, Any]:
        """`wire.Result.sources`."""
        result: Dict[str, Any] = {}
        for name, outcome in self._outcomes.items():
            counts = outcome.counts._asdict()
            counts["metadata"] = {**outcome.metadata, "covered_ns": self._covered_ns[name]}
            result[name] = counts
        return result

    def not_recorded(self) -> Dict[str, str]:
        """`wire.Result.not_recorded`."""
        found = dict.fromkeys(self._plan.missing, self._plan.why or _NOT_OFFERED)
        recorded: Set[str] = set()
        for source, types in self._plan.choices:
            if source.name in self._failed:
                found.update(dict.fromkeys(types, self._failed[source.name]))
            else:
                recorded.update(types)
        return {name: why for name, why in found.items() if name not in recorded}

    def warnings(self) -> List[str]:
        """Warnings of all sources, for the user."""
        return [*self._plan.notes, *(warning for outcome in self._outcomes.values() for warning in outcome.warnings)]

    def cpu_ns(self) -> int:
        """CPU time of the sources' own threads."""
        return sum(outcome.cpu_ns for outcome in self._outcomes.values())

    def detach_ns(self) -> int:
        """The longest time until a vendor library was detached."""
        return max((outcome.detach_ns for outcome in self._outcomes.values()), default=0)
