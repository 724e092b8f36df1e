"""Lifecycle of a capture inside a process: Kineto's states as a pure transition table.

Theory of operation
    `Session.handle(event)` changes the state and returns the commands that the runner must carry out, in
    order. There is no I/O, thread or clock here: every event carries the time (Unix ns) at which it happened.

        WAIT_FOR_REQUEST --> WARMUP --> COLLECT --> PROCESS --> WAIT_FOR_REQUEST

    WAIT_FOR_REQUEST  nothing to do, or an accepted capture waits for its start time or iteration, or (if requested) for
                      the end of the program's own profiler
    WARMUP            the sources record, the window has not begun
    COLLECT           the sources record, the window is open
    PROCESS           the sources stop; then the daemon copies, until it releases the arenas

    The sources record from WARMUP on and the window is only a pair of times, so it is exact however late the agent's
    thread runs. An iteration window always has at least one iteration of warm-up: the sources must run before the first
    recorded iteration begins.

    No capture waits forever: if no iteration begins for `patience_ns`, the capture ends, or records by
    duration if requested. The same holds in a process that has never stepped.

    The program's own torch.profiler takes precedence. A capture that conflicts with it does not begin while it is
    active; a profiler that begins later ends the window, because the conflicting sources stop at that moment.

Rules
    A start request that does not repeat the id of the running capture is answered by exactly one Reject or
    Conclude, unless the link is lost. One capture at a time. A pair of state and event that is not in the table is
    ignored.
"""

from typing import Callable, Dict, List, Optional, Tuple, Type

from kineto_agent.control.events import (
    AgentEnding,
    AwaitProfiler,
    CancelRequested,
    Command,
    Conclude,
    Event,
    FreeSources,
    LinkLost,
    ProfilerActive,
    ProfilerIdle,
    Refusal,
    Reject,
    Released,
    ReportState,
    SessionState,
    SetTimer,
    SourcesFailed,
    SourcesGaveWay,
    SourcesStarted,
    SourcesStopped,
    StartRequested,
    StartSources,
    Stepped,
    StopSources,
    Tick,
    WatchStep,
)
from kineto_agent.protocol import wire

# Checks capture requests and derives their limits: pure functions. Times are Unix ns.
MAX_LATE_START_NS = 10_000_000_000  # as in Kineto: a start time further in the past is an error
WARMUP_SLACK_NS = 1_000_000_000  # a warm-up may lose this much: delivery takes milliseconds, not seconds
NO_STEP_NS = 60_000_000_000  # a loop without a new iteration for this long is evaluating, saving or hanging
NO_STEP_ITERATIONS = 20  # this many median iterations are added to NO_STEP_NS
OR_DURATION_ITERATIONS = 3  # iterations longer than --or-duration are no reason to give up on iterations
NEVER_STEPPED = (
    "this process has not finished an iteration yet, so none can be counted: ask for a duration, give a fallback "
    "(--or-duration 5s), wait for the first optimizer step, or call kineto_agent.step() once per iteration"
)
_S = 1_000_000_000


def problem_of(event: StartRequested) -> Optional[Refusal]:
    """Why this request can never be served as it stands, or None."""
    request = event.request
    if (request.duration_ns is None) == (request.iterations is None):
        return Refusal("INVALID_REQUEST", "a capture needs either a duration or a number of iterations")
    if request.duration_ns is not None and request.duration_ns <= 0:
        return Refusal("INVALID_REQUEST", "duration_ns is %d: it must be greater than 0" % request.duration_ns)
    if request.iterations is not None and request.iterations <= 0:
        return Refusal("INVALID_REQUEST", "iterations is %d: it must be greater than 0" % request.iterations)
    if request.or_duration_ns is not None and request.or_duration_ns <= 0:
        return Refusal("INVALID_REQUEST", "or_duration_ns is %d: it must be greater than 0" % request.or_duration_ns)
    for name in ("warmup_ns", "warmup_iterations", "iteration_roundup", "start_time_ns", "start_iteration"):
        value = getattr(request, name)
        if value is not None and value < 0:
            return Refusal("INVALID_REQUEST", "%s is %d: it must not be negative" % (name, value))
    if event.refusal is not None:
        return event.refusal
    if request.iterations is not None:
        return _never_stepped(event)
    return _start_time_past(request, event.now_ns)


def _never_stepped(event: StartRequested) -> Optional[Refusal]:
    if event.iteration >= 0 or event.request.or_duration_ns is not None or may_still_step(event):
        return None
    return Refusal("NEVER_STEPPED", NEVER_STEPPED)


def may_still_step(event: StartRequested) -> bool:
    """Whether the first iteration of this process may still come: its optimizers have not been watched for long."""
    return 0 <= event.now_ns - event.hooked_ns < patience_ns(event.request, event.step_ns)


def patience_ns(request: wire.Start, step_ns: int) -> int:
    """How long a capture by iteration waits for the next iteration. step_ns: median of the latest, 0 if unknown."""
    if request.or_duration_ns is None:
        return NO_STEP_NS + NO_STEP_ITERATIONS * step_ns
    return max(request.or_duration_ns, OR_DURATION_ITERATIONS * step_ns)


def instead_of_iterations(request: wire.Start) -> wire.Start:
    """The same capture by duration: or_duration_ns, which must be set."""
    return request._replace(
        duration_ns=request.or_duration_ns,
        iterations=None,
        start_iteration=None,
        iteration_roundup=0,
        warmup_iterations=0,
        or_duration_ns=None,
    )


def _start_time_past(request: wire.Start, now_ns: int) -> Optional[Refusal]:
    if request.start_time_ns == 0:
        return None
    late_ns = now_ns - request.start_time_ns
    if late_ns > MAX_LATE_START_NS:
        reason = "the start time was %.1f s ago when the request arrived: ask for a later one" % (late_ns / _S)
        return Refusal("START_TIME_PAST", reason)
    missing_ns = late_ns + request.warmup_ns
    if request.warmup_ns and missing_ns > WARMUP_SLACK_NS:
        return Refusal(
            "START_TIME_PAST",
            "the warm-up of %.3f s does not fit: it should have begun %.3f s before the request arrived; "
            "ask for a later start time or a shorter warm-up" % (request.warmup_ns / _S, missing_ns / _S),
        )
    return None


PROFILER_WAIT_NS = 3600_000_000_000  # for the program's own profiler; the daemon's limit is shorter by default
RELEASE_DEADLINE_NS = 60_000_000_000  # limits how long a capture that the daemon has forgotten keeps its memory


class _Capture:
    """State of the one capture."""

    def __init__(self, request: wire.Start, now_ns: int, step_ns: int) -> None:
        self.request = request
        self.requested_ns = now_ns
        self.patience_ns = patience_ns(request, step_ns)  # maximum wait for an iteration to begin
        self.patient_since_ns = now_ns
        self.awaits_step = False  # accepted, but the iteration of its warm-up has not begun
        self.begin_ns = now_ns  # timed: when the warm-up begins
        self.start_iteration = 0  # the first recorded one
        self.lead_iterations = max(request.warmup_iterations, 1)
        self.wait_end_ns = 0  # latest end of its wait for the program's own profiler; 0: it never waited
        self.recording = False  # the sources run
        self.collecting_ns = 0
        self.window_start_ns = 0
        self.window_end_ns = 0
        self.outcome = "done"
        self.reason_code = ""
        self.reason = ""
        self.link_lost = False
        self.concluded = False
        self.warnings: List[str] = []

    @property
    def end_iteration(self) -> int:
        return self.start_iteration + (self.request.iterations or 0)

    def end_as(self, outcome: str, reason_code: str, reason: str) -> None:
        self.outcome, self.reason_code, self.reason = outcome, reason_code, reason


def _round_up(iteration: int, multiple: int) -> int:
    return iteration if multiple <= 1 else -(-iteration // multiple) * multiple


def _not_reached(capture: _Capture, event: Tick) -> Tuple[str, str]:
    """Code and reason for a capture whose iterations do not begin."""
    if not event.stepped_ns:
        return "NEVER_STEPPED", NEVER_STEPPED
    return "ITERATIONS_NOT_REACHED", (
        "no iteration began for %g s (requested: %d, starting at iteration %d): the program may be evaluating, saving, "
        "hung or done with its loop; try again while it trains, or request a duration"
        % (capture.patience_ns / _S, capture.request.iterations or 0, capture.start_iteration)
    )


class Session:
    """The state machine. `state` and `capture_id` ("" if none) may be read at any time."""

    def __init__(self) -> None:
        self.state = SessionState.WAIT_FOR_REQUEST
        self._capture: Optional[_Capture] = None

    @property
    def capture_id(self) -> str:
        """The capture that makes this process busy, or ""."""
        return self._capture.request.capture_id if self._capture else ""

    def handle(self, event: Event) -> List[Command]:
        """Process one event and return the commands to carry out now, in order."""
        if isinstance(event, StartRequested):
            return self._start(event)
        if self._capture is None:
            return []
        transition = TABLE.get((self.state, type(event)))
        return transition(self, self._capture, event) if transition else []

    # ------------------------------------------------------------ accepting

    def _start(self, event: StartRequested) -> List[Command]:
        request = event.request
        if self._capture is not None:
            if request.capture_id == self.capture_id:
                return []
            reason = "capture %s is running in this process: wait until it ends, or cancel it" % self.capture_id
            return [Reject(request.capture_id, "BUSY", reason, self.capture_id)]
        problem = problem_of(event)
        if problem is not None:
            return [Reject(request.capture_id, problem.reason_code, problem.reason)]
        capture = self._capture = _Capture(request, event.now_ns, event.step_ns)
        if request.iterations is not None and event.iteration < 0:
            capture.patient_since_ns = event.hooked_ns
            if not may_still_step(event):
                self._record_instead(capture, "this process has not finished an iteration")
        if capture.request.iterations is not None:
            return self._accept_iterations(capture, event.now_ns, event.iteration, event.profiler)
        return self._accept_timed(capture, event.now_ns, event.profiler)

    def _accept_timed(self, capture: _Capture, now_ns: int, profiler: Optional[Refusal]) -> List[Command]:
        request = capture.request
        if request.start_time_ns:
            capture.begin_ns = request.start_time_ns - request.warmup_ns
        if capture.begin_ns <= now_ns:
            return self._begin(capture, now_ns, profiler)
        return [ReportState(request.capture_id, self.state, now_ns), SetTimer(capture.begin_ns)]

    def _accept_iterations(
        self, capture: _Capture, now_ns: int, iteration: int, profiler: Optional[Refusal]
    ) -> List[Command]:
        request = capture.request
        self._choose_iteration(capture, request.start_iteration, max(iteration, 0) + capture.lead_iterations)
        watched = capture.start_iteration - capture.lead_iterations
        if watched <= iteration:
            return self._begin(capture, now_ns, profiler)
        capture.awaits_step = True
        timer = SetTimer(capture.patient_since_ns + capture.patience_ns)
        return [ReportState(request.capture_id, self.state, now_ns), WatchStep(watched), timer]

    def _choose_iteration(self, capture: _Capture, wanted: Optional[int], earliest: int) -> None:
        late = wanted is not None and wanted < earliest
        start = earliest if wanted is None or late else wanted
        capture.start_iteration = _round_up(start, capture.request.iteration_roundup)
        if late:
            text = "iteration %d had already passed: recorded from iteration %d on"
            capture.warnings.append(text % (wanted, capture.start_iteration))

    # ------------------------------------------------------------ iterations that do not come

    def _check_progress(self, capture: _Capture, event: Tick) -> List[Command]:
        """If the next iteration is overdue, record by duration, if requested, or end the capture."""
        deadline_ns = max(capture.patient_since_ns, event.stepped_ns) + capture.patience_ns
        if event.now_ns < deadline_ns:
            return [SetTimer(deadline_ns)]
        if self.state is SessionState.COLLECT or capture.request.or_duration_ns is None:
            return self._ending(capture, AgentEnding(event.now_ns, *_not_reached(capture, event)))
        what = "no iteration began for %g s" % (capture.patience_ns / _S)
        self._record_instead(capture, what if event.stepped_ns else "this process has not finished an iteration")
        if self.state is SessionState.WAIT_FOR_REQUEST:
            return self._warm_up(capture, event.now_ns)
        capture.window_start_ns = event.now_ns
        return [WatchStep(None), *self._warmed(capture, event)]

    def _record_instead(self, capture: _Capture, why: str) -> None:
        """Switch the capture from an iteration window to a duration window."""
        before = capture.request
        capture.request = instead_of_iterations(before)
        text = "%s: recorded for %g s instead" % (why, (before.or_duration_ns or 0) / _S)
        capture.warnings.append(text + (", without the warm-up iterations" if before.warmup_iterations else ""))
        capture.awaits_step = False

    # ------------------------------------------------------------ the program's own profiler

    def _begin(self, capture: _Capture, now_ns: int, profiler: Optional[Refusal]) -> List[Command]:
        return self._warm_up(capture, now_ns) if profiler is None else self._wait(capture, now_ns, profiler.reason)

    def _profiler_active(self, capture: _Capture, event: ProfilerActive) -> List[Command]:
        return self._wait(capture, event.now_ns, event.reason)

    def _wait(self, capture: _Capture, now_ns: int, reason: str) -> List[Command]:
        """Wait for the end of the program's own profiler, or refuse the capture. Nothing has been announced yet."""
        request = capture.request
        self.state = SessionState.WAIT_FOR_REQUEST
        capture.awaits_step = False
        if request.start_time_ns:
            return self._refuse(
                capture, reason + "; a capture with a start time cannot wait: try again once the profiler is idle"
            )
        if not request.options.get("wait_for_user_profiler"):
            advice = "try again once it has finished, let the capture wait (--wait-for-user-profiler), or leave out"
            return self._refuse(capture, "%s; %s the activities that conflict with it" % (reason, advice))
        capture.wait_end_ns = capture.wait_end_ns or now_ns + PROFILER_WAIT_NS
        report = ReportState(request.capture_id, self.state, now_ns)
        return [WatchStep(None), report, AwaitProfiler(), SetTimer(capture.wait_end_ns)]

    def _refuse(self, capture: _Capture, reason: str) -> List[Command]:
        return [Reject(capture.request.capture_id, "USER_PROFILER_ACTIVE", reason), *self._free()]

    def _profiler_idle(self, capture: _Capture, event: ProfilerIdle) -> List[Command]:
        if not capture.wait_end_ns:
            return []
        if capture.request.iterations is not None:
            capture.patient_since_ns = event.now_ns
            return [SetTimer(None), *self._accept_iterations(capture, event.now_ns, event.iteration, None)]
        return self._warm_up(capture, event.now_ns)

    def _gave_way(self, capture: _Capture, event: SourcesGaveWay) -> List[Command]:
        if not capture.recording:
            return []
        self._cut_at_profiler(capture, event.time_ns, event.who)
        return self._process(capture, event.time_ns)

    def _cut_at_profiler(self, capture: _Capture, time_ns: int, who: str) -> None:
        """End the window at this time, unless it had already ended."""
        if 0 < capture.window_end_ns <= time_ns or capture.outcome in ("failed", "cancelled"):
            return
        text = who + " started during the capture, so the activities that conflict with it were stopped: "
        if 0 < capture.window_start_ns < time_ns:
            capture.window_end_ns = time_ns
            capture.end_as("partial", "USER_PROFILER_STARTED", text + "the window ends there")
        else:
            capture.window_start_ns = capture.window_end_ns = 0
            reason = text + "the window had not begun; try again once that profiler has finished"
            capture.end_as("failed", "USER_PROFILER_STARTED", reason)

    # ------------------------------------------------------------ towards the window

    def _warm_up(self, capture: _Capture, now_ns: int) -> List[Command]:
        self.state = SessionState.WARMUP
        report = ReportState(capture.request.capture_id, self.state, now_ns)
        return [SetTimer(None), WatchStep(None), report, StartSources(capture.request)]

    def _waited(self, capture: _Capture, event: Tick) -> List[Command]:
        if capture.awaits_step:
            return self._check_progress(capture, event)
        if capture.wait_end_ns:
            if event.now_ns < capture.wait_end_ns:
                return [SetTimer(capture.wait_end_ns)]
            text = "the program's own torch.profiler was still running after %d s; try again once it has finished"
            return self._refuse(capture, text % (PROFILER_WAIT_NS // _S))
        if event.now_ns < capture.begin_ns:
            return [SetTimer(capture.begin_ns)]
        return self._warm_up(capture, event.now_ns)

    def _stepped_to_warm_up(self, capture: _Capture, event: Stepped) -> List[Command]:
        return self._warm_up(capture, event.time_ns)

    def _sources_started(self, capture: _Capture, event: SourcesStarted) -> List[Command]:
        request = capture.request
        capture.recording = True
        if request.iterations is not None:
            if capture.start_iteration <= event.iteration:
                wanted = None if request.start_iteration is None else capture.start_iteration
                self._choose_iteration(capture, wanted, event.iteration + 1)
            capture.patient_since_ns = event.now_ns
            return [WatchStep(capture.start_iteration), SetTimer(event.now_ns + capture.patience_ns)]
        capture.window_start_ns = max(request.start_time_ns or event.now_ns + request.warmup_ns, event.now_ns)
        late_ns = event.now_ns - request.start_time_ns
        if request.start_time_ns and late_ns > 0:
            capture.warnings.append("recording began %.3f s after the requested start time" % (late_ns / _S))
        return self._warmed(capture, Tick(event.now_ns))

    def _warmed(self, capture: _Capture, event: Tick) -> List[Command]:
        if not capture.recording:
            return []
        if capture.request.duration_ns is None:
            return self._check_progress(capture, event)
        if event.now_ns < capture.window_start_ns:
            return [SetTimer(capture.window_start_ns)]
        capture.window_end_ns = capture.window_start_ns + capture.request.duration_ns
        return [*self._collect(capture, event.now_ns), SetTimer(capture.window_end_ns)]

    def _stepped_to_collect(self, capture: _Capture, event: Stepped) -> List[Command]:
        if not capture.recording:
            return []
        capture.window_start_ns = event.time_ns
        timer = SetTimer(event.time_ns + capture.patience_ns)
        return [*self._collect(capture, event.time_ns), WatchStep(capture.end_iteration), timer]

    def _collect(self, capture: _Capture, now_ns: int) -> List[Command]:
        self.state = SessionState.COLLECT
        capture.collecting_ns = now_ns
        return [ReportState(capture.request.capture_id, self.state, now_ns)]

    # ------------------------------------------------------------ towards the end

    def _collected(self, capture: _Capture, event: Tick) -> List[Command]:
        if capture.request.duration_ns is None:
            return self._check_progress(capture, event)
        if event.now_ns < capture.window_end_ns:
            return [SetTimer(capture.window_end_ns)]
        return self._process(capture, event.now_ns)

    def _stepped_to_process(self, capture: _Capture, event: Stepped) -> List[Command]:
        capture.window_end_ns = event.time_ns
        return self._process(capture, event.time_ns)

    def _process(self, capture: _Capture, now_ns: int) -> List[Command]:
        self.state = SessionState.PROCESS
        report = ReportState(capture.request.capture_id, self.state, now_ns)
        return [SetTimer(None), WatchStep(None), report, StopSources()]

    def _cut(self, capture: _Capture, now_ns: int) -> List[Command]:
        """End the capture before its window is complete; the window then ends now."""
        if self.state is SessionState.COLLECT:
            capture.window_end_ns = now_ns
        else:
            capture.window_start_ns = capture.window_end_ns = 0
        if self.state is SessionState.WAIT_FOR_REQUEST:
            return [SetTimer(None), WatchStep(None), *self._finish(capture, now_ns)]
        return self._process(capture, now_ns)

    def _cancel(self, capture: _Capture, event: CancelRequested) -> List[Command]:
        if event.capture_id != self.capture_id:
            return []
        keep = event.keep_partial and self.state is SessionState.COLLECT
        reason = "cancelled; the window is cut short" if keep else "cancelled"
        capture.end_as("partial" if keep else "cancelled", "CANCELLED", reason)
        return self._cut(capture, event.now_ns)

    def _ending(self, capture: _Capture, event: AgentEnding) -> List[Command]:
        keep = self.state is SessionState.COLLECT
        capture.end_as("partial" if keep else "failed", event.reason_code, event.reason)
        return self._cut(capture, event.now_ns)

    def _sources_failed(self, capture: _Capture, event: SourcesFailed) -> List[Command]:
        capture.end_as("failed", event.reason_code, event.reason)
        return self._cut(capture, event.now_ns)

    def _link_lost(self, capture: _Capture, event: LinkLost) -> List[Command]:
        capture.link_lost = True
        if self.state is SessionState.PROCESS:
            return self._free() if capture.concluded else []
        return self._cut(capture, event.now_ns)

    def _sources_stopped(self, capture: _Capture, event: SourcesStopped) -> List[Command]:
        if event.gave_way_ns:
            self._cut_at_profiler(capture, event.gave_way_ns, event.gave_way_to)
        return self._finish(capture, event.now_ns)

    def _finish(self, capture: _Capture, stopped_ns: int) -> List[Command]:
        if capture.link_lost:
            return self._free()
        capture.concluded = True
        conclude = Conclude(
            capture_id=capture.request.capture_id,
            outcome=capture.outcome,
            reason_code=capture.reason_code,
            reason=capture.reason,
            requested_ns=capture.requested_ns,
            collecting_ns=capture.collecting_ns,
            window_start_ns=capture.window_start_ns,
            window_end_ns=capture.window_end_ns,
            stopped_ns=stopped_ns,
            warnings=tuple(capture.warnings),
        )
        if capture.outcome in ("failed", "cancelled"):  # nothing that the daemon should copy
            return [conclude, *self._free()]
        return [conclude, SetTimer(stopped_ns + RELEASE_DEADLINE_NS)]

    def _released(self, capture: _Capture, event: Released) -> List[Command]:
        return self._free() if capture.concluded and event.capture_id == self.capture_id else []

    def _release_overdue(self, capture: _Capture, event: Tick) -> List[Command]:
        return self._free() if capture.concluded else []

    def _free(self) -> List[Command]:
        self.state = SessionState.WAIT_FOR_REQUEST
        self._capture = None
        return [SetTimer(None), FreeSources()]


_WAIT, _WARMUP = SessionState.WAIT_FOR_REQUEST, SessionState.WARMUP
_COLLECT, _PROCESS = SessionState.COLLECT, SessionState.PROCESS

TABLE: Dict[Tuple[SessionState, Type[object]], Callable[..., List[Command]]] = {
    # StartRequested is the one event that is also valid without a capture: see Session.handle.
    (_WAIT, Tick): Session._waited,
    (_WAIT, Stepped): Session._stepped_to_warm_up,
    (_WAIT, CancelRequested): Session._cancel,
    (_WAIT, SourcesFailed): Session._sources_failed,
    (_WAIT, LinkLost): Session._link_lost,
    (_WAIT, AgentEnding): Session._ending,
    (_WAIT, ProfilerIdle): Session._profiler_idle,
    (_WARMUP, SourcesStarted): Session._sources_started,
    (_WARMUP, SourcesFailed): Session._sources_failed,
    (_WARMUP, Tick): Session._warmed,
    (_WARMUP, Stepped): Session._stepped_to_collect,
    (_WARMUP, CancelRequested): Session._cancel,
    (_WARMUP, LinkLost): Session._link_lost,
    (_WARMUP, AgentEnding): Session._ending,
    (_WARMUP, ProfilerActive): Session._profiler_active,
    (_WARMUP, SourcesGaveWay): Session._gave_way,
    (_COLLECT, Tick): Session._collected,
    (_COLLECT, Stepped): Session._stepped_to_process,
    (_COLLECT, SourcesFailed): Session._sources_failed,
    (_COLLECT, CancelRequested): Session._cancel,
    (_COLLECT, LinkLost): Session._link_lost,
    (_COLLECT, AgentEnding): Session._ending,
    (_COLLECT, SourcesGaveWay): Session._gave_way,
    (_PROCESS, SourcesStopped): Session._sources_stopped,
    (_PROCESS, Released): Session._released,
    (_PROCESS, Tick): Session._release_overdue,
    (_PROCESS, LinkLost): Session._link_lost,
}
