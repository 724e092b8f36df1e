"""Drives one target whose own libkineto records, from the offer of the request until the verdict.

Theory of operation
    `KinetoRun.run` is one task; `OnDemandTrace` decides what happens, and this module does the I/O that it requests.
    Polls are reported to `_on_offer`, on the event loop; as long as the file may appear, the folder is checked once per
    look period.

    The request is written to the target's folder before it is offered, and again when it was first sent: so the next
    daemon can wait for the file of a recording that this one began (`recover_kineto_target`).
"""

import asyncio
import contextlib
import logging
import secrets
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
from kinetod.captures.kineto_target.kineto_result import Fetch, failed, store_kineto_file
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
from kinetod.captures.target.endings import after_exec
from kinetod.captures.target.record_spool import disk_error
from kinetod.captures.target.services import Services
from kinetod.captures.target.target_description import describe_process
from kinetod.kineto_files.interface import DEFAULT_FOLDER, FolderUnreachable, OpenTraceFolder, Sight, own_pid
from kinetod.kineto_ipc.poller_registry import OfferedConfiguration, OfferEvent, PollingProcess

_ID_BITS = 63  # libkineto keeps the number as text, readers of JSON as int64
log = logging.getLogger(__name__)
_ALIVE_PERIOD_S = 1.0
_POLLS = 2
_EMPTY = Sight(writing_bytes=0)
_NO_EARLY_END = "cancelled, but libkineto cannot be stopped: it will record to the end"
_EVENTS: dict[OfferEvent, type[OfferTaken] | type[OfferOver]] = {
    OfferEvent.TAKEN: OfferTaken,
    OfferEvent.OVER: OfferOver,
}


def new_destination(capture_id: str) -> TraceDestination:
    """A file with an unguessable name: others may write into the folder, too, and could put a link there first.

    The folder is libkineto's default until the process's own is known.
    """
    stem = f"kinetod-{capture_id}-{secrets.token_hex(8)}"
    return TraceDestination(folder=DEFAULT_FOLDER, stem=stem, trace_id=secrets.randbits(_ID_BITS))


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
        self._counters = counters  # None: no hardware counters were requested
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._trace = OnDemandTrace(target.pid, start, self._config)
        self._offered: OfferedConfiguration | None = None
        self._withdrawn_ns = 0
        self._polls = FreePolls(0)  # since that time
        self._sent_before = 0  # of offers before this one
        self._folder: OpenTraceFolder | None = None
        self._destination: TraceDestination | None = None
        self._asked: OnDemandRequest | None = None

    # called by the manager

    @property
    def request(self) -> wire.Start:
        """The request for libkineto; it may be changed until `begin`."""
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
        """Marks the process as busy with this capture."""
        self._recorder.take(self._process.key, self._capture_id)

    async def wait_until_begun(self) -> None:
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
        """Sets, before `begin`, the common iterations of this capture's targets."""
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
        if self._counters is not None and ending == DONE:  # only the file shows when the window was
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
        """Opens the folder and notes the request. Returns why it cannot be offered, if so."""
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
            text = f"the temporary folder of process {key.pid} is on a file system that is not responding"
            return Ending(EndState.FAILED, VerdictReason.LIBKINETO_UNAVAILABLE, text)
        except FolderUnreachable as exc:
            return Ending(EndState.FAILED, VerdictReason.LIBKINETO_UNAVAILABLE, str(exc))
        self._destination = replace(destination, folder=self._folder.path)
        self._asked = OnDemandRequest(
            trace_id=destination.trace_id, folder=self._folder.path, name=name, until_ns=until_ns
        )
        return await self._note(self._asked)

    async def _note(self, asked: OnDemandRequest) -> Ending | None:
        """Writes the request to disk, for a restarted daemon."""
        try:
            await self._services.files.in_thread(asked.write, self._directory)
            await self._services.files.in_thread(self._info().write, self._directory)
        except OSError as exc:
            return failed(disk_error(exc, self._directory))
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
        """Latest time for the file if libkineto gets the request now. Unix time."""
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
        """Whether polls after the file was opened say so; a withdrawn offer reports no more events.

        libkineto opens the file before it says that it records; on a busy machine seconds before. So a free profiler
        means the end only after a poll that said otherwise.
        """
        return self._polls.count(self._process) > 0 and self._has_recorded

    @property
    def _has_recorded(self) -> bool:
        """Whether a poll since the request was sent says that the profiler is armed or records."""
        return self._polls.has_recorded or self._trace.was_taken

    def _was_dropped(self) -> bool:
        """Whether polls after the recording must be over show that libkineto opened its file in vain.

        Requests by iteration are never dropped: they have no start time that could pass.
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
        """Counts requests sent, reported or not: a request on its way to libkineto cannot be withdrawn."""
        if offered.times_sent:
            self._handle(OfferSent(self._sent_before + offered.times_sent))

    def _handle(self, event: object) -> None:
        """Passes an event to the state machine and carries out its commands."""
        for command in self._trace.handle(event, Now(self._loop.time(), time.time_ns())):
            if isinstance(command, Publish):
                self._publish(command)
            elif isinstance(command, MakeOffer):
                self._offer()
            elif isinstance(command, WithdrawOffer):
                self._withdraw()

    def _offer(self) -> None:
        assert self._destination is not None  # set by `_prepare`
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
        """Closes the folder, or leaves it to be cleaned up if a file may still appear."""
        folder, self._folder = self._folder, None
        if folder is None:
            return
        if self._trace.leaves_file and self._asked is not None and self.target.verdict != pb.VERDICT_UNSPECIFIED:
            within_s = max(0.0, (self._asked.until_ns - time.time_ns()) / 1e9)
            self._recorder.remove_later(self._process, folder, since_ns=self._withdrawn_ns, within_s=within_s)
        else:
            folder.close()
