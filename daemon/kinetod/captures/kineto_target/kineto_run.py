"""Drives one target whose own libkineto records, from the offer of the request until the verdict.

Theory of operation
    `KinetoRun.run` is one task; `OnDemandTrace` decides what happens, and this module does the I/O that it asks for.
    What the polls say comes by `_on_offer`, on the event loop; as long as the file may come, the folder is looked at
    once in a look period.

    What was asked for is written to the target's folder before it is offered, and again when it was first sent: with
    that the next daemon awaits the file of a recording that this one began (`kineto_recovery`).
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from kineto_agent.protocol import wire
from kineto_protos.alignment import Aligned
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.spool.kineto_file import OnDemandRequest

from kinetod.attach.attach_types import Approval
from kinetod.base.errors import KinetodError, VerdictReason
from kinetod.captures.counters.capture_counters import TargetSampling
from kinetod.captures.kineto_target.config_text import START_DELAY_NS, TraceDestination, kineto_text
from kinetod.captures.kineto_target.kineto_recorder import FreePolls, KinetoRecorder, is_alive
from kinetod.captures.kineto_target.kineto_result import Fetch, store_kineto_file
from kinetod.captures.kineto_target.on_demand_trace import (
    WAIT_S,
    FolderLooked,
    MakeOffer,
    OfferDropped,
    OfferOver,
    OfferReady,
    OfferSent,
    OfferTaken,
    OnDemandTrace,
    ProcessGone,
    WithdrawOffer,
    longest_ns,
)
from kinetod.captures.kineto_target.trace_destination import new_destination
from kinetod.captures.result.verdict import DONE, Ending, EndState
from kinetod.captures.target.collection import (
    STOP_GRACE_S,
    Begun,
    DeadlinePassed,
    DecodingBegun,
    Now,
    Publish,
    StopWanted,
    VerdictGiven,
)
from kinetod.captures.target.exec_detection import after_exec
from kinetod.captures.target.services import Services
from kinetod.captures.target.target_description import describe_process
from kinetod.kineto_files.interface import FolderUnreachable, OpenTraceFolder, Sight
from kinetod.kineto_files.trace_location import own_pid
from kinetod.kineto_ipc.polling_process import OfferedConfiguration, OfferEvent, PollingProcess

log = logging.getLogger(__name__)

_ALIVE_PERIOD_S = 1.0
_POLLS = 2
_EMPTY = Sight(writing_bytes=0)
_NO_EARLY_END = "cancelled, but libkineto cannot be stopped: it records to its end"
_EVENTS: dict[OfferEvent, type[OfferTaken] | type[OfferOver]] = {
    OfferEvent.TAKEN: OfferTaken,
    OfferEvent.OVER: OfferOver,
}


class KinetoRun:
    """A TracedTarget without an agent, so that nobody can be asked for its iterations."""

    agent = None

    def __init__(
        self,
        services: Services,
        recorder: KinetoRecorder,
        *,
        capture_id: str,
        target: pb.Target,
        process: PollingProcess,
        start: wire.Start,
        spec: pb.CaptureSpec,
        formats: Sequence[str],
        directory: Path,
        approval: Approval,
        on_change: Callable[[], None],
        check_share: Callable[[], None] = lambda: None,
        counters: TargetSampling | None = None,
    ) -> None:
        self.target = target
        self.garbage: Path | None = None
        self.clock: pb.ClockOffset | None = None
        self._services = services
        self._config = services.config  # a reload changes later captures only
        self._recorder = recorder
        self._capture_id = capture_id
        self._process = process
        self._spec = spec
        self._formats = tuple(formats)
        self._directory = directory
        self._approval = approval
        self._on_change = on_change
        self._check_share = check_share
        self._counters = counters  # None: no hardware counters were asked for
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._trace = OnDemandTrace(target.pid, start, self._config)
        self._offered: OfferedConfiguration | None = None
        self._withdrawn_ns = 0
        self._polls = FreePolls(0)  # since then
        self._sent_before = 0  # of offers before this one
        self._folder: OpenTraceFolder | None = None
        self._destination: TraceDestination | None = None
        self._asked: OnDemandRequest | None = None

    # called by the manager

    @property
    def request(self) -> wire.Start:
        """What libkineto is asked for; it may be changed until `begin`."""
        return self._trace.request

    @request.setter
    def request(self, request: wire.Start) -> None:
        self._trace.request = request

    @property
    def is_over(self) -> bool:
        """Whether the target is ending or has ended."""
        return self._trace.is_over

    def stop(self, ending: Ending, *, grace_s: float = STOP_GRACE_S) -> None:
        """Ends the capture as far as libkineto can be stopped; see `OnDemandTrace`."""
        if self._offered is not None:
            self._count_sent(self._offered)
        if ending.code == VerdictReason.CANCELLED and self._trace.watches_file:
            self.target.warnings.append(_NO_EARLY_END)
            self._on_change()
        self._handle(StopWanted(ending, grace_s))
        self._wake.set()

    def attach(self) -> None:
        """Makes the process busy with this capture."""
        self._recorder.take(self._process.key, self._capture_id)

    async def armed(self) -> None:
        """Waits, before `run`, until `begin` is called or the target is over."""
        while not self._trace.begun and not self.is_over:
            await self._wait(_ALIVE_PERIOD_S)
            if not is_alive(self._process.key):
                self._handle(ProcessGone(died=True))

    def begin(self) -> None:
        """Allows the request to be offered."""
        self._handle(Begun())
        self._wake.set()

    def align(self, aligned: Aligned) -> None:
        """Sets, before `begin`, the iterations that the targets of this capture have in common."""
        self.request = aligned.applied(self.request)

    async def run(self) -> None:
        """Runs, after `attach`, until the target has its verdict. Raises only CancelledError."""
        try:
            await self._run()
        except Exception:
            log.exception("capture %s failed for process %d", self._capture_id, self.target.pid)
            self.target.verdict, self.target.reason_code = pb.VERDICT_FAILED, VerdictReason.INTERNAL
            self.target.reason = "an internal error of the daemon; its log has the details"
        finally:
            self._withdraw()
            self._recorder.free(self._process.key, self._capture_id)
            self._leave_folder()
            if self._counters is not None:
                self._counters.release()
        self._handle(VerdictGiven())

    async def _run(self) -> None:
        self._handle(OfferReady(await self._prepare()))
        ending = await self._record()
        if self._counters is not None and ending == DONE:  # when the window was, only the file tells
            self.target.warnings.extend(await self._counters.collected(0, time.time_ns()))
        if ending == DONE and self._folder is not None and self._asked is not None:
            self._recorder.finished(self._process.key)
            self._handle(DecodingBegun())
            fetch = Fetch(
                services=self._services,
                recorder=self._recorder,
                folder=self._folder,
                directory=self._directory,
                check_share=self._check_share,
            )
            ending = await fetch.file(self._asked)
        elif self._folder is not None and not self._trace.leaves_file:
            await self._recorder.remove(self._folder)
        ending = await after_exec(self._services.whose, self._process.key, self._approval.credentials, ending)
        self.garbage = await store_kineto_file(
            self._services, self.target, self._directory, self._formats, self._info(), ending
        )

    # before

    async def _prepare(self) -> Ending | None:
        """Opens the folder and notes what will be asked for. Returns why the request cannot be offered, if so."""
        if self._trace.is_over:
            return None
        key = self._process.key
        if not is_alive(key):
            self._handle(ProcessGone(died=True))
            return None
        destination = new_destination(self._capture_id)
        name, until_ns = destination.name(own_pid(key.pid)), self._until_ns() + int(WAIT_S * 1e9)
        try:
            self._folder = await self._recorder.folders.open(key, self._approval, name, until_ns=until_ns)
        except TimeoutError:
            text = f"the temporary folder of process {key.pid} does not answer"
            return Ending(EndState.FAILED, VerdictReason.LIBKINETO_UNAVAILABLE, text)
        except FolderUnreachable as exc:
            return Ending(EndState.FAILED, VerdictReason.LIBKINETO_UNAVAILABLE, str(exc))
        self._destination = replace(destination, folder=self._folder.path)
        self._asked = OnDemandRequest(
            trace_id=destination.trace_id, folder=self._folder.path, name=name, until_ns=until_ns
        )
        return await self._note(self._asked)

    async def _note(self, asked: OnDemandRequest) -> Ending | None:
        """Writes what is asked for to disk, for a restarted daemon."""
        try:
            await self._loop.run_in_executor(self._services.executor, asked.write, self._directory)
            await self._loop.run_in_executor(self._services.executor, self._info().write, self._directory)
        except OSError as exc:
            text = f"writing failed ({exc.strerror}): {self._directory}"
            return Ending(EndState.FAILED, VerdictReason.STORE_IO, text)
        return None

    def _info(self) -> TargetInfo:
        known = describe_process(
            self.target.process,
            capture_id=self._capture_id,
            host=self._services.host,
            labels=self._spec.labels,
            start=self.request,
            clock=self.clock,
        )
        return replace(known, framework=known.framework or "torch")

    # recording

    async def _record(self) -> Ending:
        trace, noted = self._trace, 0
        while (ending := trace.ending()) is None:
            period = (
                self._recorder.folders.look_period_s if trace.watches_file else trace.deadline_s - self._loop.time()
            )
            await self._wait(min(period, trace.deadline_s - self._loop.time()))
            if trace.times_sent > noted and self._asked is not None:
                noted = trace.times_sent
                self._asked = replace(self._asked, sent_ns=time.time_ns(), until_ns=self._until_ns())
                await self._note(self._asked)
            await self._look()
            if trace.ending() is None and self._loop.time() >= trace.deadline_s:
                self._handle(DeadlinePassed())
        return ending

    def _until_ns(self) -> int:
        """When the file has to be there if libkineto gets the request now. Unix time."""
        begins_ns = max(time.time_ns(), self.request.start_time_ns)
        return begins_ns + longest_ns(self.request, self._config) + self._config.process_deadline_ns

    async def _wait(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), max(0.0, seconds))
        self._wake.clear()

    async def _look(self) -> None:
        if not self._trace.watches_file or self._folder is None or self._asked is None:
            return
        sight = Sight()
        with contextlib.suppress(OSError, TimeoutError):
            sight = await self._folder.look()
        alive = is_alive(self._process.key)
        if sight == _EMPTY and self._was_dropped():
            await self._recorder.remove(self._folder)
            self._handle(OfferDropped())
            return
        if self._offered is None and self._is_free_again():
            self._handle(OfferOver())
        self._handle(FolderLooked(sight))
        if not alive and not sight.whole:
            self._handle(ProcessGone(died=True))

    def _is_free_again(self) -> bool:
        """Whether polls after the file was opened say so: an offer that was withdrawn for it tells nothing more.

        libkineto opens the file before it says that it records; on a busy machine seconds before. So a poll that says
        that it is free means the end only after one that said otherwise.
        """
        return self._polls.count(self._process) > 0 and self._has_recorded

    @property
    def _has_recorded(self) -> bool:
        """Whether a poll since the request was sent says that the profiler is armed or records."""
        return self._polls.has_recorded or self._trace.was_taken

    def _was_dropped(self) -> bool:
        """Whether polls when the recording must be over say that libkineto has opened its file for nothing.

        By iteration nothing is dropped: there is no start time that could have passed.
        """
        if self._offered is not None or not self._trace.may_be_repeated or self.request.iterations is not None:
            return False
        free = self._polls.count(self._process) >= _POLLS
        least_ns = START_DELAY_NS + self.request.warmup_ns + (self.request.duration_ns or 0)
        since_ns = max(self._withdrawn_ns, self.request.start_time_ns)
        return free and not self._has_recorded and self._process.last_poll_ns > since_ns + least_ns

    def _on_offer(self, event: OfferEvent) -> None:
        if event is OfferEvent.GONE:
            self._handle(ProcessGone(died=not is_alive(self._process.key)))
        elif event is not OfferEvent.SENT:
            self._handle(_EVENTS[event]())
        elif self._offered is not None:
            self._count_sent(self._offered)
        self._wake.set()

    def _count_sent(self, offered: OfferedConfiguration) -> None:
        """Takes note of what was sent, told or not yet: what is on its way to libkineto cannot be taken back."""
        if offered.times_sent:
            self._handle(OfferSent(self._sent_before + offered.times_sent))

    def _handle(self, event: object) -> None:
        """Hands an event to the state machine and does what it asks for."""
        for command in self._trace.handle(event, Now(self._loop.time(), time.time_ns())):
            if isinstance(command, Publish):
                self._publish(command)
            elif isinstance(command, MakeOffer):
                self._offer()
            elif isinstance(command, WithdrawOffer):
                self._withdraw()

    def _offer(self) -> None:
        assert self._destination is not None  # `_prepare` has made it
        asked = kineto_text(self.request, self._spec, self._destination, now_ns=time.time_ns())
        self.target.warnings.extend(each for each in asked.warnings if each not in self.target.warnings)
        self._sent_before = self._trace.times_sent
        try:
            self._offered = self._process.offer(asked.text, self._on_offer)
        except KinetodError as exc:  # another offer is open
            self._handle(StopWanted(Ending(EndState.FAILED, VerdictReason.BUSY, exc.message)))
        self._on_change()

    def _withdraw(self) -> None:
        offered, self._offered = self._offered, None
        if offered is not None:
            offered.withdraw()
            self._withdrawn_ns = time.time_ns()
            self._polls = FreePolls(self._withdrawn_ns)
            self._count_sent(offered)

    def _publish(self, entered: Publish) -> None:
        self.target.state, self.target.state_since_ns = entered.state, entered.since_ns
        if entered.state == pb.TARGET_STATE_COLLECT:
            self.target.collecting_ns = entered.since_ns
        if entered.state >= pb.TARGET_STATE_PROCESS and self.target.collecting_ns and not self.target.collected_ns:
            self.target.collected_ns = entered.since_ns
        self._on_change()

    def _leave_folder(self) -> None:
        """Closes the folder, or leaves it to be tidied if a file may still come."""
        folder, self._folder = self._folder, None
        if folder is None:
            return
        if self._trace.leaves_file and self._asked is not None and self.target.verdict != pb.VERDICT_UNSPECIFIED:
            within_s = max(0.0, (self._asked.until_ns - time.time_ns()) / 1e9)
            self._recorder.remove_later(self._process, folder, since_ns=self._withdrawn_ns, within_s=within_s)
        else:
            folder.close()
