"""The agent: one thread that connects the link, the session and the sources.

Theory of operation
    The thread "kineto-agent" blocks in poll(2) on the daemon's socket and on a pipe, without a timeout unless a capture
    has a deadline or no daemon is connected. The pipe is written by the training thread (an awaited iteration has
    begun) and by `stop`. Everything that happens becomes an event for the pure session; its commands are carried out
    here, in order, and may produce further events.

Rules
    Nothing escapes into the program: an exception ends the capture with a Result "failed", goes to the debug
    log, and the agent continues without a link until the next connection attempt. A forked child has no agent: it
    closes the inherited descriptors (otherwise the daemon would not see the parent's end) and may call start() itself.
    An attached agent ends with its link; its thread calls `on_end` last. At exit a running capture is stopped and its
    Result sent; the exit waits only briefly (`exit`).
"""

import contextlib
import os
import select
import time
from collections import deque
from typing import Any, Callable, Deque, Dict, List, Optional, Sequence, Tuple

from kineto_agent.control import events, program_settings, self_description
from kineto_agent.control.link import Link, LinkClosed, StandingCall
from kineto_agent.control.recording import IterationCounts, ProfilerInTheWay, Recording, profiler_in_the_way
from kineto_agent.control.session import Session
from kineto_agent.protocol import wire
from kineto_agent.sources import registry
from kineto_agent.sources.interface import Source, SourceError
from kineto_agent.sources.plugins.installed import PLUGINS
from kineto_agent.sources.torch.graph_captures import CAPTURES
from kineto_agent.sources.torch.profiler_guard import ProfilerGuard
from kineto_agent.steps.counting import StepCounter, least_step_ratio, median_ns, step_ratio
from kineto_agent.system import descriptors, env
from kineto_agent.system.debuglog import log, log_exception
from kineto_agent.system.descriptors import close_ours, identity
from kineto_agent.system.gil_turns import Turns
from kineto_agent.system.threads import Thread, start_thread, thread_names

EXIT_TIMEOUT_S = 2.0  # for a stopped agent
EXIT_WAIT_S, EXIT_SOURCES_S = 0.01, 0.5  # for the thread, and for sources still recording: usually 1 to 10 ms
_LOOK_PERIOD_NS = 100_000_000  # how often the program's profiler is polled, while a capture waits for it or for torch
_MAX_POLL_MS = 3_600_000  # poll takes an int
_MAX_THREADS = 400  # thread names in a Result: 64 characters each stay far below the frame limit
_MAX_WARNINGS = 32
_MAX_WARNING_CHARS = 300
_MAX_FAILURES_IN_A_ROW = 10


def _clock_ahead_ns() -> int:
    """Offset of Unix time from the monotonic clock, from the fastest of several readings: the thread may be
    descheduled.
    """
    found = []
    for _ in range(5):
        before_ns, unix_ns, after_ns = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        found.append((after_ns - before_ns, unix_ns - (before_ns + after_ns) // 2))
    return min(found)[1]


class Agent:
    """The agent of this process. `start`, `stop` and `abandon` are for the program's threads."""

    def __init__(
        self,
        counter: StepCounter,
        candidates: Callable[[], Sequence[str]] = env.agent_socket_candidates,
        sources: Callable[[], List[Source]] = registry.sources,
        link: Optional[Link] = None,
        on_end: Callable[[], None] = lambda: None,
        turns: Optional[Turns] = None,
    ) -> None:
        self.turns = Turns() if turns is None else turns
        self._counter = counter
        self._sources = sources
        self._link = Link(candidates) if link is None else link
        self._adopted = link is not None  # already connected: the daemon waits for a Hello
        self._on_end = on_end
        self._session = Session()
        self._recording: Optional[Recording] = None
        self._plan: Optional[registry.RecordingPlan] = None
        self._guard = ProfilerGuard()
        self._awaits_profiler = self._told_of_profiler = False
        self._events: Deque[events.Event] = deque()
        self._handling = False
        self._deadline_ns: Optional[int] = None  # Unix ns
        self._watched: Optional[int] = None  # an iteration
        self._wake_reader, self._wake_writer = descriptors.pipe()
        self._pipe_identity = identity(self._wake_reader)  # both ends have the same
        self._thread: Optional[Thread] = None
        self._stop: Optional[events.Refusal] = None  # reason for the requested end
        self._cpu_base_ns = 0
        self._steps_before_ns: List[int] = []  # durations of earlier iterations
        self._settings: Dict[str, program_settings.Value] = {}  # of the program, at the start of the capture
        self._ahead_ns = _clock_ahead_ns()
        self._call = StandingCall(lambda: (self._session.capture_id, self._session.state.value), self._send)

    # ------------------------------------------------------------ the program's threads

    def start(self) -> None:
        """Start the thread. Raises RuntimeError."""
        try:
            self.turns.begin()
            self._thread = start_thread("kineto-agent", self._main)
        except BaseException:  # a signal's handler may raise anything
            self.turns.end()
            raise

    def work(self) -> Callable[[], None]:
        """Return, instead of `start`, the function that an existing thread of ours runs until the agent has ended."""
        thread = self._thread = Thread("kineto-agent")
        return lambda: thread.run(self._main)

    @property
    def alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def at_work(self) -> bool:
        """Whether the thread has begun and not ended."""
        return self._thread is not None and self._thread.ident != 0 and self._thread.is_alive()

    def stop(self, reason_code: str, reason: str, timeout_s: float = EXIT_TIMEOUT_S) -> None:
        """End the agent; a running capture ends with the data it has. Waits briefly for the thread."""
        if self._thread is None:
            return
        self._stop = events.Refusal(reason_code, reason)
        self.wake()
        self._thread.join(timeout_s)

    def exit(self) -> None:
        """End the agent because the process exits on this thread. Recorded data is safe in shared memory."""
        recording = self._recording
        self.turns.end()
        if recording is not None:
            recording.hurry()
        self.stop("TARGET_EXITING", "the process exited before the capture was complete", EXIT_WAIT_S)
        if recording is not None and self.alive and recording.await_end(EXIT_SOURCES_S) and self._thread is not None:
            self._thread.join(EXIT_WAIT_S)

    def abandon(self) -> None:
        """Close the link in a forked child. The agent is of no further use; the sources clean up by themselves."""
        self._thread = None
        self._counter.watch(None)
        self._counter.copy_after(None)
        self._link.abandon()
        self._close_pipe()

    def wake(self) -> None:
        """Make the agent's thread check everything soon. Any thread."""
        with contextlib.suppress(OSError):  # full: the thread will wake anyway
            if identity(self._wake_writer) == self._pipe_identity:
                os.write(self._wake_writer, b"\0")

    # ------------------------------------------------------------ the agent's thread

    def _main(self) -> None:
        failures = 0
        try:
            self.turns.runs()
            while self._stop is None and not self._link.ended and failures < _MAX_FAILURES_IN_A_ROW:
                try:
                    self._turn()
                    failures = 0
                except Exception as exc:  # noqa: BLE001 - never into the program
                    failures += 1
                    log_exception("agent")
                    self._recover(exc)
            self._finish()
        except Exception:  # noqa: BLE001 - never into the program
            log_exception("the agent failed while it was ending")
        finally:
            self._on_end()

    def _turn(self) -> None:
        """Wait for the next input or timer and handle it."""
        if self._adopted:
            self._adopted = False
            self._send(self._hello())
        if not self._link.connected and time.monotonic_ns() >= self._link.retry_at_ns:
            self._connect()
        cuda_comes = CAPTURES.look()
        for descriptor, mask in self._poll(self._timeout_ms(cuda_comes)):
            if descriptor == self._wake_reader:
                self._woken(mask)
            else:
                self._link_ready(mask)
        self._check_profiler()
        if self._recording is not None:
            self._recording.mark_iterations()
        self._call.look()
        self._check_timer()
        self._check_step()

    def _poll(self, timeout_ms: Optional[int]) -> List[Tuple[int, int]]:
        wanted = [(self._wake_reader, select.POLLIN)]
        if self._link.connected:
            wanted.append((self._link.fileno(), select.POLLIN | (select.POLLOUT if self._link.wants_write else 0)))
        return self.turns.poll(wanted, timeout_ms)

    def _timeout_ms(self, looks: bool) -> Optional[int]:
        waits_ns = []
        if not self._link.connected:
            waits_ns.append(self._link.retry_at_ns - time.monotonic_ns())
        if self._deadline_ns is not None:
            waits_ns.append(self._deadline_ns - self._now_ns())
        looks = looks or self._call.stands or (self._recording is not None and self._recording.needs_look)
        if self._awaits_profiler or self._guard.waits_for_torch or looks:
            waits_ns.append(_LOOK_PERIOD_NS)
        if not waits_ns:
            return None
        return min(max(-(-min(waits_ns) // 1_000_000), 0), _MAX_POLL_MS)

    def _woken(self, mask: int) -> None:
        if mask != select.POLLIN or identity(self._wake_reader) != self._pipe_identity:
            self._stop = events.Refusal("AGENT_STOPPED", "the program closed the agent's descriptors")
            log(self._stop.reason)
            return
        os.read(self._wake_reader, 4096)

    def _check_profiler(self) -> None:
        recording = self._recording
        if recording is not None and not self._told_of_profiler:
            recording.look()
            if recording.gave_way_ns:
                self._told_of_profiler = True
                self._handle(events.SourcesGaveWay(recording.gave_way_ns, recording.gave_way_to))
        if self._awaits_profiler and not self._guard.state().active:
            self._awaits_profiler = False
            self._handle(events.ProfilerIdle(self._now_ns(), self._counter.count))
        self._guard.look()

    def _check_timer(self) -> None:
        now_ns = self._now_ns()
        if self._deadline_ns is not None and now_ns >= self._deadline_ns:
            self._deadline_ns = None
            self._handle(events.Tick(now_ns, self._counter.time_of(self._counter.count)))

    def _check_step(self) -> None:
        if self._watched is not None and self._counter.count >= self._watched:
            watched, self._watched = self._watched, None
            self._handle(events.Stepped(self._counter.count, self._counter.time_of(watched) or self._now_ns()))

    def _finish(self) -> None:
        """The end of the thread."""
        if self._stop is not None:
            self._handle(events.AgentEnding(self._now_ns(), self._stop.reason_code, self._stop.reason))
        self._flush(time.monotonic() + EXIT_TIMEOUT_S / 2)
        self._link.close("the agent ends")
        if self._watched is not None:  # otherwise the watch may belong to another agent, after this one ended late
            self._counter.watch(None)
        self._free()
        self._close_pipe()

    def _flush(self, deadline: float) -> None:
        while self._link.connected and self._link.wants_write and time.monotonic() < deadline:
            poller = select.poll()
            poller.register(self._link.fileno(), select.POLLOUT)
            poller.poll(max(int((deadline - time.monotonic()) * 1000), 0))
            self._guarded(self._link.flush)

    def _recover(self, exc: Exception) -> None:
        """Report an error of our own to the daemon, then start over."""
        text = "error in the agent: %s: %s" % (type(exc).__name__, exc)
        self._events.clear()
        self._handling = False
        try:
            self._handle(events.SourcesFailed(self._now_ns(), "AGENT_ERROR", text))
            self._link.close(text)
            self._handle(events.LinkLost(self._now_ns()))
        finally:
            self._session = Session()
            self._deadline_ns = self._watched = None
            self._free()

    def _close_pipe(self) -> None:
        close_ours(self._wake_reader, self._pipe_identity)
        close_ours(self._wake_writer, self._pipe_identity)

    # ------------------------------------------------------------ the link

    def _connect(self) -> None:
        if self._link.connect():
            self._send(self._hello())
            self._call.tell_again()

    def _hello(self) -> wire.Hello:
        offers = registry.offers(self._sources())
        count, (iteration_ns, stalled_ns) = self._counter.count, self._counter.pace_ns()
        return self_description.hello(
            offers, count, self._session.capture_id, iteration_ns=iteration_ns, stalled_ns=stalled_ns
        )

    def _link_ready(self, mask: int) -> None:
        if mask & select.POLLOUT:
            self._guarded(self._link.flush)
        if mask & ~select.POLLOUT and self._link.connected:
            self._guarded(self._receive)

    def _receive(self) -> None:
        message = self._link.receive()
        if message is not None:
            self._dispatch(message)

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except LinkClosed:
            self._handle(events.LinkLost(self._now_ns()))

    def _send(self, message: wire.Message, descriptors: Sequence[int] = ()) -> None:
        self._guarded(lambda: self._link.send(message, descriptors))

    def _now_ns(self) -> int:
        """Unix ns that advance steadily once the sources have started: setting the clock does not change a window."""
        return self._ahead_ns + time.monotonic_ns()

    def _dispatch(self, message: wire.Message) -> None:
        if not self._session.capture_id:
            self._ahead_ns = _clock_ahead_ns()
        now_ns = self._now_ns()
        if isinstance(message, wire.Start):
            self._start_requested(message, now_ns)
        elif isinstance(message, wire.Cancel):
            self._handle(events.CancelRequested(message.capture_id, message.keep_partial, now_ns))
        elif isinstance(message, wire.Release):
            self._handle(events.Released(message.capture_id))
        elif isinstance(message, wire.Describe):
            self._send(self._hello())
        elif isinstance(message, wire.Welcome):
            log("kinetod %s accepted the connection", message.daemon_version)
            self._link.welcomed()
            PLUGINS.withdraw()
        elif isinstance(message, wire.Plugins):
            PLUGINS.take(self._link.descriptor(), message.digest)
        elif isinstance(message, wire.Refuse):
            self._link.refuse(message.reason)
        else:
            self._link.close("the daemon sent an unexpected %s" % type(message).__name__)
            self._handle(events.LinkLost(now_ns))

    def _start_requested(self, request: wire.Start, now_ns: int) -> None:
        refusal = profiler = None
        if not self._session.capture_id:
            self._cpu_base_ns = time.thread_time_ns()
            since_ns = max(self._counter.undisturbed_ns, self._counter.hooked_ns)
            self._steps_before_ns = self._counter.durations_ns(since_ns, now_ns)
            try:
                self._plan = registry.choose(self._sources(), request.activity_types, request.options)
                self._guard = ProfilerGuard(self._profiler_begins, self.wake)
                reason = profiler_in_the_way(self._plan, request, self._guard)
                profiler = events.Refusal("USER_PROFILER_ACTIVE", reason) if reason else None
            except SourceError as exc:
                refusal = events.Refusal(exc.reason_code, exc.reason)
        counter = self._counter
        started = events.StartRequested(request, now_ns, counter.count, refusal, profiler)
        step_ns = median_ns(counter.durations_ns(0, now_ns))
        self._handle(started._replace(hooked_ns=counter.hooked_ns, step_ns=step_ns))

    # ------------------------------------------------------------ the session's commands

    def _handle(self, event: events.Event) -> None:
        """Pass an event to the session and carry out its commands, until no events are left."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                for command in self._session.handle(self._events.popleft()):
                    _CARRY_OUT[type(command)](self, command)
        finally:
            self._handling = False

    def _start_sources(self, command: events.StartSources) -> None:
        assert self._plan is not None
        self._settings = program_settings.program_settings(self._counter.steppers())
        self._told_of_profiler = False
        self._ahead_ns = _clock_ahead_ns()
        iterations = IterationCounts(self._counter, self.wake)
        recording = self._recording = Recording(self._plan, command.request, self._guard, iterations, self._call.tell)
        try:
            recording.start(self._announce)
        except ProfilerInTheWay as exc:
            self._recording = None
            self._handle(events.ProfilerActive(self._now_ns(), str(exc)))
            return
        except SourceError as exc:
            self._handle(events.SourcesFailed(self._now_ns(), exc.reason_code, exc.reason))
            return
        self._handle(events.SourcesStarted(self._now_ns(), self._counter.count))

    def _announce(self, message: wire.Arena, descriptor: int) -> None:
        try:
            self._send(message, [descriptor])
        except wire.WireError as exc:
            raise SourceError("SOURCE_FAILED", "its metadata does not fit into a frame: %s" % exc) from exc

    def _stop_sources(self, command: events.StopSources) -> None:
        recording = self._recording
        if recording is not None:
            recording.stop()
        stopped = events.SourcesStopped(self._now_ns())
        if recording is not None:
            stopped = stopped._replace(gave_way_ns=recording.gave_way_ns, gave_way_to=recording.gave_way_to)
        self._handle(stopped)

    def _await_profiler(self, command: events.AwaitProfiler) -> None:
        self._guard.install()  # it reports the end sooner than polling does
        self._awaits_profiler = True

    def _profiler_begins(self) -> None:
        """Yield on the program's thread, under the guard's lock."""
        recording = self._recording
        if recording is not None:
            recording.give_way()
            self.wake()

    def _free(self) -> None:
        recording, self._recording, self._plan = self._recording, None, None
        self._awaits_profiler = False
        if recording is not None:
            recording.close()
            self._counter.undisturbed_ns = time.time_ns()
        self._guard.remove()

    def _set_timer(self, command: events.SetTimer) -> None:
        self._deadline_ns = command.deadline_ns

    def _watch_step(self, command: events.WatchStep) -> None:
        self._watched = command.iteration
        self._counter.watch(command.iteration, self.wake)

    def _report(self, command: events.ReportState) -> None:
        settings = self._settings if command.state is events.SessionState.COLLECT else {}
        self._send(wire.State(command.capture_id, command.state.value, command.time_ns, settings))

    def _reject(self, command: events.Reject) -> None:
        log("capture %s rejected: %s", command.capture_id, command.reason)
        self._send(wire.Rejected(*command))

    def _conclude(self, command: events.Conclude) -> None:
        log("capture %s: %s %s", command.capture_id, command.outcome, command.reason)
        result = self._result(command)
        try:
            self._send(result)
        except wire.WireError as exc:
            bare = {name: dict(counts, metadata={}) for name, counts in result.sources.items()}
            warning = "thread names and metadata are left out: %s" % exc
            self._send(result._replace(sources=bare, threads={}, warnings=[warning]))

    def _result(self, command: events.Conclude) -> wire.Result:
        recording = self._recording
        outcome, reason_code, reason = command.outcome, command.reason_code, command.reason
        problem = recording.problem if recording is not None else None
        if outcome == "done" and problem is not None:
            outcome, reason_code, reason = "partial", problem.reason_code, problem.reason
        not_recorded = recording.not_recorded() if recording is not None else {}
        warnings = [*command.warnings, *(recording.warnings() if recording is not None else ())]
        return wire.Result(
            capture_id=command.capture_id,
            outcome=outcome,
            reason_code=reason_code,
            reason=reason,
            window_start_ns=command.window_start_ns,
            window_end_ns=command.window_end_ns,
            sources=recording.counts() if recording is not None else {},
            overhead=self._overhead(command),
            threads=thread_names(_MAX_THREADS) if outcome in ("done", "partial") else {},
            iterations={},
            warnings=[warning[:_MAX_WARNING_CHARS] for warning in warnings[:_MAX_WARNINGS]],
            not_recorded={name: why[:_MAX_WARNING_CHARS] for name, why in not_recorded.items()},
        )

    def _overhead(self, command: events.Conclude) -> Dict[str, Any]:
        recording = self._recording
        during_ns = self._counter.durations_ns(command.window_start_ns, command.window_end_ns)
        return {
            "start_ns": max(command.collecting_ns - command.requested_ns, 0),
            "stop_ns": max(command.stopped_ns - command.window_end_ns, 0) if command.window_end_ns else 0,
            "detach_ns": recording.detach_ns() if recording is not None else 0,
            "agent_cpu_ns": time.thread_time_ns() - self._cpu_base_ns + (recording.cpu_ns() if recording else 0),
            "step_ratio": step_ratio(self._steps_before_ns, during_ns),
            "least_step_ratio": least_step_ratio(self._steps_before_ns, during_ns),
        }


_CARRY_OUT: Dict[type, Callable[[Agent, Any], None]] = {
    events.StartSources: Agent._start_sources,
    events.StopSources: Agent._stop_sources,
    events.FreeSources: lambda agent, _command: agent._free(),
    events.AwaitProfiler: Agent._await_profiler,
    events.SetTimer: Agent._set_timer,
    events.WatchStep: Agent._watch_step,
    events.ReportState: Agent._report,
    events.Reject: Agent._reject,
    events.Conclude: Agent._conclude,
}
