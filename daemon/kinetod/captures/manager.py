"""Manages all captures: those that are running and those in the store.

A capture begins at once or, if it was armed, when it is started (`live_capture.Arming`).

A capture is created under a lock, so that one call at a time checks limits, busy processes and idempotency keys.
Finding its processes and attaching agents happens before that, without the lock.
"""

import asyncio
import base64
import binascii
import contextlib
import logging
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace

from kineto_protos.alignment import plan
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.spool.kineto_file import has_request

from kinetod.agents.attacher import Attacher
from kinetod.base import metrics
from kinetod.base.errors import (
    AlreadyExists,
    KinetodError,
    NotFound,
    Precondition,
    Reason,
    Stopping,
    VerdictReason,
    invalid,
)
from kinetod.captures.counters.capture_counters import recover_counters
from kinetod.captures.counters.counter_request import with_plan
from kinetod.captures.kineto_target.kineto_recorder import KinetoRecorder
from kinetod.captures.kineto_target.kineto_result import recover_kineto_target
from kinetod.captures.live_capture import (
    Arming,
    OwnersKey,
    Running,
    TargetRuns,
    TracedTarget,
    new_capture,
    not_startable,
    observed_iterations,
    owner_of,
    whose_are_listed,
)
from kinetod.captures.persistence import Saver
from kinetod.captures.request.capture_spec import (
    CaptureRequest,
    checked_key,
    checked_spec,
    request_hash,
    with_trace_parent,
)
from kinetod.captures.request.target_resolution import (
    PolledTargets,
    Resolved,
    TargetRequest,
    check_known,
    resolve,
    still_there,
)
from kinetod.captures.result.decode_pool import RAW_KEPT
from kinetod.captures.result.fetch import fetch
from kinetod.captures.result.lifecycle import Keeping
from kinetod.captures.result.verdict import KEPT, Ending, EndState, capture_status
from kinetod.captures.store_shares import StoreShares
from kinetod.captures.target.recovery import recover_target
from kinetod.captures.target.services import Services
from kinetod.config.settings import Config, Settings
from kinetod.permissions import caller_limits
from kinetod.permissions.role_policy import Caller, Resource, Role
from kinetod.selection.process_registry import Registry
from kinetod.store.capture_store import Store, key_of
from kinetod.store.path_guard import empty, folder_bytes

MAX_PAGE_BYTES = 3 << 20  # gRPC clients accept 4 MiB by default
log = logging.getLogger(__name__)

DEFAULT_PAGE = 100
MAX_PAGE = 1000
CANCEL_WAIT_S = 10.0
STOP_GRACE_S = 2.0


def fitting(captures: list[pb.Capture]) -> list[pb.Capture]:
    """The leading captures that fit into one message; at least one."""
    total = 0
    for number, capture in enumerate(captures):
        total += capture.ByteSize()
        if total > MAX_PAGE_BYTES and number:
            return captures[:number]
    return captures


def to_token(capture: pb.Capture) -> str:
    """The token of the page after this capture."""
    return base64.urlsafe_b64encode(f"{capture.created_ns}:{capture.id}".encode()).decode()


def from_token(token: str) -> tuple[int, str]:
    """created_ns and id of the last capture on the previous page. Raises InvalidRequest."""
    try:
        created_ns, _, capture_id = base64.urlsafe_b64decode(token.encode()).decode().partition(":")
        return int(created_ns), capture_id
    except (ValueError, binascii.Error) as exc:
        raise invalid(
            "page_token", "is not a page token of this daemon; use the next_page_token of the previous page"
        ) from exc


class CaptureManager:
    """Creates, runs, finds and removes captures."""

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        store: Store,
        services: Services,
        keeping: Keeping,
        attacher: Attacher | None = None,
        recorder: KinetoRecorder | None = None,
    ) -> None:
        self.on_end: Callable[[pb.Capture], None] = lambda _capture: None  # called with each ended capture,
        self.on_answer: Callable[[pb.Capture], None] = lambda _capture: None  # and then, with its answer if it has one
        self._settings = settings
        self._attacher = attacher  # None: only processes with an agent
        self._registry = registry
        self._store = store
        self._services = services
        self._keeping = keeping
        self._saver = Saver(store)
        self._shares = StoreShares(settings, store, keeping.retention, self._live_bytes)
        self._recorder = recorder  # None: no process polls
        self._runs = TargetRuns(store, services, self._shares, recorder)
        self._running: dict[str, Running] = {}
        self._creating = asyncio.Lock()
        self._answering: set[asyncio.Task[None]] = set()
        self._unsaved_answers: dict[str, pb.CaptureAnswer] = {}  # by capture: those that are not yet in the store
        self._stopping = False

    @property
    def _config(self) -> Config:
        return self._settings.current

    @property
    def running(self) -> int:
        """Captures that have not ended."""
        return len(self._running)

    # making

    async def create(
        self,
        spec: pb.CaptureSpec,
        idempotency_key: str,
        caller: Caller,
        *,
        trace_parent: str = "",
        each_by_itself: bool = False,
    ) -> pb.Capture:
        """Creates a capture, or returns the one already created with this key. Raises KinetodError.

        trace_parent: of the caller's call; it becomes a label and is not part of the request that a key identifies.
        each_by_itself: whether named processes that cannot be traced are FAILED targets, rather than an error.
        """
        requested_ns = time.time_ns()
        digest = request_hash(spec)
        key = OwnersKey(checked_key(idempotency_key), owner_of(caller))
        with contextlib.ExitStack() as holds:
            try:
                if before := await self._before(key, digest):
                    return before
                request = checked_spec(spec, self._config, time.time_ns())
                self._check_count(caller)
                await self._shares.check(caller, owner_of(caller))
                if request.counters is not None and self._services.counters is not None:
                    sampled = await with_plan(self._services.counters.client, request.counters)
                    request = replace(request, counters=sampled)
                wanted = self._wanted(spec, request, caller, each_by_itself)
                targets = await resolve(self._registry, wanted, holds)
                check_known(
                    request.recording.activity_types, [target.agent for target in targets], self._services.plugins
                )
            except KinetodError:
                # created in between, which may be the cause of the problem
                if before := await self._before(key, digest):
                    return before
                raise
            labelled = with_trace_parent(spec, trace_parent)
            return await self._create(labelled, request, wanted, targets, requested_ns, key=key, digest=digest)

    def _wanted(
        self, spec: pb.CaptureSpec, request: CaptureRequest, caller: Caller, each_by_itself: bool
    ) -> TargetRequest:
        return TargetRequest(
            match=request.match,
            caller=caller,
            attacher=None if request.no_attach else self._attacher,
            keep_agent_ns=request.keep_agent_ns,
            each_by_itself=each_by_itself,
            polled=PolledTargets(self._recorder, spec, self._config.dynolog_tracing),
        )

    async def _create(
        self,
        spec: pb.CaptureSpec,
        request: CaptureRequest,
        wanted: TargetRequest,
        targets: list[Resolved],
        requested_ns: int,
        *,
        key: OwnersKey,
        digest: str,
    ) -> pb.Capture:
        caller = wanted.caller
        async with self._creating:
            if before := await self._before(key, digest):
                return before
            self._check_count(caller)
            targets = still_there(self._registry, wanted, targets)
            host, owner_uid = self._services.host, owner_of(caller)
            capture = new_capture(spec, targets, host=host, requested_ns=requested_ns, owner_uid=owner_uid)
            running = Running(capture, unlimited=Role.ADMIN in caller.roles)
            await self._store.run(self._store.insert, capture, key=key.stored, request_hash=digest)
            self._running[capture.id] = running
            running.runs = self._runs.new(running, request, targets, caller)
            if spec.arm_ns:
                running.arming = Arming(capture, running.runs, running.watchers.renewed)
            running.task = asyncio.create_task(self._run(running), name=f"capture {capture.id}")
        return _copy(capture)

    async def start(self, request: pb.StartCaptureRequest) -> pb.Capture:
        """Starts an armed capture; repeating the same request just returns it. Raises KinetodError."""
        now_ns = time.time_ns()
        running = self._running.get(request.id)
        if running is None or running.arming is None or not running.arming.waits:
            return await self._not_started(request, running)
        running.arming.start(request, self._config, now_ns)
        log.info("capture %s has been started", request.id)
        try:
            await self._store.run(self._store.save_start, request)
        # the traces have the clock, and the end of the capture is stored as soon as possible
        except KinetodError as exc:
            log.error("%s", exc)
        return _copy(running.capture)

    async def _not_started(self, request: pb.StartCaptureRequest, running: Running | None) -> pb.Capture:
        capture = await self.get(request.id)
        before = running.started_by if running is not None else None
        before = before or await self._store.run(self._store.start_of, request.id)
        if before != request:
            raise not_startable(capture, before)
        return capture

    async def _before(self, key: OwnersKey, digest: str) -> pb.Capture | None:
        """The capture already created with this key, if any. Raises AlreadyExists, Stopping."""
        if self._stopping:
            raise Stopping
        before = await self._store.run(self._store.by_key, key.stored) if key.text else None
        if before is None:
            return None
        capture_id, its_digest = before
        if its_digest != digest:
            raise AlreadyExists(
                Reason.IDEMPOTENCY_KEY_REUSED,
                f"the idempotency key {key.text!r} was already used for another request (capture "
                f"{capture_id}); use a new key",
                capture_id=capture_id,
            )
        return await self.get(capture_id)

    def _check_count(self, caller: Caller) -> None:
        owner = owner_of(caller)
        own = sum(running.capture.owner_uid == owner for running in self._running.values())
        config = self._config
        most_own, most = config.max_captures_per_user, config.max_captures
        caller_limits.check_captures(caller, own, len(self._running), most_own=most_own, most=most)

    def _live_bytes(self) -> Mapping[int, int]:
        """Bytes written by running captures, by user. Callable from any thread."""
        live = Counter[int]()
        for running in list(self._running.values()):
            decoded = self._services.workers.written(self._store.capture_dir(running.capture.id))
            sampled = running.counters.bytes_written if running.counters is not None else 0
            live[running.capture.owner_uid] += running.live_bytes + sampled + decoded
        return live

    # running

    async def _run(self, running: Running) -> None:
        capture = running.capture
        numbers = {id(target): number for number, target in enumerate(capture.targets)}
        how = "is waiting to be started" if running.waits else "is starting"
        log.info("capture %s %s (targets: %d)", capture.id, how, len(capture.targets))

        async def run_one(run: TracedTarget) -> None:
            await run.wait_until_begun()
            await run.run()
            await self._saver.target(running, numbers[id(run.target)], run.garbage)

        beginning = asyncio.create_task(self._begin(running), name=f"beginning of {capture.id}")
        try:
            await asyncio.gather(*(run_one(run) for run in running.runs))
        finally:
            beginning.cancel()
        await self._end(running)

    async def _begin(self, running: Running) -> None:
        """Lets the targets begin, at once or when the armed capture is started."""
        if running.arming is not None:
            await running.arming.started()
        await running.begin_counters()
        try:
            if running.started_by is None or not running.started_by.iterations:
                await self._align([run for run in running.runs if not run.is_over])
        except Exception:
            log.exception("capture %s: its processes could not be aligned on common iterations", running.capture.id)
        for run in running.runs:
            if not run.is_over:
                run.begin()

    async def _align(self, runs: list[TracedTarget]) -> None:
        """Agrees on common iterations for all targets of a capture by iteration."""
        agents = [run.agent for run in runs if run.agent is not None]
        if len(runs) < 2 or len(agents) < len(runs) or runs[0].request.iterations is None:
            return
        samples = await observed_iterations(agents, lambda: not all(run.is_over for run in runs))
        if not samples:
            return
        comparable = all(agent.attached is None for agent in agents)
        patience_ns = self._config.max_duration_ns
        aligned = plan(samples, runs[0].request, comparable=comparable, patience_ns=patience_ns)
        for run, each in zip(runs, aligned, strict=True):
            if not run.is_over:
                run.align(each)

    async def _end(self, running: Running) -> None:
        capture = running.capture
        if running.arming is not None:
            running.arming.close()
        if running.counters is not None:
            await running.counters.ended()
        capture.ended_ns = time.time_ns()
        capture.status = capture_status(target.verdict for target in capture.targets)
        capture.local_bytes = await asyncio.to_thread(folder_bytes, self._store.capture_dir(capture.id))
        saved = await self._saver.end(running)
        running.watchers.ended()
        metrics.capture_ended(capture)
        self.on_end(capture)
        log.info("capture %s: %s", capture.id, pb.CaptureStatus.Name(capture.status))
        if not saved or running.unsaved:
            await self._saver.late(running, saved)
        del self._running[capture.id]
        self._keeping.ended(capture)
        answering = asyncio.create_task(self._answer(capture), name=f"answer about {capture.id}")
        self._answering.add(answering)
        answering.add_done_callback(self._answering.discard)
        with contextlib.suppress(KinetodError):  # the next caller retries it
            await self._shares.refresh()

    async def _answer(self, capture: pb.Capture) -> None:
        """Finds out where the time of an ended capture went, and stores it."""
        try:
            decoded = [self._store.target_dir(capture.id, key_of(each)) for each in capture.targets if each.files]
            found = await self._services.workers.answer(self._store.capture_dir(capture.id), decoded)
            if decoded:
                # Clients wait until get() has an answer, so it has an empty one, too. get() reads the store, and this
                # dictionary as long as the store has no room for the answer.
                capture.answer.CopyFrom(found or pb.CaptureAnswer())
                self._unsaved_answers[capture.id] = capture.answer
        finally:
            self.on_answer(capture)
        if decoded:
            await self._saver.answer(capture)
            del self._unsaved_answers[capture.id]

    async def recover(self) -> None:
        """Ends the captures that the previous daemon left unfinished; decoding continues in the background."""
        await self._store.run(self._store.clean_up)
        for capture in await self._store.run(self._store.unfinished):
            running = self._running[capture.id] = Running(capture)
            running.task = asyncio.create_task(self._recover(running), name=f"recovery {capture.id}")

    async def _recover(self, running: Running) -> None:
        capture = running.capture
        log.info("capture %s was running when the previous daemon ended; recovering it", capture.id)
        armed = capture.spec.arm_ns > 0 and await self._store.run(self._store.start_of, capture.id) is None
        if capture.spec.HasField("counters"):
            await asyncio.to_thread(
                recover_counters, capture, lambda target: self._store.target_dir(capture.id, key_of(target))
            )
        for number, target in enumerate(capture.targets):
            directory = self._store.target_dir(capture.id, key_of(target))
            if target.verdict != pb.VERDICT_UNSPECIFIED:
                if RAW_KEPT not in target.reason:  # the daemon may have ended between the verdict and the clean-up
                    leftover = directory / "raw" if target.files else directory
                    await asyncio.to_thread(shutil.rmtree, leftover, ignore_errors=True)
                continue
            formats = tuple(capture.spec.formats)
            if self._recorder is not None and has_request(directory):
                garbage = await recover_kineto_target(self._services, self._recorder, target, directory, formats)
            else:
                garbage = await recover_target(self._services, target, directory, formats, armed=armed)
            running.watchers.changed(number)
            await self._saver.target(running, number, garbage)
        await self._end(running)

    # finding

    async def get(self, capture_id: str) -> pb.Capture:
        """One capture as it is now. Raises NotFound."""
        if running := self._running.get(capture_id):
            return _copy(running.capture)
        capture = await self._store.run(self._store.get, capture_id)
        if capture is None:
            raise no_such_capture(capture_id)
        return self._annotated(capture)

    def _annotated(self, capture: pb.Capture) -> pb.Capture:
        """Adds to a capture from the store what is not stored there: an unsaved answer, and the upload state."""
        if answer := self._unsaved_answers.get(capture.id):
            capture.answer.CopyFrom(answer)
        return self._keeping.annotate(capture)

    async def observed(self, capture_id: str) -> pb.Capture:
        """Like `get`, but refreshes the iteration counts of an armed capture by iteration first."""
        running = self._running.get(capture_id)
        if running is not None and running.arming is not None and running.arming.waits:
            await running.arming.observe()
        return await self.get(capture_id)

    async def resource(self, capture_id: str) -> Resource | None:
        """The facts about a capture that access decisions use; None if it does not exist."""
        if running := self._running.get(capture_id):
            capture = running.capture
            return Resource(uid=capture.owner_uid if capture.HasField("owner_uid") else None)
        return await self._store.run(self._store.owner, capture_id)

    async def page(
        self, labels: Mapping[str, str], size: int, token: str, caller: Caller
    ) -> tuple[list[pb.Capture], str]:
        """One page of the captures that the caller may see, newest first, and the token of the next ("" at the end).

        Raises InvalidRequest.
        """
        if size < 0:
            raise invalid("page_size", f"must not be negative, got {size}")
        size = min(size or DEFAULT_PAGE, MAX_PAGE)
        before = from_token(token) if token else None
        only_uid = whose_are_listed(caller)
        found = await self._store.run(self._store.page, labels, size=size + 1, before=before, only_uid=only_uid)
        captures = [
            self._running[each.id].capture if each.id in self._running else self._annotated(each)
            for each in found[:size]
        ]
        captures = fitting(captures)
        return captures, to_token(captures[-1]) if len(found) > len(captures) else ""

    async def watch(self, capture_id: str) -> AsyncIterator[pb.CaptureEvent]:
        """Yields a snapshot, the changes, and a final snapshot. Raises NotFound, Stopping."""
        running = self._running.get(capture_id)
        if running is None:
            yield pb.CaptureEvent(snapshot=await self.get(capture_id))
            return
        async for event in running.watchers.events(lambda: self._stopping and running.capture.ended_ns == 0):
            yield event
        if running.capture.ended_ns == 0:
            raise Stopping

    # ending

    async def cancel(self, capture_id: str, *, keep_partial: bool) -> pb.Capture:
        """Stops every target and waits up to CANCEL_WAIT_S for them to end; an ended capture is unchanged."""
        running = self._running.get(capture_id)
        if running is not None and running.task is not None:
            keep = keep_partial and not running.waits  # a capture that waits for its start has nothing to keep
            how = f"cancelled{KEPT}" if keep else "cancelled"
            outcome = EndState.PARTIAL if keep else EndState.CANCELLED
            for run in running.runs:
                run.stop(Ending(outcome, VerdictReason.CANCELLED, how))
            await asyncio.wait([running.task], timeout=CANCEL_WAIT_S)
        return await self.get(capture_id)

    async def delete(self, capture_id: str, *, keep_uploaded: bool = False) -> None:
        """Deletes an ended capture. Raises NotFound, and Precondition while it runs or is pinned."""
        running = self._running.get(capture_id)
        if running is not None and running.task is not None and running.capture.ended_ns:  # it is being saved
            if not running.capture.pinned:  # a full disk, perhaps full of these very files, has no room for that
                await asyncio.to_thread(empty, self._store.capture_dir(capture_id))
            await asyncio.wait([running.task], timeout=CANCEL_WAIT_S)
        if capture_id in self._running:
            what = "is running; cancel it first"
            if running is not None and running.capture.ended_ns:
                what = f"has ended, but its end cannot be stored yet; is the disk of {self._store.state_dir} full?"
            raise Precondition(Reason.CAPTURE_RUNNING, f"capture {capture_id} {what}", capture_id=capture_id)
        await self._keeping.delete(await self.get(capture_id), keep_uploaded=keep_uploaded)

    async def pin(self, capture_id: str, caller: Caller, *, pinned: bool) -> pb.Capture:
        """Pins a capture against retention, or unpins it. Raises NotFound, Exhausted."""
        capture = await self.get(capture_id)
        if pinned and not capture.pinned:
            owner_uid = capture.owner_uid if capture.HasField("owner_uid") else None
            await self._shares.check_pin(caller, owner_uid, capture.local_bytes)
        await self._keeping.pin(capture, pinned)
        if running := self._running.get(capture_id):
            running.capture.pinned = pinned
        return await self.get(capture_id)

    async def verify(self, capture_id: str, *, uploaded: bool) -> AsyncIterator[pb.FileCheck]:
        """Rereads and checks every stored file. Raises NotFound, Precondition."""
        async for check in self._keeping.verify(await self.get(capture_id), uploaded=uploaded):
            yield check

    async def fetch(self, request: pb.FetchTraceRequest) -> AsyncIterator[pb.TraceChunk]:
        """The bytes of one file. Raises KinetodError."""
        async for chunk in fetch(self._store, self._keeping.remote, await self.get(request.capture_id), request):
            yield chunk

    async def stop(self, grace_s: float) -> None:
        """Ends all captures and keeps what can be decoded within grace_s; the next daemon recovers the rest."""
        self._stopping = True
        tasks = [running.task for running in self._running.values() if running.task is not None]
        for running in self._running.values():
            outcome, reason = EndState.PARTIAL, f"the daemon was stopped{KEPT}"
            if running.waits:
                outcome, reason = EndState.FAILED, "the daemon was stopped while the capture was waiting to be started"
            for run in running.runs:
                run.stop(Ending(outcome, VerdictReason.DAEMON_STOPPED, reason), grace_s=STOP_GRACE_S)
        if tasks:
            _, unfinished = await asyncio.wait(tasks, timeout=grace_s)
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for running in self._running.values():
            running.watchers.ended()
            if running.counters is not None:
                running.counters.abandon()
        for answering in self._answering:
            answering.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)


def _copy(capture: pb.Capture) -> pb.Capture:
    copy = pb.Capture()
    copy.CopyFrom(capture)
    return copy


def no_such_capture(capture_id: str) -> NotFound:
    """NotFound for a capture that does not exist or is hidden from the caller."""
    return NotFound(
        Reason.NO_SUCH_CAPTURE,
        f"no capture {capture_id[:80]!r} is visible to you; `kinetoctl captures list` shows the visible ones",
    )
