"""A capture that has not ended: its initial state and owner, the interface to its targets, and its watchers.

Theory of operation
    Each target is recorded by its agent, or by its own libkineto: `TargetRuns` creates the runs of a new capture.

    Each watcher has one flag per target, so that a slow watcher costs nothing.

    A client that traces many hosts at once arms a capture on each, checks the results, and starts them all at one time
    (by each host's clock) or at one iteration. Until then the processes have agents that are not asked, and the targets
    are PENDING and busy with this capture. An `Arming` lasts until the capture is started, its time is up, or no target
    is left, because of a cancellation, the daemon's stop or the end of the processes. A target that is over ends at
    once, independently of the others.
"""

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from kineto_agent.protocol import wire
from kineto_protos.alignment import NEVER, Aligned, Sample
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.quantities import format_duration, format_size
from kineto_trace.model.target_info import MAX_OFFSET_NS

from kinetod.agents.agent_hub import ConnectedAgent
from kinetod.attach.attach_types import Approval
from kinetod.base.errors import Precondition, Reason, VerdictReason, invalid
from kinetod.captures.counters.capture_counters import AGREED_S, BEGIN_S, CaptureCounters, CounterSource, file_bytes
from kinetod.captures.counters.counter_request import SamplingRequest
from kinetod.captures.kineto_target.kineto_recorder import KinetoRecorder
from kinetod.captures.kineto_target.kineto_run import KinetoRun
from kinetod.captures.request.capture_spec import MAX_ITERATIONS, CaptureRequest, check_start_time
from kinetod.captures.request.target_resolution import Resolved
from kinetod.captures.result.verdict import Ending, EndState
from kinetod.captures.store_shares import StoreShares
from kinetod.captures.target.collection import STOP_GRACE_S
from kinetod.captures.target.record_spool import DiskFull, stored_bytes
from kinetod.captures.target.services import Services
from kinetod.captures.target.target_run import TargetRun
from kinetod.config.settings import Config
from kinetod.permissions.role_policy import Action, Caller, sees_all
from kinetod.store.capture_store import Store, key_of

OBSERVED_S = 0.2
SAMPLES = 5
FIRST_STEP_S = 5.0  # for the first iteration that a new agent sees
_MAX_ITERATION = 2**53  # values from an agent are untrusted
NOBODY = -1


def new_capture(
    spec: pb.CaptureSpec, targets: Sequence[Resolved], *, host: str, requested_ns: int, owner_uid: int
) -> pb.Capture:
    """Builds a new capture: its targets are pending, and those with a problem have already ended with it."""
    now_ns = time.time_ns()
    capture = pb.Capture(
        id=new_id(now_ns),
        spec=spec,
        status=pb.CAPTURE_STATUS_RUNNING,
        created_ns=now_ns,
        host=host,
        owner_uid=owner_uid,
        armed_until_ns=now_ns + spec.arm_ns if spec.arm_ns else 0,
    )
    for resolved in targets:
        process = resolved.process
        target = capture.targets.add(pid=process.pid, start_time_ns=process.start_time_ns, process=process)
        target.state = pb.TARGET_STATE_PENDING
        target.state_since_ns = now_ns
        target.requested_ns = requested_ns
        target.recorder = resolved.records
        target.warnings.extend(resolved.warnings)
        if resolved.problem is not None:
            target.state = pb.TARGET_STATE_ENDED
            target.verdict = pb.VERDICT_FAILED
            target.reason_code = resolved.problem.reason
            target.reason = resolved.problem.message
        if (attached := resolved.attached) is not None:
            target.attach.method = attached.method
            target.attach.latency_ns = attached.latency_ns
            target.attach.stopped_ns = attached.stopped_ns
    return capture


def new_id(now_ns: int) -> str:
    """A capture id that sorts by time, such as 20260131-235959-123-9f86d0."""
    when = datetime.fromtimestamp(now_ns // 10**9, timezone.utc)
    return f"{when:%Y%m%d-%H%M%S}-{now_ns // 10**6 % 1000:03d}-{secrets.token_hex(3)}"


class OwnersKey(NamedTuple):
    """An idempotency key, scoped to its owner."""

    text: str
    owner_uid: int

    @property
    def stored(self) -> str:
        """The key in its form in the index; "" for none."""
        return f"{self.owner_uid}:{self.text}" if self.text else ""


def owner_of(caller: Caller) -> int:
    """The uid that owns the caller's captures; the daemon's own for a certificate that maps to no user."""
    return os.geteuid() if caller.uid is None else caller.uid


def whose_are_listed(caller: Caller) -> int | None:
    """The uid whose captures the caller may list; None for all users'."""
    if sees_all(caller, Action.SEE_CAPTURE):
        return None
    return NOBODY if caller.uid is None else caller.uid


class TracedTarget(Protocol):
    """Runs one target of one capture; implemented by `target.target_run` and `kineto_target.kineto_run`.

    target: its public state. garbage: path to remove once the verdict is stored. clock: this host's, as measured by the
    caller. request: when and for how long to record; it may be changed until `begin`.
    """

    target: pb.Target
    garbage: Path | None
    clock: pb.ClockOffset | None

    @property
    def agent(self) -> ConnectedAgent | None:
        """The recording agent; None: libkineto, whose iterations are unknown."""

    @property
    def request(self) -> wire.Start:
        """The request for the recorder."""

    @request.setter
    def request(self, request: wire.Start) -> None: ...

    @property
    def is_over(self) -> bool:
        """Whether the target is ending or has ended."""

    def attach(self) -> None:
        """Marks the process as busy with this capture."""

    async def wait_until_begun(self) -> None:
        """Waits, before `run`, until `begin` is called or the target is over."""

    def begin(self) -> None:
        """Allows the recorder to be asked."""

    def align(self, aligned: Aligned) -> None:
        """Sets, before `begin`, the common iterations of this capture's targets."""

    def stop(self, ending: Ending, *, grace_s: float = STOP_GRACE_S) -> None:
        """Ends the recording, as far as the recorder can be stopped."""

    async def run(self) -> None:
        """Runs, after `attach`, until the target has its verdict. Raises only CancelledError."""


async def observed_iterations(agents: Sequence[ConnectedAgent], is_wanted: Callable[[], bool]) -> list[Sample]:
    """Samples the iteration of each agent over OBSERVED_S; a new agent gets up to FIRST_STEP_S for its first one.

    Ends early when `is_wanted` returns False. An agent that does not answer keeps its count.
    """
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + FIRST_STEP_S
    samples: list[Sample] = []
    while is_wanted():
        await asyncio.wait([agent.ask() for agent in agents], timeout=OBSERVED_S)
        counts = tuple(min(agent.hello.iterations, _MAX_ITERATION) for agent in agents)
        samples.append(Sample(time.monotonic_ns(), counts))
        if len(samples) >= SAMPLES and (not _is_awaited(agents) or loop.time() >= give_up_at):
            break
        await asyncio.sleep(OBSERVED_S / (SAMPLES - 1))
    return samples[-SAMPLES:]


def _is_awaited(agents: Sequence[ConnectedAgent]) -> bool:
    """Whether an agent attached to a torch program has yet to see its first iteration."""
    return any(
        agent.attached is not None and agent.hello.framework and agent.hello.iterations == NEVER for agent in agents
    )


class Arming:
    """A capture that waits to be started. on_change is called when the capture itself changes, not only a target."""

    def __init__(self, capture: pb.Capture, runs: Sequence[TracedTarget], on_change: Callable[[], None]) -> None:
        self.request: pb.StartCaptureRequest | None = None  # the request that has started it
        self._capture = capture
        self._runs = runs
        self._on_change = on_change
        self._started = asyncio.Event()
        self._timer = asyncio.get_running_loop().call_later(capture.spec.arm_ns / 1e9, self._expire)

    @property
    def waits(self) -> bool:
        """Whether it can be started."""
        return self.request is None and any(not run.is_over for run in self._runs)

    async def started(self) -> None:
        """Waits until the capture is started; never returns if nobody starts it."""
        await self._started.wait()

    def start(self, request: pb.StartCaptureRequest, config: Config, now_ns: int) -> None:
        """Lets the remaining targets begin as requested. Valid only while it `waits`. Raises InvalidRequest."""
        check_start(request, self._capture, config, now_ns)
        self.request = request
        comparable = all(run.agent is not None and run.agent.attached is None for run in self._runs)
        iterations = {each.pid: each for each in request.iterations}
        for run in self._runs:
            if run.is_over:
                continue
            run.target.requested_ns = now_ns
            run.request = run.request._replace(start_time_ns=request.start_time_ns)
            if request.HasField("clock"):
                run.clock = request.clock
            if (own := iterations.get(run.target.pid)) is not None:
                roundup = run.request.iteration_roundup if comparable else 0  # the agent rounds again if it is late
                run.align(Aligned(start_iteration=own.start, roundup=roundup, warmup_iterations=own.warmup))
        if request.HasField("clock"):
            self._capture.clock.CopyFrom(request.clock)
        self.close()
        self._on_change()
        self._started.set()

    async def observe(self) -> None:
        """Updates how many iterations each target has finished, if the capture is by iteration."""
        runs = [run for run in self._runs if not run.is_over and run.request.iterations is not None]
        agents = [(run.target, run.agent) for run in runs if run.agent is not None]
        if agents:
            await asyncio.wait([agent.ask() for _, agent in agents], timeout=OBSERVED_S)
        for target, agent in agents:
            target.process.iterations = min(agent.hello.iterations, _MAX_ITERATION)

    def _expire(self) -> None:
        waited = format_duration(self._capture.spec.arm_ns)
        reason = (
            f"nobody started the armed capture within {waited}; the command that armed it may have ended or lost its "
            "connection to this host. Trace again; if the other hosts are slow to arm, arm it for longer"
        )
        for run in self._runs:
            run.stop(Ending(EndState.CANCELLED, VerdictReason.NOT_STARTED, reason))
        self.close()
        self._on_change()

    def close(self) -> None:
        """Stops waiting, for whatever reason."""
        self._timer.cancel()
        self._capture.armed_until_ns = 0


def check_start(request: pb.StartCaptureRequest, capture: pb.Capture, config: Config, now_ns: int) -> None:
    """Checks that an armed capture can start as requested. Raises InvalidRequest."""
    check_start_time("start_time_ns", request.start_time_ns, capture.spec, config, now_ns)
    if request.iterations and capture.spec.WhichOneof("extent") != "iterations":
        raise invalid(
            "iterations",
            f"capture {capture.id} records for a duration, not by iteration; set start_time_ns instead, or leave "
            "both out",
        )
    pids = {target.pid for target in capture.targets}
    seen = set[int]()
    for index, each in enumerate(request.iterations):
        field = f"iterations[{index}]"
        if each.pid not in pids:
            raise invalid(f"{field}.pid", f"process {each.pid} is not a target of capture {capture.id}")
        if each.pid in seen:
            raise invalid(f"{field}.pid", f"process {each.pid} is listed twice")
        seen.add(each.pid)
        if not 0 <= each.start <= _MAX_ITERATION:
            raise invalid(f"{field}.start", f"must be 0 to {_MAX_ITERATION}, got {each.start}")
        if not 0 <= each.warmup <= MAX_ITERATIONS:
            raise invalid(f"{field}.warmup", f"must be 0 to {MAX_ITERATIONS}, got {each.warmup}")
    offset_ns, uncertainty_ns = request.clock.offset_ns, request.clock.uncertainty_ns
    if abs(offset_ns) >= MAX_OFFSET_NS:
        raise invalid("clock.offset_ns", f"must be {1 - MAX_OFFSET_NS} to {MAX_OFFSET_NS - 1}, got {offset_ns}")
    if not 0 <= uncertainty_ns < MAX_OFFSET_NS:
        raise invalid("clock.uncertainty_ns", f"must be 0 to {MAX_OFFSET_NS - 1}, got {uncertainty_ns}")


def not_startable(capture: pb.Capture, started: pb.StartCaptureRequest | None) -> Precondition:
    """The error for a capture that cannot be started. started: the request that started it earlier, if any."""
    if started is not None:
        return Precondition(
            Reason.CAPTURE_STARTED,
            f"capture {capture.id} has already been started with a different request; watch it, or cancel it "
            "and arm a new one",
            capture_id=capture.id,
        )
    if not capture.spec.arm_ns:
        why = "it was created without arm_ns and started immediately"
    else:
        why = next(
            (target.reason for target in capture.targets if target.reason), "its targets have ended or are ending"
        )
    return Precondition(
        Reason.CAPTURE_NOT_ARMED,
        f"capture {capture.id} is not waiting to be started: {why}",
        capture_id=capture.id,
    )


class Watchers:
    """The watchers of one capture."""

    def __init__(self, capture: pb.Capture) -> None:
        self._capture = capture
        self._watching: set[_Watch] = set()

    def changed(self, number: int) -> None:
        """One target has changed."""
        for watch in self._watching:
            watch.dirty.add(number)
            watch.wake.set()

    def renewed(self) -> None:
        """More than one target has changed, so watchers get a whole snapshot."""
        for watch in self._watching:
            watch.whole = True
            watch.wake.set()

    def ended(self) -> None:
        """The capture has ended."""
        for watch in self._watching:
            watch.wake.set()

    async def events(self, is_over: Callable[[], bool]) -> AsyncIterator[pb.CaptureEvent]:
        """Yields a snapshot, the latest state of changed targets, and a snapshot at an armed start and at the end.

        Intermediate states may be skipped.
        """
        watch = _Watch()
        self._watching.add(watch)
        try:
            yield pb.CaptureEvent(snapshot=self._capture)
            while self._capture.status == pb.CAPTURE_STATUS_RUNNING:
                await watch.wake.wait()
                watch.wake.clear()
                if watch.whole:
                    watch.whole = False
                    watch.dirty.clear()
                    yield pb.CaptureEvent(snapshot=self._capture)
                while watch.dirty:
                    number = min(watch.dirty)
                    watch.dirty.discard(number)
                    yield pb.CaptureEvent(target=self._capture.targets[number])
                if is_over():
                    return
            yield pb.CaptureEvent(snapshot=self._capture)
        finally:
            self._watching.discard(watch)


class _Watch:
    def __init__(self) -> None:
        self.dirty: set[int] = set()
        self.whole = False
        self.wake = asyncio.Event()


class Running:
    """Internal state of a capture that has not ended."""

    def __init__(self, capture: pb.Capture, *, unlimited: bool = False) -> None:
        self.capture = capture
        self.live_bytes = 0  # of records, written so far
        self.unlimited = unlimited  # of an administrator: not limited to a share of the store
        self.watchers = Watchers(capture)
        self.runs: list[TracedTarget] = []
        self.counters: CaptureCounters | None = None  # None: hardware counters were not requested
        self.arming: Arming | None = None  # None: it began at once
        self.task: asyncio.Task[None] | None = None
        self.unsaved: dict[int, Path | None] = {}  # numbers of targets whose verdict is not stored, and their garbage

    @property
    def waits(self) -> bool:
        """Whether it is armed and not started."""
        return self.arming is not None and self.arming.waits

    @property
    def started_by(self) -> pb.StartCaptureRequest | None:
        """The request that started it, if it was armed and has been started."""
        return self.arming.request if self.arming is not None else None

    async def begin_counters(self) -> None:
        """Starts sampling hardware counters, if requested, as long as the start of the capture can wait."""
        if self.counters is None:
            return
        asked, spec = self.started_by, self.capture.spec
        start_ns = asked.start_time_ns if asked is not None else spec.start_time_ns
        agreed = asked is not None and bool(asked.iterations)  # with other hosts, which do not wait
        await self.counters.begin(
            max(1, start_ns - spec.warmup_ns) if start_ns else 0,
            patience_s=AGREED_S if agreed else BEGIN_S,
            asked_anew=asked is not None,  # kinetod-counters may answer by now
        )


class TargetRuns:
    """Creates runs. recorder: None if no process polls."""

    def __init__(self, store: Store, services: Services, shares: StoreShares, recorder: KinetoRecorder | None) -> None:
        self._store = store
        self._services = services
        self._shares = shares
        self._recorder = recorder

    def new(
        self, running: Running, request: CaptureRequest, targets: Sequence[Resolved], caller: Caller
    ) -> list[TracedTarget]:
        """Creates the runs of the targets without a problem, whose processes are busy from now on."""
        if request.counters is not None and self._services.counters is not None:
            running.counters = self._sampled(running, request.counters, self._services.counters, caller)
        runs = []
        for number, resolved in enumerate(targets):
            if resolved.problem is None:
                run = self._run(running, request, number, resolved)
                run.attach()
                runs.append(run)
        return runs

    def _sampled(
        self, running: Running, request: SamplingRequest, source: CounterSource, caller: Caller
    ) -> CaptureCounters:
        config, owner_uid = self._services.config, running.capture.owner_uid

        def check() -> None:
            try:
                self._shares.check_left(owner_uid, admin=running.unlimited)
            except DiskFull as exc:
                raise OSError(str(exc)) from exc
            if self._services.free_bytes() <= config.min_free_bytes:
                raise OSError(f"less than {format_size(config.min_free_bytes)} is free (kinetod --min-free-bytes)")

        return CaptureCounters(
            source,
            request,
            capture=running.capture,
            caller=caller,
            max_bytes=file_bytes(config.max_trace_bytes),
            check=check,
            on_change=running.watchers.renewed,
        )

    def _run(self, running: Running, request: CaptureRequest, number: int, resolved: Resolved) -> TracedTarget:
        capture = running.capture
        target = capture.targets[number]

        def changed() -> None:
            running.live_bytes = sum(stored_bytes(each) for each in capture.targets)
            running.watchers.changed(number)

        directory = self._store.target_dir(capture.id, key_of(target))
        check_share = partial(self._shares.check_left, capture.owner_uid, admin=running.unlimited)
        counters = running.counters.add(target.pid, directory) if running.counters is not None else None
        if resolved.polling is not None:
            assert self._recorder is not None and resolved.approved is not None  # otherwise it has a problem
            return KinetoRun(
                self._services,
                self._recorder,
                capture_id=capture.id,
                target=target,
                process=resolved.polling,
                start=request.recording._replace(capture_id=capture.id),
                spec=capture.spec,
                formats=request.formats,
                directory=directory,
                approval=Approval(resolved.approved, resolved.administrator),
                on_change=changed,
                check_share=check_share,
                counters=counters,
            )
        assert resolved.agent is not None  # otherwise it has a problem
        return TargetRun(
            self._services,
            capture_id=capture.id,
            target=target,
            agent=resolved.agent,
            start=request.recording._replace(capture_id=capture.id),
            formats=request.formats,
            labels=dict(capture.spec.labels),
            directory=directory,
            on_change=changed,
            check_share=check_share,
            approved=resolved.approved,
            counters=counters,
        )
