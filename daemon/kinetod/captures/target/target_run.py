"""One target of one capture: from the request to the agent until the verdict.

Theory of operation
    `TargetRun.run` is one task. The link calls `on_frame` and `on_gone`, which only note what came and wake
    the task up; all decisions are made in the task. Until the collection has ended it drains the arenas
    every DRAIN_PERIOD_S in a thread and looks at one deadline, which each step of the agent moves.

    PENDING -> WARMUP -> COLLECT -> PROCESS -> STORE -> ENDED; only forwards, some may be skipped.

    Until `begin` is called, nothing is asked of the agent, which is busy with the capture all the same: it is armed.

    A collection ends with the agent's Result or Rejected, with the death of the process or of its link,
    or by a deadline. A stop from our side (cancel, limits, full disk, daemon stopping) is a Cancel to the
    agent and a short deadline: the end comes on the same ways.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from kineto_agent.protocol import wire
from kineto_protos.alignment import Aligned
from kineto_protos.units import format_duration
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.model.target_info import TargetInfo

from kinetod.agents.agent_hub import Agent, CaptureFrame
from kinetod.base.errors import VerdictReason
from kinetod.base.safe_text import clean
from kinetod.captures.result.decode_pool import DecodeError
from kinetod.captures.result.verdict import (
    DONE,
    Ending,
    Final,
    Outcome,
    agent_stuck,
    ending_of_rejection,
    ending_of_result,
    final,
    iterations_not_reached,
    target_exited,
    user_profiler_goes_on,
    worse,
)
from kinetod.captures.target.arena_reader import BadArena
from kinetod.captures.target.buffer_memory import MemoryShare
from kinetod.captures.target.conversion import Converted, convert, overhead_of
from kinetod.captures.target.exec_detection import after_exec
from kinetod.captures.target.host_failures import (
    CANNOT_WRITE,
    after_clock,
    clock_offset_ns,
    ending_of_disk,
    ending_of_trace_limit,
    with_exit_status,
)
from kinetod.captures.target.phase_deadlines import after_acceptance, in_state, may_wait
from kinetod.captures.target.record_spool import DiskFull, Spool, TraceLimit
from kinetod.captures.target.services import Services
from kinetod.captures.target.source_counts import noted_ways, source_counts
from kinetod.captures.target.target_description import describe_target
from kinetod.processes.credentials import Credentials

log = logging.getLogger(__name__)

DRAIN_PERIOD_S = 0.1
COUNTS_PERIOD_S = 0.2
STOP_GRACE_S = 5.0
_MAX_WARNINGS = 32
_STATES = {"WARMUP": pb.TARGET_STATE_WARMUP, "COLLECT": pb.TARGET_STATE_COLLECT, "PROCESS": pb.TARGET_STATE_PROCESS}
T = TypeVar("T")


@dataclass(slots=True)
class _Seen:
    """What came over the link, in the order of its importance."""

    acknowledged: bool = False
    result: wire.Result | None = None
    rejected: wire.Rejected | None = None
    gone: str = ""
    died: bool = False
    arenas: list[tuple[wire.Arena, int]] = field(default_factory=list)
    ways: dict[str, str] = field(default_factory=dict)  # how each source records, for people
    collect_ns: int = 0  # by the agent's clock, which is this host's


class TargetRun:
    """Runs one target. `target` is its public state; `on_change` is called after every change of it."""

    def __init__(
        self,
        services: Services,
        *,
        capture_id: str,
        target: pb.Target,
        agent: Agent,
        start: wire.Start,
        formats: Sequence[str],
        labels: dict[str, str],
        directory: Path,
        on_change: Callable[[], None],
        check_share: Callable[[], None] = lambda: None,
        approved: Credentials | None = None,
    ) -> None:
        self.target = target
        self.garbage: Path | None = None  # to be removed once the verdict is stored
        self._services = services
        self._config = services.config  # a reload changes later captures only
        self._capture_id = capture_id
        self.agent = agent
        self.request = start
        self.clock: pb.ClockOffset | None = None  # this host's, as the caller has measured it
        self._formats = tuple(formats)
        self._labels = labels
        self._on_change = on_change
        self._approved = approved  # what the process was when the capture was allowed
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._seen = _Seen()
        self._memory = MemoryShare(services.promises, target.pid)
        self._stop: Ending | None = None
        self._deadline = self._counts_at = 0.0
        self._begun = self._window_noted = False
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
        """Notes what the agent said."""
        seen = self._seen
        seen.acknowledged = True
        if isinstance(message, wire.Arena):
            assert fd is not None  # the link lets no Arena through without
            seen.arenas.append((message, fd))
            seen.ways |= noted_ways({message.source: message.metadata})
        elif isinstance(message, wire.State):
            self._agent_state(message)
        elif isinstance(message, wire.Result):
            seen.result = seen.result or message
        else:
            seen.rejected = seen.rejected or message
        self._wake.set()

    def on_gone(self, died: bool, reason: str) -> None:
        """The link has ended."""
        self._seen.gone, self._seen.died = reason, died
        self._wake.set()

    def _agent_state(self, message: wire.State) -> None:
        if (state := _STATES.get(message.state)) is None:
            self._move_deadline(after_acceptance(self.request, self._config, time.time_ns()))  # its time has not come
        elif state > self.target.state:
            if state == pb.TARGET_STATE_COLLECT:
                self._seen.collect_ns = message.time_ns
            elif state == pb.TARGET_STATE_WARMUP:
                self._clock_offset_ns = clock_offset_ns()
            self._enter(state)

    # called by the manager

    def stop(self, ending: Ending, *, grace_s: float = STOP_GRACE_S) -> None:
        """Ends the collection from our side; the first reason counts, but a cancel without keeping overrides."""
        if self.target.state >= pb.TARGET_STATE_STORE:
            return
        if self._stop is None or ending.outcome is Outcome.CANCELLED:
            self._stop = ending
        if self._begun:
            self.agent.send(wire.Cancel(self._capture_id, ending.outcome is not Outcome.CANCELLED))
        self._deadline = self._loop.time() + min(grace_s, self._config_s("process_deadline_ns"))
        self._wake.set()

    def attach(self) -> None:
        """Makes the agent busy with this capture."""
        self.agent.attach(self._capture_id, self)

    @property
    def is_over(self) -> bool:
        """Whether it ends, or has ended, whatever else is asked of it."""
        return self._stop is not None or bool(self._seen.gone)

    async def armed(self) -> None:
        """Before `run`: until `begin` is called, or nothing can begin any more."""
        while not self._begun and not self.is_over:
            await self._wake.wait()
            self._wake.clear()

    def begin(self) -> None:
        """The agent may be asked now."""
        self._begun = True
        self._clock_offset_ns = clock_offset_ns()
        self._wake.set()

    def align(self, aligned: Aligned) -> None:
        """Before `begin`: the iterations that the targets of this capture have in common."""
        self.request = aligned.applied(self.request)
        if aligned.warning:
            self.target.warnings.append(aligned.warning)
            self._on_change()

    async def run(self) -> None:
        """After `attach`, until the target has its verdict. Raises only CancelledError."""
        try:
            await self._run()
        except Exception:
            log.exception("capture %s, process %d failed", self._capture_id, self.target.pid)
            reason = "an error of the daemon itself; its log has the details"
            self._end(Final(pb.VERDICT_FAILED, VerdictReason.INTERNAL, reason))
        finally:
            self.agent.detach(self._capture_id)
            for _, fd in self._seen.arenas:
                os.close(fd)
            self._spool.close()
            self._memory.give_back()

    async def _run(self) -> None:
        await self._take_memory()
        request = await self._services.device_graphs.noted(self.request, self.agent)
        self._move_deadline(self._config_s("agent_deadline_ns"))
        if self._stop is not None:
            self._seen.gone = "it had not been asked yet"
        elif not self.agent.send(request):
            self._seen.gone = self._seen.gone or "it was not connected any more"
        ending = await self._collect()
        ending = after_clock(await self._last_drain(ending), clock_offset_ns() - self._clock_offset_ns)
        if self._seen.result is None:
            ending = await with_exit_status(ending, self.agent.identity)
        self.agent.send(wire.Release(self._capture_id))
        self.agent.detach(self._capture_id)
        ending = await self._services.conflicts.explained(ending, self.target.process.uid)
        await self._store(await after_exec(self._services.whose, self.agent.key, self._approved, ending))

    async def _take_memory(self) -> None:
        taken = await self._in_thread(self._memory.take, self.request, self.agent.hello.sources)
        self.request, self._stop = taken.request, self._stop or taken.refused
        self.target.warnings.extend(filter(None, [taken.warning]))

    # collecting

    async def _collect(self) -> Ending:
        while (ending := self._ending()) is None:
            period = DRAIN_PERIOD_S if self._spool.counts() else self._deadline - self._loop.time()
            await self._wait(period)
            await self._open_arenas()
            await self._note_window()
            await self._drain()
            if self._stop is None and self._memory.due() and (ending := await self._in_thread(self._memory.shortage)):
                self.stop(ending)
            if self._loop.time() >= self._deadline and self._ending() is None:
                self._deadline_passed()
        return ending

    async def _wait(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._wake.wait(), max(0.0, seconds))
        except TimeoutError:
            return
        self._wake.clear()

    def _ending(self) -> Ending | None:
        """How the collection has ended, None while it runs."""
        seen = self._seen
        if seen.arenas:
            return None  # announced before the end: open them first
        if seen.result is not None:
            return self._ending_of_result(seen.result)
        if seen.rejected is not None:
            return self._stop if self._cancelled() else ending_of_rejection(seen.rejected)
        if seen.gone:
            return self._ending_of_link()
        return None

    def _cancelled(self) -> bool:
        return self._stop is not None and self._stop.outcome is Outcome.CANCELLED

    def _ending_of_result(self, result: wire.Result) -> Ending:
        ending = ending_of_result(result)
        if self._stop is None:
            if ending.outcome is Outcome.CANCELLED:
                return Ending(Outcome.FAILED, VerdictReason.AGENT_ERROR, "the agent cancelled it without being asked")
            return ending
        if self._cancelled() or ending.outcome is not Outcome.DONE:
            return self._stop
        # It was over before our Cancel arrived: a user gets the whole trace, a limit stays a limit.
        return DONE if self._stop.code == VerdictReason.CANCELLED else self._stop

    def _ending_of_link(self) -> Ending:
        if self._cancelled():
            assert self._stop is not None
            return self._stop
        if self._seen.died:
            return target_exited(self.target.pid, begun=self._begun)
        reason = f"the link to the agent of process {self.target.pid} was lost: {self._seen.gone}"
        return self._stop or Ending(Outcome.PARTIAL, VerdictReason.AGENT_LOST, reason)

    def _deadline_passed(self) -> None:
        target, state = self.target, self.target.state
        if self._stop is not None:
            self._seen.gone = "it did not confirm in time"
        elif not self._seen.acknowledged:
            self._give_up(
                Outcome.FAILED,
                VerdictReason.AGENT_SILENT,
                f"the agent of process {target.pid} did not answer within "
                f"{format_duration(self._config.agent_deadline_ns)}; is the process stopped or stuck in a "
                "call that holds the interpreter?",
            )
        elif state >= pb.TARGET_STATE_PROCESS:
            self._give_up(
                Outcome.PARTIAL,
                VerdictReason.AGENT_STUCK,
                f"the agent of process {target.pid} did not finish stopping its sources within "
                f"{format_duration(self._config.process_deadline_ns)}",
            )
        elif may_wait(self.request) and state < pb.TARGET_STATE_COLLECT:
            self.stop(user_profiler_goes_on(target.pid, self._config.max_duration_ns))
        elif self.request.iterations is not None:
            self.stop(iterations_not_reached(target.pid, self.request, self._config.max_duration_ns))
        else:
            self.stop(agent_stuck(target.pid, state))

    def _give_up(self, outcome: Outcome, code: str, reason: str) -> None:
        """Nothing more is awaited from the agent; should it still live, it may stop too."""
        self._stop = Ending(outcome, code, reason)
        self._seen.gone = "it was given up"
        self.agent.send(wire.Cancel(self._capture_id, False))

    def _config_s(self, name: str) -> float:
        return float(getattr(self._config, name)) / 1e9

    def _move_deadline(self, seconds: float) -> None:
        if self._stop is None:
            self._deadline = self._loop.time() + seconds

    def _enter(self, state: pb.TargetState) -> None:
        now_ns = time.time_ns()
        self.target.state = state
        self.target.state_since_ns = now_ns
        if state == pb.TARGET_STATE_COLLECT:
            self.target.collecting_ns = now_ns
        if state >= pb.TARGET_STATE_PROCESS and self.target.collecting_ns and not self.target.collected_ns:
            self.target.collected_ns = now_ns
        self._move_deadline(in_state(state, self.request, self._config, now_ns))
        self._on_change()

    # arenas

    async def _in_thread(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return await self._loop.run_in_executor(self._services.executor, partial(function, *args, **kwargs))

    async def _open_arenas(self) -> None:
        while self._seen.arenas:
            arena, fd = self._seen.arenas[0]
            self._seen.arenas.pop(0)
            try:
                await self._in_thread(self._spool.open, arena, fd)
                await self._in_thread(self._spool.write_info, self._info())
            except BadArena as exc:
                reason = f"the memory that process {self.target.pid} handed over for {clean(arena.source, 40)} is no"
                self._give_up(Outcome.FAILED, VerdictReason.BAD_ARENA, f"{reason} arena: {exc}")
            except DiskFull as exc:
                self.stop(ending_of_disk(exc))

    async def _note_window(self) -> None:
        """On disk, so that a restarted daemon knows where the window began."""
        if self._seen.collect_ns and not self._window_noted and self._spool.counts():
            self._window_noted = True
            try:
                await self._in_thread(self._spool.write_info, self._info())
            except DiskFull as exc:
                self.stop(ending_of_disk(exc))

    async def _drain(self) -> None:
        """Copies what is ready; a limit that is reached ends the collection."""
        if not self._spool.counts() or (self._stop is not None and self._stop.code in CANNOT_WRITE):
            return
        try:
            await self._in_thread(self._spool.drain)
        except DiskFull as exc:
            self.stop(ending_of_disk(exc))
        except TraceLimit:
            if self._stop is None:
                self.stop(ending_of_trace_limit(self._config.max_trace_bytes))
        self._publish_counts()

    def _publish_counts(self, *, at_once: bool = False) -> None:
        self._seen.ways |= noted_ways(self._source_metadata())
        counts = source_counts(self._spool.counts(), self._seen.ways)
        if list(self.target.counts) == counts or (not at_once and self._loop.time() < self._counts_at):
            return
        self._counts_at = self._loop.time() + COUNTS_PERIOD_S
        del self.target.counts[:]
        self.target.counts.extend(counts)
        self._on_change()

    async def _last_drain(self, ending: Ending) -> Ending:
        """Everything that is left in the arenas; returns a changed ending if that failed."""
        if ending.code not in CANNOT_WRITE and ending.outcome is not Outcome.CANCELLED:
            try:
                await self._in_thread(self._spool.drain, target_is_dead=self._seen.died, last=True)
            except DiskFull as exc:
                ending = worse(ending, ending_of_disk(exc))
            except TraceLimit:
                ending = worse(ending, ending_of_trace_limit(self._config.max_trace_bytes))
        try:
            await self._in_thread(self._spool.finish, self._source_metadata())
            await self._in_thread(self._spool.write_info, self._info(ended=True))
        except DiskFull as exc:
            ending = worse(ending, ending_of_disk(exc))
        self._publish_counts(at_once=True)
        return ending

    def _source_metadata(self) -> dict[str, dict[str, Any]]:
        sources = self._seen.result.sources if self._seen.result else {}
        parts = {name: each.get("metadata") for name, each in sources.items() if isinstance(each, dict)}
        return {name: part for name, part in parts.items() if isinstance(part, dict)}

    def _window(self, *, ended: bool) -> tuple[int, int]:
        """Unix ns; (0, 0) if the window never began."""
        result = self._seen.result
        if result is not None:
            return result.window_start_ns, result.window_end_ns
        if not self._seen.collect_ns:
            return 0, 0
        return self._seen.collect_ns, time.time_ns() if ended else 0

    def _info(self, *, ended: bool = False) -> TargetInfo:
        return describe_target(
            capture_id=self._capture_id,
            host=self._services.host,
            process=self.target.process,
            hello=self.agent.hello,
            start=self.request,
            result=self._seen.result,
            window_ns=self._window(ended=ended),
            labels=self._labels,
            clock=self.clock,
        )

    # the end

    async def _store(self, ending: Ending) -> None:
        """Decodes and gives the verdict."""
        window_start_ns, window_end_ns = self._window(ended=True)
        recorded = self._spool.copied_bytes() > 0 and window_end_ns > window_start_ns
        self._add_result_to_target()
        if ending.outcome is Outcome.DONE and not self._spool.copied_bytes():
            self.target.warnings.append("nothing was recorded: no activity of the wanted types happened in the window")
        converted: Converted | None = None
        decode_error: tuple[str, str] | None = None
        if ending.outcome is Outcome.DONE and not self._spool.counts():
            ending = Ending(Outcome.FAILED, VerdictReason.NOTHING_RECORDED, "the agent announced no source")
        if ending.outcome is Outcome.DONE or (ending.outcome is Outcome.PARTIAL and recorded):
            self._enter(pb.TARGET_STATE_STORE)
            try:
                converted = await convert(self._services, self._spool.directory, self._formats, pid=self.target.pid)
            except DecodeError as exc:
                decode_error = (exc.code, exc.reason)
        verdict = final(
            ending,
            recorded=recorded,
            dropped=self._spool.dropped_records(),
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
        if (result := self._seen.result) is None:
            return
        self.target.warnings.extend(clean(warning, 500) for warning in result.warnings[:_MAX_WARNINGS])
        self.target.overhead.CopyFrom(overhead_of(result.overhead))

    def _end(self, verdict: Final) -> None:
        self.target.verdict = verdict.verdict
        self.target.reason_code = verdict.code
        self.target.reason = verdict.reason
        if self.target.files:
            self.target.stored_ns = time.time_ns()
        self._enter(pb.TARGET_STATE_ENDED)
