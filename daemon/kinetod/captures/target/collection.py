"""Lifecycle of one target's capture in the daemon: states and events as a pure transition table.

Theory of operation
    `Collection.handle(event, now)` changes the state and returns the commands that the driver (`TargetRun`) must carry
    out, in order. There is no I/O, task or clock in here.

        PENDING --> ACCEPTED --> WARMUP --> COLLECT --> PROCESS --> STORE --> ENDED

    PENDING   the agent has not answered; it may not have been asked yet (an armed capture)
    ACCEPTED  the agent has answered and waits for its time; clients still see PENDING
    WARMUP, COLLECT, PROCESS    the agent's own states, as it reports them
    STORE     the collection has ended and its records are decoded
    ENDED     the target has its verdict

    States only move forwards and may be skipped. One deadline is kept, and every state of the agent moves it.

    The collection ends with the agent's Result or Rejected, with the death of the process or of its link, or by a
    deadline: `ending` then says how. A stop from our side (cancellation, a limit, a full disk, the daemon's own stop)
    sends a Cancel to the agent and sets a short deadline; the end arrives in the same ways.

Rules
    The first reason to stop counts, but a cancellation that keeps nothing overrides it.
    Once we have asked the agent to stop, its states no longer move the deadline. A pair of state and event that is not
    in the table has no meaning and changes nothing.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

from kineto_agent.protocol import wire
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.quantities import format_duration

from kinetod.base.errors import VerdictReason
from kinetod.captures.result.verdict import (
    DONE,
    Ending,
    EndState,
    agent_stuck,
    ending_of_rejection,
    ending_of_result,
    iterations_not_reached,
    target_exited,
    user_profiler_goes_on,
)
from kinetod.config.settings import Config

STOP_GRACE_S = 5.0


def may_wait(start: wire.Start) -> bool:
    """Whether the agent may wait for the program's own profiler to finish."""
    return bool(start.options.get("wait_for_user_profiler"))


def limit_after_acceptance_s(start: wire.Start, config: Config, now_ns: int) -> float:
    """Time until an agent that has accepted must make progress."""
    if start.iterations is not None or may_wait(start):
        return config.max_duration_ns / 1e9
    return _until_begin(start, config, now_ns)


def limit_of_state_s(state: pb.TargetState, start: wire.Start, config: Config, now_ns: int) -> float:
    """Time until the agent must leave this state."""
    if state == pb.TARGET_STATE_PROCESS:
        return config.process_deadline_ns / 1e9
    if start.iterations is not None:
        return config.max_duration_ns / 1e9
    if state == pb.TARGET_STATE_WARMUP:
        return _until_begin(start, config, now_ns) + start.warmup_ns / 1e9
    return ((start.duration_ns or 0) + config.agent_deadline_ns) / 1e9


def _until_begin(start: wire.Start, config: Config, now_ns: int) -> float:
    begin_ns = start.start_time_ns - start.warmup_ns
    return (max(0, begin_ns - now_ns) + config.agent_deadline_ns) / 1e9


class Phase(IntEnum):
    """State of the capture of one target."""

    PENDING = 0
    ACCEPTED = 1
    WARMUP = 2
    COLLECT = 3
    PROCESS = 4
    STORE = 5
    ENDED = 6


# Public states; an agent that has accepted still counts as PENDING.
_PUBLIC = {
    Phase.PENDING: pb.TARGET_STATE_PENDING,
    Phase.ACCEPTED: pb.TARGET_STATE_PENDING,
    Phase.WARMUP: pb.TARGET_STATE_WARMUP,
    Phase.COLLECT: pb.TARGET_STATE_COLLECT,
    Phase.PROCESS: pb.TARGET_STATE_PROCESS,
    Phase.STORE: pb.TARGET_STATE_STORE,
    Phase.ENDED: pb.TARGET_STATE_ENDED,
}


class Now(NamedTuple):
    """The time of an event."""

    loop_s: float  # the event loop's clock, which is never set
    unix_ns: int


# events, besides the agent's own messages: wire.State, wire.Arena, wire.Result and wire.Rejected


class Begun(NamedTuple):
    """The capture may ask its agent from now on."""


class MemoryTaken(NamedTuple):
    """The request with buffers that fit into the target's memory, or why not even the smallest do."""

    request: wire.Start
    refused: Ending | None


class Asking(NamedTuple):
    """Everything is ready for the agent to be asked."""

    request: wire.Start


class NotSent(NamedTuple):
    """The request could not be sent to the agent. died: because its process had ended."""

    died: bool


class ArenaTaken(NamedTuple):
    """The driver opens one of the announced arenas."""


class ArenaRefused(NamedTuple):
    """An arena cannot be used."""

    reason: str


class LinkEnded(NamedTuple):
    """The link to the agent has ended. died: because the process did."""

    died: bool
    reason: str


class StopWanted(NamedTuple):
    """The collection must end. grace_s: how long the agent may take to confirm it."""

    ending: Ending
    grace_s: float = STOP_GRACE_S


class DeadlinePassed(NamedTuple):
    """The deadline has passed and the collection has not ended. standing: units.standing_text, or ""."""

    standing: str = ""


class DecodingBegun(NamedTuple):
    """The records are complete."""


class VerdictGiven(NamedTuple):
    """Nothing is left to do."""


# commands, besides the messages to send to the agent: wire.Start, whose failure is a NotSent, and wire.Cancel


class Publish(NamedTuple):
    """Show clients the new state."""

    state: pb.TargetState
    since_ns: int


class ReadClock(NamedTuple):
    """Read how far the wall clock is ahead of the steady one, to notice if it is set later."""


Command = wire.Start | wire.Cancel | Publish | ReadClock


_AGENT_STATES = {"WARMUP": Phase.WARMUP, "COLLECT": Phase.COLLECT, "PROCESS": Phase.PROCESS}


class Collection:
    """The state machine of one target. Its attributes may be read at any time; only `request` may be set."""

    def __init__(self, pid: int, request: wire.Start, config: Config) -> None:
        self.request = request
        self.phase = Phase.PENDING
        self.deadline_s = 0.0  # of the event loop's clock
        self.begun = False
        self.stop: Ending | None = None  # why we are stopping it
        self.result: wire.Result | None = None
        self.died = False
        self.collect_ns = 0  # start of the window, by the agent's clock, which is this host's; 0: it has not begun
        self.settings: dict[str, Any] = {}  # of the program, as reported by its agent; untrusted
        self._pid = pid
        self._config = config
        self._rejected: wire.Rejected | None = None
        self._standing = ""  # why the agent misses a deadline
        self._gone = ""  # why the agent sends nothing more
        self._unopened = 0  # announced arenas that are not open yet

    def handle(self, event: object, now: Now) -> list[Command]:
        """Processes one event. Returns the commands to carry out now, in order."""
        transition = TABLE.get((self.phase, type(event)))
        return transition(self, event, now) if transition else []

    @property
    def is_over(self) -> bool:
        """Whether the collection is ending or has ended."""
        return self.stop is not None or bool(self._gone)

    def ending(self) -> Ending | None:
        """How the collection has ended; None while it runs."""
        if self._unopened:
            return None  # announced before the end: they are opened first
        if self.result is not None:
            return self._ending_of_result(self.result)
        if self._rejected is not None:
            return self.stop if self._cancelled() else ending_of_rejection(self._rejected)
        return self._ending_of_link() if self._gone else None

    def window_ns(self, end_ns: int) -> tuple[int, int]:
        """Start and end of the window, Unix ns; (0, 0) if it never began. end_ns: used unless the agent has reported
        it.
        """
        if self.result is not None:
            return self.result.window_start_ns, self.result.window_end_ns
        return (self.collect_ns, end_ns) if self.collect_ns else (0, 0)

    def _cancelled(self) -> bool:
        return self.stop is not None and self.stop.outcome is EndState.CANCELLED

    def _ending_of_result(self, result: wire.Result) -> Ending:
        ending = ending_of_result(result)
        if self.stop is None:
            if ending.outcome is EndState.CANCELLED:
                return Ending(
                    EndState.FAILED, VerdictReason.AGENT_ERROR, "the agent cancelled the capture without being asked to"
                )
            return ending
        if self._cancelled() or ending.outcome is not EndState.DONE:
            return self.stop
        # It was over before our Cancel arrived: a user gets the complete trace, a limit stays a limit.
        return DONE if self.stop.code == VerdictReason.CANCELLED else self.stop

    def _ending_of_link(self) -> Ending:
        if self.stop is not None and self.stop.outcome is EndState.CANCELLED:
            return self.stop
        if self.died:
            return target_exited(self._pid, begun=self.begun)
        reason = f"the link to the agent of process {self._pid} was lost: {self._gone}"
        return self.stop or Ending(EndState.PARTIAL, VerdictReason.AGENT_LOST, reason)

    # asking

    def _begin(self, _event: Begun, _now: Now) -> list[Command]:
        self.begun = True
        return [ReadClock()]

    def _fit(self, event: MemoryTaken, _now: Now) -> list[Command]:
        self.request, self.stop = event.request, self.stop or event.refused
        return []

    def _ask(self, event: Asking, now: Now) -> list[Command]:
        if self.stop is not None:
            self._gone = "it had not been asked yet"
            return []
        self._allow(self._config.agent_deadline_ns / 1e9, now)
        return [event.request]

    def _not_sent(self, event: NotSent, _now: Now) -> list[Command]:
        self._gone, self.died = self._gone or "it was no longer connected", self.died or event.died
        return []

    # reports of the agent

    def _acknowledge(self) -> None:
        self.phase = max(self.phase, Phase.ACCEPTED)

    def _agent_state(self, message: wire.State, now: Now) -> list[Command]:
        self._acknowledge()
        phase = _AGENT_STATES.get(message.state)
        if phase is None:  # its time has not come
            self._allow(limit_after_acceptance_s(self.request, self._config, now.unix_ns), now)
            return []
        if phase <= self.phase:
            return []
        if phase is Phase.COLLECT:
            self.collect_ns, self.settings = message.time_ns, message.settings
        return [*([ReadClock()] if phase is Phase.WARMUP else []), *self._enter(phase, now)]

    def _announced(self, _message: wire.Arena, _now: Now) -> list[Command]:
        self._acknowledge()
        self._unopened += 1
        return []

    def _arena_taken(self, _event: ArenaTaken, _now: Now) -> list[Command]:
        self._unopened -= 1
        return []

    def _arena_refused(self, event: ArenaRefused, _now: Now) -> list[Command]:
        return self._give_up(Ending(EndState.FAILED, VerdictReason.BAD_ARENA, event.reason))

    def _resulted(self, message: wire.Result, _now: Now) -> list[Command]:
        self._acknowledge()
        self.result = self.result or message
        return []

    def _was_rejected(self, message: wire.Rejected, _now: Now) -> list[Command]:
        self._acknowledge()
        self._rejected = self._rejected or message
        return []

    def _link_ended(self, event: LinkEnded, _now: Now) -> list[Command]:
        self._gone, self.died = event.reason, event.died
        return []

    # stopping

    def _stop(self, event: StopWanted, now: Now) -> list[Command]:
        ending = event.ending
        if self.stop is None or ending.outcome is EndState.CANCELLED:
            self.stop = ending
        self.deadline_s = now.loop_s + min(event.grace_s, self._config.process_deadline_ns / 1e9)
        return [self._cancel(keep_partial=ending.outcome is not EndState.CANCELLED)] if self.begun else []

    def _give_up(self, ending: Ending) -> list[Command]:
        """Stops waiting for the agent; if it is alive, it may stop too."""
        self.stop = ending
        self._gone = "the daemon gave up on it"
        return [self._cancel(keep_partial=False)]

    def _cancel(self, *, keep_partial: bool) -> wire.Cancel:
        return wire.Cancel(self.request.capture_id, keep_partial)

    def _overdue(self, event: DeadlinePassed, now: Now) -> list[Command]:
        if self.stop is None:
            self._standing = f"; {event.standing}" if event.standing else ""
            return OVERDUE[self.phase](self, now)
        self._gone = "it did not confirm in time"
        return []

    def _silent(self, _now: Now) -> list[Command]:
        reason = (
            f"the agent of process {self._pid} did not respond within "
            f"{format_duration(self._config.agent_deadline_ns)}; the process may be stopped, or stuck in a "
            "call that holds the GIL"
        )
        return self._give_up(Ending(EndState.FAILED, VerdictReason.AGENT_SILENT, reason))

    def _not_begun(self, now: Now) -> list[Command]:
        if may_wait(self.request) and not self._standing:
            return self._stop_late(user_profiler_goes_on(self._pid, self._config.max_duration_ns), now)
        return self._not_ended(now)

    def _not_ended(self, now: Now) -> list[Command]:
        if self.request.iterations is not None and not self._standing:
            ending = iterations_not_reached(self._pid, self.request, self._config.max_duration_ns)
        else:
            ending = agent_stuck(self._pid, _PUBLIC[self.phase], self._standing)
        return self._stop_late(ending, now)

    def _not_stopped(self, _now: Now) -> list[Command]:
        reason = (
            f"the agent of process {self._pid} did not stop its sources within "
            f"{format_duration(self._config.process_deadline_ns)}{self._standing}"
        )
        return self._give_up(Ending(EndState.PARTIAL, VerdictReason.AGENT_STUCK, reason))

    def _stop_late(self, ending: Ending, now: Now) -> list[Command]:
        return self._stop(StopWanted(ending), now)

    # the end

    def _store(self, _event: DecodingBegun, now: Now) -> list[Command]:
        return self._enter(Phase.STORE, now)

    def _end(self, _event: VerdictGiven, now: Now) -> list[Command]:
        return self._enter(Phase.ENDED, now)

    def _enter(self, phase: Phase, now: Now) -> list[Command]:
        self.phase = phase
        if phase <= Phase.PROCESS:
            self._allow(limit_of_state_s(_PUBLIC[phase], self.request, self._config, now.unix_ns), now)
        return [Publish(_PUBLIC[phase], now.unix_ns)]

    def _allow(self, seconds: float, now: Now) -> None:
        if self.stop is None:
            self.deadline_s = now.loop_s + seconds


Transition = Callable[[Collection, Any, Now], list[Command]]


# Until the collection has ended, each event means the same in every state, except a missed deadline.
_COLLECTING: dict[type, Transition] = {
    Begun: Collection._begin,
    MemoryTaken: Collection._fit,
    Asking: Collection._ask,
    NotSent: Collection._not_sent,
    wire.State: Collection._agent_state,
    wire.Arena: Collection._announced,
    wire.Result: Collection._resulted,
    wire.Rejected: Collection._was_rejected,
    ArenaTaken: Collection._arena_taken,
    ArenaRefused: Collection._arena_refused,
    LinkEnded: Collection._link_ended,
    StopWanted: Collection._stop,
    DeadlinePassed: Collection._overdue,
    DecodingBegun: Collection._store,
    VerdictGiven: Collection._end,
}


TABLE: dict[tuple[Phase, type], Transition] = {
    **{(phase, event): step for phase in Phase if phase < Phase.STORE for event, step in _COLLECTING.items()},
    (Phase.STORE, VerdictGiven): Collection._end,
    (Phase.ENDED, VerdictGiven): Collection._end,
}


OVERDUE: dict[Phase, Callable[[Collection, Now], list[Command]]] = {
    Phase.PENDING: Collection._silent,
    Phase.ACCEPTED: Collection._not_begun,
    Phase.WARMUP: Collection._not_begun,
    Phase.COLLECT: Collection._not_ended,
    Phase.PROCESS: Collection._not_stopped,
}
