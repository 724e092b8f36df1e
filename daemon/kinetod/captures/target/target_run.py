"""Drives one target of one capture, from the request to the agent until the verdict.

Theory of operation
    `TargetRun.run` is one task; `Collection` decides what happens, and this module does the I/O that it requests. The
    link calls `on_frame` and `on_gone`, which pass the event to the collection and wake the task up. Until the
    collection has ended, the task drains the arenas every DRAIN_PERIOD_S in a thread and watches the deadline.

    Until `begin` is called the capture is armed: the agent is not asked yet, but is busy with this capture.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextvars import copy_context
from pathlib import Path
from typing import Any, TypeVar

from kineto_agent.protocol import wire
from kineto_protos.alignment import Aligned
from kineto_protos.plain import standing_text
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.quantities import lasted
from kineto_trace.model.target_info import TargetInfo

from kinetod.agents.agent_hub import CaptureFrame, ConnectedAgent
from kinetod.base.errors import VerdictReason
from kinetod.base.safe_text import clean
from kinetod.captures.counters.capture_counters import TargetSampling
from kinetod.captures.result.decode_pool import DecodeError
from kinetod.captures.result.verdict import Ending, EndState, Final, final, worse
from kinetod.captures.target import recovery
from kinetod.captures.target.buffer_memory import MemoryShare
from kinetod.captures.target.collection import (
    STOP_GRACE_S,
    ArenaRefused,
    ArenaTaken,
    Asking,
    Begun,
    Collection,
    DeadlinePassed,
    DecodingBegun,
    LinkEnded,
    MemoryTaken,
    NotSent,
    Now,
    Phase,
    Publish,
    ReadClock,
    StopWanted,
    VerdictGiven,
)
from kinetod.captures.target.conversion import Converted, convert, overhead_of
from kinetod.captures.target.endings import (
    CANNOT_WRITE,
    after_clock,
    after_exec,
    clock_offset_ns,
    ending_of_disk,
    ending_of_trace_limit,
    with_exit_status,
    with_plugins,
)
from kinetod.captures.target.record_spool import (
    BadArena,
    DiskFull,
    Spool,
    TraceLimit,
    made_records,
    noted_ways,
    source_counts,
)
from kinetod.captures.target.services import Services
from kinetod.captures.target.target_description import KernelReadings, describe_target
from kinetod.processes.credentials import Credentials

log = logging.getLogger(__name__)

DRAIN_PERIOD_S = 0.1
COUNTS_PERIOD_S = 0.2
_MAX_WARNINGS = 32
T = TypeVar("T")


class TargetRun:
    """Runs one target. `target` is its public state; `on_change` is called after each change of it."""

    def __init__(
        self,
        services: Services,
        *,
        capture_id: str,
        target: pb.Target,
        agent: ConnectedAgent,
        start: wire.Start,
        formats: Sequence[str],
        labels: dict[str, str],
        directory: Path,
        on_change: Callable[[], None],
        check_share: Callable[[], None] = lambda: None,
        approved: Credentials | None = None,
        counters: TargetSampling | None = None,
    ) -> None:
        self.target = target
        self.garbage: Path | None = None  # to be removed once the verdict is stored
        self._services = services
        self._config = services.config  # a reload changes later captures only
        self._capture_id = capture_id
        self.agent = agent
        self.clock: pb.ClockOffset | None = None  # this host's, as measured by the caller
        self._formats = tuple(formats)
        self._labels = labels
        self._on_change = on_change
        self._counters = counters  # None: no hardware counters were requested
        self._approved = approved  # the process's credentials when the capture was approved
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()  # identifies the user it works for
        self._reading = set[asyncio.Task[None]]()
        self._wake = asyncio.Event()
        self._collection = Collection(target.pid, start, self._config)
        self._arenas: list[tuple[wire.Arena, int]] = []  # announced, not opened
        self._ways: dict[str, str] = {}  # how each source records, for people
        self._memory = MemoryShare(services.promises, target.pid)
        self._kernel = KernelReadings(agent.key)
        self._counts_at = 0.0
        self._window_noted = False
        self._clock_offset_ns = clock_offset_ns()
        self._spool = Spool(
            directory,
            buffer_limit_bytes=start.buffer_limit_bytes,
            max_trace_bytes=self._config.max_trace_bytes,
            min_free_bytes=self._config.min_free_bytes,
            free_bytes=services.free_bytes,
            check_share=check_share,
        )

    # called by the link

    def on_frame(self, message: CaptureFrame, fd: int | None) -> None:
        """Handles a message of the agent."""
        if isinstance(message, wire.Arena):
            assert fd is not None  # the link rejects an Arena without one
            self._ways |= noted_ways({message.source: message.metadata})
            self._arenas.append((message, fd))
        self._handle(message)
        self._wake.set()

    def on_gone(self, died: bool, reason: str) -> None:
        """Handles the end of the link."""
        self._handle(LinkEnded(died, reason))
        self._wake.set()

    # called by the manager

    @property
    def request(self) -> wire.Start:
        """The request for the agent; it may be changed until `begin`."""
        return self._collection.request

    @request.setter
    def request(self, request: wire.Start) -> None:
        self._collection.request = request

    def stop(self, ending: Ending, *, grace_s: float = STOP_GRACE_S) -> None:
        """Ends the collection. The first reason counts, but a cancel that keeps nothing overrides it."""
        self._handle(StopWanted(ending, grace_s))
        self._wake.set()

    def attach(self) -> None:
        """Marks the agent as busy with this capture."""
        self.agent.attach(self._capture_id, self)

    @property
    def is_over(self) -> bool:
        """Whether the target is ending or has ended."""
        return self._collection.is_over

    async def wait_until_begun(self) -> None:
        """Waits, before `run`, until `begin` is called or the target is over."""
        while not self._collection.begun and not self.is_over:
            await self._wake.wait()
            self._wake.clear()

    def begin(self) -> None:
        """Allows the agent to be asked."""
        self._handle(Begun())
        self._wake.set()

    def align(self, aligned: Aligned) -> None:
        """Sets, before `begin`, the common iterations of this capture's targets."""
        self.request = aligned.applied(self.request)
        if aligned.warning:
            self.target.warnings.append(aligned.warning)
            self._on_change()

    async def run(self) -> None:
        """Runs, after `attach`, until the target has its verdict. Raises only CancelledError."""
        try:
            await self._run()
        except asyncio.CancelledError:  # the daemon's time to stop is over
            if self._collection.stop is not None and self._collection.stop.outcome is EndState.PARTIAL:
                recovery.note_ending(self._spool.directory, self._collection.stop, self._spool.dropped_records())
            raise
        except Exception:
            log.exception("capture %s failed for process %d", self._capture_id, self.target.pid)
            reason = "an internal error of the daemon; its log has the details"
            self._end(Final(pb.VERDICT_FAILED, VerdictReason.INTERNAL, reason))
        finally:
            for _, fd in self._arenas:
                os.close(fd)
            self._kernel.close()
            self._spool.close()
            self._memory.give_back()
            if self._counters is not None:
                self._counters.release()

    async def _run(self) -> None:
        try:
            ending = await self._recorded()
        finally:
            self.agent.detach(self._capture_id)  # it can be asked for the next capture while this one is decoded
        ending = await self._services.conflicts.explained(ending, self.target.process.uid, self.agent.key.pid)
        ending = with_plugins(ending, self._services.plugins, self._missing())
        await self._store(await after_exec(self._services.whose, self.agent.key, self._approved, ending))

    async def _recorded(self) -> Ending:
        """How the recording ended; the agent is done with it."""
        await self._take_memory()
        request = await self._services.device_graphs.noted(self.request, self.agent)
        self._handle(Asking(request))
        ending = await self._collect()
        ending = after_clock(await self._last_drain(ending), clock_offset_ns() - self._clock_offset_ns)
        if self._collection.result is None:
            ending = await with_exit_status(ending, self.agent.identity)
        await self._end_counters(ending)
        self.agent.send(wire.Release(self._capture_id))
        return ending

    async def _take_memory(self) -> None:
        taken = await self._in_thread(self._memory.take, self.request, self.agent.hello.sources)
        self._handle(MemoryTaken(taken.request, taken.refused))
        self.target.warnings.extend(filter(None, [taken.warning]))

    def _missing(self) -> Sequence[str]:
        """The types that were not recorded, or all requested ones if the agent does not report that."""
        result = self._collection.result
        return tuple((result and result.not_recorded) or self.request.activity_types)

    def _handle(self, event: object) -> None:
        """Passes an event to the collection and carries out its commands."""
        for command in self._collection.handle(event, Now(self._loop.time(), time.time_ns())):
            if isinstance(command, Publish):
                self._publish(command)
            elif isinstance(command, ReadClock):
                self._clock_offset_ns = clock_offset_ns()
            elif not self.agent.send(command) and isinstance(command, wire.Start):
                self._handle(NotSent(self.agent.process_ended))

    def _publish(self, entered: Publish) -> None:
        self.target.state, self.target.state_since_ns = entered.state, entered.since_ns
        if entered.state == pb.TARGET_STATE_COLLECT:
            self.target.collecting_ns = entered.since_ns
            self._read_now(self._kernel.take)  # at once: the task may be busy with arenas
        elif entered.state == pb.TARGET_STATE_PROCESS:
            self._read_now(self._kernel.end)
        if entered.state >= pb.TARGET_STATE_PROCESS and self.target.collecting_ns and not self.target.collected_ns:
            self.target.collected_ns = entered.since_ns
        self._on_change()

    # collecting

    async def _collect(self) -> Ending:
        collection = self._collection
        while (ending := collection.ending()) is None:
            period = DRAIN_PERIOD_S if self._spool.counts() else collection.deadline_s - self._loop.time()
            await self._wait(period)
            await self._read_kernel()
            await self._open_arenas()
            await self._note_window()
            await self._drain()
            await self._check_memory()
            if self._loop.time() >= collection.deadline_s and collection.ending() is None:
                call = self.agent.standing
                text = standing_text(call, self.target.pid, lasted(call.since_ns, time.time_ns())) if call else ""
                self._handle(DeadlinePassed(text))
                self._wake.set()
        await self._in_thread(self._kernel.end)
        return ending

    async def _read_kernel(self) -> None:
        """Reads the kernel's counters of the process during the window."""
        if self._collection.phase is Phase.COLLECT and self._kernel.due():
            await self._in_thread(self._kernel.take_if_due)

    def _read_now(self, read: Callable[[], None]) -> None:
        # the context of a frame belongs to no user
        task = self._loop.create_task(self._in_thread(read), context=self._context)
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)

    async def _check_memory(self) -> None:
        if self._collection.stop is None and self._memory.due():
            ending = await self._in_thread(self._memory.shortage)
            if ending is not None:
                self.stop(ending)

    async def _wait(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._wake.wait(), max(0.0, seconds))
        except TimeoutError:
            return
        self._wake.clear()

    # arenas

    async def _in_thread(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return await self._services.files.in_thread(function, *args, **kwargs)

    async def _open_arenas(self) -> None:
        while self._arenas:
            arena, fd = self._arenas.pop(0)
            self._handle(ArenaTaken())
            try:
                await self._in_thread(self._spool.open, arena, fd)
                await self._in_thread(self._spool.write_info, self._info())
            except BadArena as exc:
                what = f"the memory that process {self.target.pid} passed for source {clean(arena.source, 40)}"
                self._handle(ArenaRefused(f"{what} is not a valid arena: {exc}"))
            except DiskFull as exc:
                self.stop(ending_of_disk(exc))

    async def _note_window(self) -> None:
        """Writes the start of the window to disk for a restarted daemon."""
        if self._collection.collect_ns and not self._window_noted and self._spool.counts():
            self._window_noted = True
            try:
                await self._in_thread(self._spool.write_info, self._info())
            except DiskFull as exc:
                self.stop(ending_of_disk(exc))

    async def _drain(self) -> None:
        """Copies READY buffers; reaching a limit ends the collection."""
        stop = self._collection.stop
        if not self._spool.counts() or (stop is not None and stop.code in CANNOT_WRITE):
            return
        try:
            await self._in_thread(self._spool.drain)
        except DiskFull as exc:
            self.stop(ending_of_disk(exc))
        except TraceLimit:
            if self._collection.stop is None:
                self.stop(ending_of_trace_limit(self._config.max_trace_bytes))
        except BadArena as exc:
            self._handle(ArenaRefused(self._spoiled(exc)))
        self._publish_counts()

    def _spoiled(self, exc: BadArena) -> str:
        return f"the memory that process {self.target.pid} passed for its records cannot be used any more: {exc}"

    def _publish_counts(self, *, at_once: bool = False) -> None:
        self._ways |= noted_ways(self._source_metadata())
        counts = source_counts(self._spool.counts(), self._ways)
        if list(self.target.counts) == counts or (not at_once and self._loop.time() < self._counts_at):
            return
        self._counts_at = self._loop.time() + COUNTS_PERIOD_S
        del self.target.counts[:]
        self.target.counts.extend(counts)
        self._on_change()

    async def _last_drain(self, ending: Ending) -> Ending:
        """Copies everything left in the arenas; returns a changed ending if that fails."""
        if ending.code not in CANNOT_WRITE and ending.outcome is not EndState.CANCELLED:
            try:
                await self._in_thread(self._spool.drain, target_is_dead=self._collection.died, last=True)
            except DiskFull as exc:
                ending = worse(ending, ending_of_disk(exc))
            except TraceLimit:
                ending = worse(ending, ending_of_trace_limit(self._config.max_trace_bytes))
            except BadArena as exc:
                ending = worse(ending, Ending(EndState.FAILED, VerdictReason.BAD_ARENA, self._spoiled(exc)))
        try:
            await self._in_thread(self._spool.finish, self._source_metadata())
            # About a second for a process with many threads: too long for the loop.
            await self._in_thread(lambda: self._spool.write_info(self._info(ended=True)))
        except DiskFull as exc:
            ending = worse(ending, ending_of_disk(exc))
        except BadArena as exc:
            ending = worse(ending, Ending(EndState.FAILED, VerdictReason.BAD_ARENA, self._spoiled(exc)))
        self._publish_counts(at_once=True)
        return ending

    async def _end_counters(self, ending: Ending) -> None:
        if self._counters is not None and ending.outcome is not EndState.CANCELLED:
            window_ns = self._collection.window_ns(time.time_ns())
            self.target.warnings.extend(await self._counters.collected(*window_ns))

    def _source_metadata(self) -> dict[str, dict[str, Any]]:
        result = self._collection.result
        sources = result.sources if result else {}
        parts = {name: each.get("metadata") for name, each in sources.items() if isinstance(each, dict)}
        return {name: part for name, part in parts.items() if isinstance(part, dict)}

    def _info(self, *, ended: bool = False) -> TargetInfo:
        return describe_target(
            capture_id=self._capture_id,
            host=self._services.host,
            process=self.target.process,
            hello=self.agent.hello,
            start=self.request,
            result=self._collection.result,
            window_ns=self._collection.window_ns(time.time_ns() if ended else 0),
            labels=self._labels,
            clock=self.clock,
            kernel=self._kernel if ended else None,
            settings=self._collection.settings,
        )

    # the end

    async def _store(self, ending: Ending) -> None:
        """Decodes and gives the verdict."""
        window_start_ns, window_end_ns = self._collection.window_ns(time.time_ns())
        recorded = self._spool.copied_bytes() > 0 and window_end_ns > window_start_ns
        self._add_result_to_target()
        if ending.outcome is EndState.DONE and not self._spool.copied_bytes():
            self.target.warnings.append(
                "nothing was recorded: no activity of the requested types happened in the window"
            )
        converted: Converted | None = None
        decode_error: tuple[str, str] | None = None
        dropped = self._spool.dropped_records()
        if ending.outcome is EndState.DONE and not self._spool.counts():
            ending = Ending(EndState.FAILED, VerdictReason.NOTHING_RECORDED, "the agent announced no source")
        if ending.outcome is EndState.DONE or (ending.outcome is EndState.PARTIAL and recorded):
            self._handle(DecodingBegun())
            await self._in_thread(recovery.note_ending, self._spool.directory, ending, dropped)
            try:
                converted = await convert(self._services, self._spool.directory, self._formats, pid=self.target.pid)
            except DecodeError as exc:
                decode_error = (exc.code, exc.reason)
        verdict = final(
            ending,
            recorded=recorded,
            dropped=dropped,
            made=made_records(self.target),
            unreadable=converted.unreadable if converted is not None else 0,
            cut=converted.cut if converted is not None else (),
            decode_error=decode_error,
        )
        if converted is not None:
            converted.apply(self.target)
            self.garbage = self._spool.directory / "raw"
        elif decode_error is None:
            self.garbage = self._spool.directory
        self._end(verdict)

    def _add_result_to_target(self) -> None:
        if (result := self._collection.result) is None:
            return
        self.target.warnings.extend(clean(warning, 500) for warning in result.warnings[:_MAX_WARNINGS])
        self.target.overhead.CopyFrom(overhead_of(result.overhead))

    def _end(self, verdict: Final) -> None:
        self.target.verdict = verdict.verdict
        self.target.reason_code = verdict.code
        self.target.reason = verdict.reason
        if self.target.files:
            self.target.stored_ns = time.time_ns()
        self._handle(VerdictGiven())
