"""Lifecycle of a trace recorded by a process's own libkineto: states and events as a pure transition table.

Theory of operation
    `OnDemandTrace.handle(event, now)` changes the state and returns the commands that the driver (`KinetoRun`) must
    carry out, in order. There is no I/O, task or clock in here.

        WAIT --> WARMUP --> COLLECT --> PROCESS --> STORE --> ENDED

    WAIT      the request is not offered yet (an armed capture), or is offered at every poll without a sign that
              libkineto has it; clients see PENDING
    WARMUP    a poll says that the profiler is armed, or the file exists and a warm-up was requested
    COLLECT   the file has been opened: libkineto opens it when it begins, and fills it when it has ended
    PROCESS   the file grows
    STORE     the file was fetched and is decoded
    ENDED     the target has its verdict

    All information about libkineto comes from its polls, 5 s apart, and from the file. A short trace is complete before
    the next poll, which then says again that the profiler is free, as if the request had been lost. So the offer is
    withdrawn as soon as the file appears; otherwise libkineto would record a second time.

    If libkineto gets no CPU between opening the file and its start, 2 s later, it considers the start to be in the past
    and drops the request: the file stays empty, and polls say that the profiler is free. The request is then offered
    again, up to MOST_REPEATS times.

Rules
    A complete file ends the waiting, whatever else has happened: the trace exists. libkineto cannot be stopped. A
    cancellation that keeps nothing ends the target at once and leaves the file to be removed (`leaves_file`); one that
    keeps the records, and the daemon's stop, change nothing: the trace will be complete, and the next daemon fetches
    it. States only move forwards and may be skipped. A pair of state and event that is not in the table changes
    nothing.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

from kineto_agent.protocol import wire
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.quantities import format_duration

from kinetod.base.errors import VerdictReason
from kinetod.captures.kineto_target.config_text import POLL_PERIOD_NS, START_DELAY_NS
from kinetod.captures.result.verdict import DONE, Ending, EndState, iterations_not_reached, target_exited
from kinetod.captures.target.collection import (
    Begun,
    DeadlinePassed,
    DecodingBegun,
    Now,
    Publish,
    StopWanted,
    VerdictGiven,
)
from kinetod.config.settings import Config
from kinetod.kineto_files.interface import Sight

WAIT_S = 12.0  # two polls and some time
MOST_REPEATS = 2
_S = 10**9
_NO_STOP = "libkineto cannot be stopped: it will record to the end, and its file will be removed when it appears"


class KinetoPhase(IntEnum):
    """State of the trace of one process."""

    WAIT = 0
    WARMUP = 1
    COLLECT = 2
    PROCESS = 3
    STORE = 4
    ENDED = 5


_PUBLIC = {
    KinetoPhase.WAIT: pb.TARGET_STATE_PENDING,
    KinetoPhase.WARMUP: pb.TARGET_STATE_WARMUP,
    KinetoPhase.COLLECT: pb.TARGET_STATE_COLLECT,
    KinetoPhase.PROCESS: pb.TARGET_STATE_PROCESS,
    KinetoPhase.STORE: pb.TARGET_STATE_STORE,
    KinetoPhase.ENDED: pb.TARGET_STATE_ENDED,
}


# events, besides those of target.collection: Begun, StopWanted, DeadlinePassed, DecodingBegun, VerdictGiven


class OfferReady(NamedTuple):
    """The request may be offered. refused: why not, if it cannot."""

    refused: Ending | None = None


class OfferSent(NamedTuple):
    """A poll was answered with the request. times: how many so far."""

    times: int = 1


class OfferTaken(NamedTuple):
    """A poll says that the profiler is armed or records."""


class OfferOver(NamedTuple):
    """A later poll says that the profiler is free again."""


class OfferDropped(NamedTuple):
    """The file was opened and is removed again; polls say that nothing was recorded."""


class ProcessGone(NamedTuple):
    """The process has ended, or no longer polls. died: whether it has ended."""

    died: bool


class FolderLooked(NamedTuple):
    """The folder was checked."""

    sight: Sight


# commands, besides Publish


class MakeOffer(NamedTuple):
    """Offer the request at the following polls."""


class WithdrawOffer(NamedTuple):
    """Stop offering it."""


KinetoCommand = MakeOffer | WithdrawOffer | Publish


def longest_ns(request: wire.Start, config: Config) -> int:
    """Longest time from the poll that delivers the request until the file begins to grow."""
    if request.iterations is not None:
        return config.max_duration_ns
    return START_DELAY_NS + request.warmup_ns + (request.duration_ns or 0) + config.process_deadline_ns


class OnDemandTrace:
    """The state machine of one target. Its attributes may be read at any time; only `request` may be set.

    was_taken: a poll has said that the profiler is armed or records.
    """

    def __init__(self, pid: int, request: wire.Start, config: Config) -> None:
        self.request = request
        self.phase = KinetoPhase.WAIT
        self.deadline_s = 0.0  # of the event loop's clock
        self.begun = False
        self.was_taken = False
        self.times_sent = 0
        self._pid = pid
        self._config = config
        self._over = False
        self._looked_since_over = False
        self._opened = False  # the file
        self._repeats = 0
        self._bytes = 0
        self._warm_until_s = 0.0
        self._whole = False
        self._end: Ending | None = None

    def handle(self, event: object, now: Now) -> list[KinetoCommand]:
        """Processes one event. Returns the commands to carry out now, in order."""
        transition = TRANSITIONS.get((self.phase, type(event)))
        return transition(self, event, now) if transition else []

    @property
    def is_over(self) -> bool:
        """Whether it is ending or has ended."""
        return self._end is not None or self._whole

    @property
    def watches_file(self) -> bool:
        """Whether the file may appear now."""
        return self.times_sent > 0 and self._end is None

    @property
    def may_be_repeated(self) -> bool:
        """Whether the file has been opened and has not grown, and the request may be offered again."""
        return self._opened and self._bytes == 0 and not self.is_over and self._repeats < MOST_REPEATS

    @property
    def leaves_file(self) -> bool:
        """Whether an unwanted file may appear after the end: a second one, of a request that was sent again."""
        return self.times_sent > (1 if self._whole else 0)

    def ending(self) -> Ending | None:
        """How it has ended; DONE if the file is complete; None while it runs."""
        return DONE if self._whole else self._end

    # offering

    def _begin(self, _event: Begun, _now: Now) -> list[KinetoCommand]:
        self.begun = True
        return []

    def _ready(self, event: OfferReady, now: Now) -> list[KinetoCommand]:
        if event.refused is not None:
            self._end = self._end or event.refused
        if self._end is not None:
            return []
        self.deadline_s = now.loop_s + WAIT_S
        return [MakeOffer()]

    def _sent(self, event: OfferSent, now: Now) -> list[KinetoCommand]:
        is_first = self.times_sent == 0
        self.times_sent = max(self.times_sent, event.times)
        if is_first:
            self.deadline_s = now.loop_s + WAIT_S
        return []

    def _took(self, _event: OfferTaken, now: Now) -> list[KinetoCommand]:
        if self.was_taken:
            return []
        self.was_taken = True
        self.deadline_s = max(self.deadline_s, now.loop_s + self._allowed_s(now))
        return self._enter(KinetoPhase.WARMUP, now)

    def _allowed_s(self, now: Now) -> float:
        waits_ns = max(0, self.request.start_time_ns - now.unix_ns)
        return (waits_ns + longest_ns(self.request, self._config)) / _S

    # observations of the recording

    def _is_over_by_polls(self, _event: OfferOver, _now: Now) -> list[KinetoCommand]:
        self._over = True
        return []

    def _looked(self, event: FolderLooked, now: Now) -> list[KinetoCommand]:
        sight = event.sight
        if sight.whole:
            self._whole = True
            return [WithdrawOffer(), *self._enter(KinetoPhase.PROCESS, now)]
        if self._over:
            if self._looked_since_over:  # the file was complete before the poll, or it never will be
                self._fail(VerdictReason.CANCELLED_BY_PROGRAM, self._cancelled_text())
            self._looked_since_over = True
        if sight.writing_bytes is None:
            return []
        commands: list[KinetoCommand] = []
        if not self._opened:
            self._opened = True
            self._warm_until_s = now.loop_s + self.request.warmup_ns / _S
            self.deadline_s = max(self.deadline_s, now.loop_s + self._allowed_s(now))
            commands.append(WithdrawOffer())
        if sight.writing_bytes > self._bytes:
            self._bytes = sight.writing_bytes
            commands += self._enter(KinetoPhase.PROCESS, now)
            self.deadline_s = now.loop_s + self._config.process_deadline_ns / _S
        warming = now.loop_s < self._warm_until_s
        return [*commands, *self._enter(KinetoPhase.WARMUP if warming else KinetoPhase.COLLECT, now)]

    def _dropped(self, _event: OfferDropped, now: Now) -> list[KinetoCommand]:
        if not self.may_be_repeated:
            return []
        self._repeats += 1
        self._opened = False
        self.deadline_s = now.loop_s + WAIT_S
        return [MakeOffer()]

    def _cancelled_text(self) -> str:
        if self._opened:
            return (
                f"libkineto of process {self._pid} began its file, but became idle again without finishing it: the "
                "disk of its folder may be full, or the program's own profiler started; see the program's log. Trace "
                "again once there is room"
            )
        return (
            f"libkineto of process {self._pid} accepted the request, but became idle again without writing a file: the "
            "program's own profiler started, or libkineto could not begin; see the program's log. Trace again"
        )

    def _gone(self, event: ProcessGone, _now: Now) -> list[KinetoCommand]:
        if event.died:
            exited = target_exited(self._pid, begun=self.begun)
            what = "; libkineto writes its file at the end, so there is none" if self.times_sent else ""
            self._end = self._end or Ending(EndState.FAILED, exited.code, exited.reason + what)
            return [WithdrawOffer()]
        if self.times_sent:
            return []  # it may still write the file
        text = f"process {self._pid} no longer polls for requests; check whether it is stopped, then trace again"
        self._fail(VerdictReason.NOT_POLLED, text)
        return [WithdrawOffer()]

    # ends

    def _fail(self, code: VerdictReason, reason: str) -> None:
        self._end = self._end or Ending(EndState.FAILED, code, reason)

    def _stop(self, event: StopWanted, _now: Now) -> list[KinetoCommand]:
        ending = event.ending
        if not self.times_sent:
            self._end = self._end or ending
            return [WithdrawOffer()]
        if ending.outcome is EndState.CANCELLED:
            self._end = self._end or Ending(ending.outcome, ending.code, f"{ending.reason}; {_NO_STOP}")
            return [WithdrawOffer()]
        return []  # it continues until the trace is complete

    def _overdue(self, _event: DeadlinePassed, _now: Now) -> list[KinetoCommand]:
        if not self.times_sent:
            self._fail(VerdictReason.NOT_POLLED, self._not_polled_text())
        elif not self.was_taken and not self._opened:
            self._fail(VerdictReason.NOT_TAKEN, self._not_taken_text())
        elif self.request.iterations is not None and self.phase < KinetoPhase.PROCESS:
            found = iterations_not_reached(self._pid, self.request, self._config.max_duration_ns)
            self._end = self._end or Ending(EndState.FAILED, found.code, found.reason)
        else:
            text = f"libkineto of process {self._pid} accepted the request, but its file did not appear in time"
            self._fail(VerdictReason.NO_FILE, f"{text}; check whether the process is stopped, and see its log")
        return [WithdrawOffer()]

    def _not_polled_text(self) -> str:
        return (
            f"libkineto of process {self._pid}, which polls for requests every {format_duration(POLL_PERIOD_NS)}, has "
            f"not polled within {WAIT_S:g} s; check whether the process is stopped, then trace again"
        )

    def _not_taken_text(self) -> str:
        steps = " It can record by iteration only in a program that steps an optimizer or calls prof.step()."
        return (
            f"libkineto of process {self._pid} was sent the request, but did not begin; the program's log "
            f"may say why.{steps if self.request.iterations is not None else ''} Trace again"
            f"{', for a duration' if self.request.iterations is not None else ''}"
        )

    def _store(self, _event: DecodingBegun, now: Now) -> list[KinetoCommand]:
        return self._enter(KinetoPhase.STORE, now)

    def _verdict(self, _event: VerdictGiven, now: Now) -> list[KinetoCommand]:
        return self._enter(KinetoPhase.ENDED, now)

    def _enter(self, phase: KinetoPhase, now: Now) -> list[KinetoCommand]:
        if phase <= self.phase:
            return []
        self.phase = phase
        return [Publish(_PUBLIC[phase], now.unix_ns)]


KinetoTransition = Callable[[OnDemandTrace, Any, Now], list[KinetoCommand]]
_RECORDING: dict[type, KinetoTransition] = {
    Begun: OnDemandTrace._begin,
    OfferReady: OnDemandTrace._ready,
    OfferSent: OnDemandTrace._sent,
    OfferTaken: OnDemandTrace._took,
    OfferOver: OnDemandTrace._is_over_by_polls,
    OfferDropped: OnDemandTrace._dropped,
    ProcessGone: OnDemandTrace._gone,
    FolderLooked: OnDemandTrace._looked,
    StopWanted: OnDemandTrace._stop,
    DeadlinePassed: OnDemandTrace._overdue,
    DecodingBegun: OnDemandTrace._store,
    VerdictGiven: OnDemandTrace._verdict,
}
TRANSITIONS: dict[tuple[KinetoPhase, type], KinetoTransition] = {
    **{
        (phase, event): step for phase in KinetoPhase if phase < KinetoPhase.STORE for event, step in _RECORDING.items()
    },
    (KinetoPhase.STORE, VerdictGiven): OnDemandTrace._verdict,
}
