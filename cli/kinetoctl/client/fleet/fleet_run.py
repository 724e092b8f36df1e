"""A capture of many hosts: armed on all of them, started on all at the same time, followed to its end.

Theory of operation
    arm       CreateCapture on every host: it finds its processes, attaches agents, and waits. Hosts that fail are
              noted. Once more than half are ready, the others get as much time again, in total at least STRAGGLER_S;
              with --require all they get the whole time limit. A host that was left out releases its processes on its
              own, because an armed capture expires.
    clocks    A few round trips to two hosts at a time, so that they do not wait for each other in this process, which
              would count as uncertainty. That matters less for distant hosts, so more of these are asked at once.
    start     StartCapture on every host, for the same time by each host's own clock, or for the same iteration.
    follow    WatchCapture on every host. Streams are reopened every WATCH_S, to notice hosts that have died silently
              and to catch up on missed changes. A host that stays unreachable is lost: its processes have no verdict,
              and are never reported as done.
    clocks    Again, because clocks move.

    The daemons own the captures: they end even if this client exits. The first Ctrl-C stops the capture on all
    hosts, keeps what was recorded and follows until that is stored; the second exits.
"""

import asyncio
import contextlib
import signal
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kineto_protos.alignment import NEVER, Sample, plan
from kineto_protos.call_values import ANY_RANK
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.quantities import format_duration
from kineto_trace.store.upload_manifest import FLEET_LABEL

from kinetoctl.client import enum_names
from kinetoctl.client.daemon_client import RETRYABLE, Patience
from kinetoctl.client.fleet.host_client import CALLS_AT_ONCE, HostClient, close_all, connected, run
from kinetoctl.client.fleet.host_run import (
    FAR_NS,
    Fleet,
    FleetProgress,
    HostRun,
    Offset,
    Rank,
    RoundTrip,
    UnusableClock,
    joined,
    measured,
    stored_clock,
)
from kinetoctl.client.host_targets import Place
from kinetoctl.client.tracing import apply_event, has_ended
from kinetoctl.errors import CliError, Refused, TimedOut, Unreachable, UsageProblem

FIRST_CLOCKS_AT_ONCE, NEAR_CLOCKS_AT_ONCE, FAR_CLOCKS_AT_ONCE = 16, 2, 32
FAR_TRIP_NS = 10_000_000
NEAR_S, FAR_S = 0.02, 1.0  # time limit of the round trips to one host, beyond the fewest
FEWEST_TRIPS, ROUND_TRIPS = 2, 7  # after the first one
SLOW_TRIPS = 3  # a host whose trips are this many times slower than usual is measured again
STRAGGLER_S = 5.0
LEAVE_S = 2.0
ARMED_FOR_S = 30.0  # in addition to the time limit of the calls
START_LATE_S = 2.0  # a start must be confirmed within this time after it was due
WATCH_S = 20.0
ALIVE_S = 10.0  # limit for the answer of a daemon that has been silent
SAMPLES = 4  # of the iterations
SAMPLE_PAUSE_S = 0.1
FIRST_STEP_S = 5.0  # limit for the first iteration that a new agent sees
MEET_WITHIN_NS = 600 * 10**9  # for processes to reach a common iteration: the default limit of the daemons
WARMUP_NS = 500_000_000  # the sources record before the window starts, so that it starts exactly on time
TAKEN_UP_NS = 250_000_000  # until the last agent has accepted its request: its thread may wait for the GIL
TRIPS = 3  # a request may take longer than the shortest round trip
ROUNDS = 2  # to send all requests may take longer than to ask all hosts for the time
BUSY_SHARE, MAX_BUSY_NS = 4, 2_000_000_000  # of the time that getting ready took: hosts that are busy take longer
REQUIREMENTS = ("all", "quorum", "any")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRequest:
    """What to capture. spec.selector: conditions on all hosts; spec.start_time_ns: Unix ns by our clock, or 0.

    id: of the whole capture; repeated, it finds the same captures. timeout_s: limit for each answer.
    """

    id: str
    places: Sequence[Place]
    spec: pb.CaptureSpec
    require: str = "any"
    timeout_s: float = 30.0

    def new_fleet(self) -> Fleet:
        """The state before any host is asked. Raises UsageProblem for conditions that cannot hold."""
        for place in self.places:
            place.selected(self.spec.selector)
        ranks = frozenset(self.spec.selector.ranks) - {ANY_RANK}
        return Fleet(id=self.id, members=[HostRun(place) for place in self.places], ranks=ranks)


class FleetRun:
    """One capture of many hosts. Use it as an asynchronous context manager: its connections are closed at the end."""

    def __init__(self, request: FleetRequest, fleet: Fleet, progress: FleetProgress) -> None:
        self.fleet = fleet
        self._request = request
        self._progress = progress
        self._clients: dict[HostRun, HostClient] = {}
        self._told = self._ready = 0  # numbers of hosts that have answered, and that are ready
        self._slowest_s = self._round_s = 0.0  # longest time to get ready; time to ask each host once
        self._interrupted = asyncio.Event()
        self._answered = asyncio.Event()  # set when a host has answered, or the user has interrupted

    async def __aenter__(self) -> "FleetRun":
        for member in self.fleet.members:
            try:
                connection = connected(member.place.address)
                self._clients[member] = HostClient(connection, timeout_s=self._request.timeout_s)
            except CliError as exc:
                member.error = member.error or exc
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await close_all(self._clients.values())

    def interrupt(self) -> None:
        """Stops on all hosts; what was recorded so far is kept, and following continues until they confirm."""
        self.fleet.interrupted = True
        self._interrupted.set()
        self._answered.set()

    # ------------------------------------------------------------ arming and starting

    async def begin(self) -> None:
        """Arms and starts; records the outcome in the fleet. Raises UsageProblem if the requested start is too near."""
        await self._arm()
        await self._measure([member for member in self.fleet.members if self._waits(member)], self._first_clock)
        members = self.fleet.members
        self.fleet.unmet = unmet(
            self._request.require,
            hosts=self.fleet.counted(),
            begun=sum(member.is_ready or member.started for member in members),
            whole=sum(member.is_wholly_ready or member.started for member in members),
        )
        if self.fleet.interrupted or self.fleet.unmet:
            await self.cancel()
            return
        try:
            await self._start([member for member in members if self._waits(member)])
        except CliError:
            await self.cancel()
            raise
        await self._at_once(self._cancel_one, [each for each in members if each.error is not None and each.is_running])

    @staticmethod
    def _waits(member: HostRun) -> bool:
        """Whether the host has yet to be started."""
        return member.is_ready and not member.started

    async def _arm(self) -> None:
        began = time.monotonic()
        at_once = asyncio.Semaphore(CALLS_AT_ONCE)
        tasks = {
            asyncio.create_task(self._arm_one(number, member, at_once)): member
            for number, member in enumerate(self.fleet.members)
            if member in self._clients
        }
        try:
            await self._until_armed(len(tasks), began)
        except asyncio.CancelledError:
            await self._left(tasks)
            raise
        if self.fleet.interrupted and tasks:
            await asyncio.wait(
                tasks.keys(), timeout=LEAVE_S
            )  # an armed capture can only be cancelled once its id is known
        for task, member in tasks.items():
            if not task.done():
                task.cancel()
                member.error = TimedOut(f"the daemon at {member.place.address} was not ready when the others started")
        await asyncio.gather(*tasks, return_exceptions=True)
        ready = [member for member in self.fleet.members if member.is_ready]
        processes = sum(target.state != pb.TARGET_STATE_ENDED for member in ready for target in member.targets)
        took = format_duration(int((time.monotonic() - began) * 1e9))
        self._progress.note(
            f"ready after {took}: {processes:,} process{'' if processes == 1 else 'es'} "
            f"on {len(ready):,} of {len(self.fleet.members):,} hosts"
        )

    @staticmethod
    async def _left(tasks: Iterable[asyncio.Task[None]]) -> None:
        """Ends the calls after a short time, in which most say the ids by which their captures can be cancelled."""
        _, late = await asyncio.wait([*tasks], timeout=LEAVE_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def _until_armed(self, asked: int, began: float) -> None:
        """Waits for all hosts that were asked, but not much longer than for most of them."""
        half_s = 0.0
        while not self.fleet.interrupted:
            waited_s = time.monotonic() - began
            if self._told == asked:
                return
            if not half_s and 2 * self._ready > len(self.fleet.members) and self._request.require != "all":
                half_s = waited_s
            limit_s = max(STRAGGLER_S, 2 * half_s) if half_s else self._request.timeout_s + STRAGGLER_S
            self._answered.clear()
            try:
                await asyncio.wait_for(self._answered.wait(), max(0.0, limit_s - waited_s))
            except TimeoutError:
                return

    async def _arm_one(self, number: int, member: HostRun, at_once: asyncio.Semaphore) -> None:
        request = self._request
        spec = pb.CaptureSpec()
        spec.CopyFrom(request.spec)
        spec.selector.CopyFrom(member.place.selected(request.spec.selector))
        spec.labels[FLEET_LABEL] = request.id
        spec.start_time_ns = 0
        spec.arm_ns = int((request.timeout_s + ARMED_FOR_S) * 1e9)
        try:
            async with at_once:
                await self._clients[member].check()
                began = time.monotonic()
                capture = await self._clients[member].create(spec, f"{request.id}/{number}")
            member.capture = capture
            member.started = not capture.armed_until_ns and capture.status != pb.CAPTURE_STATUS_FAILED
            member.clock = stored_clock(capture)
            self._ready += member.is_ready or member.started
            self._slowest_s = max(self._slowest_s, time.monotonic() - began)
            self._progress.update(member)
        except CliError as exc:
            member.error = exc
        finally:
            self._told += 1
            self._answered.set()

    # ------------------------------------------------------------ clocks

    async def _measure(self, members: Sequence[HostRun], tell: Callable[[HostRun, Offset], None]) -> None:
        """One round trip shows which hosts are near; then a few more, and again to hosts whose trips were all slow."""
        trips: dict[HostRun, list[RoundTrip]] = {}

        async def more(member: HostRun) -> None:
            found, client = trips.setdefault(member, []), self._clients[member]
            had, far = len(found), bool(found) and found[0].travelled_ns >= FAR_TRIP_NS
            until = time.monotonic() + (FAR_S if far else NEAR_S)
            try:
                while not found or len(found) < had + FEWEST_TRIPS or time.monotonic() < until:
                    found.append(await client.clock())
                    if len(found) in (1, had + ROUND_TRIPS):
                        break
            except CliError as exc:
                if not found:  # otherwise what was measured before counts
                    del trips[member]
                    self._without_clock(member, exc)

        began = time.monotonic()
        await self._at_once(more, members, FIRST_CLOCKS_AT_ONCE)
        self._round_s = time.monotonic() - began
        far = [member for member, found in trips.items() if found[0].travelled_ns >= FAR_TRIP_NS]
        near = [member for member, found in trips.items() if found[0].travelled_ns < FAR_TRIP_NS]
        await asyncio.gather(
            self._at_once(more, near, NEAR_CLOCKS_AT_ONCE), self._at_once(more, far, FAR_CLOCKS_AT_ONCE)
        )
        shortest = {member: min(trip.travelled_ns for trip in found) for member, found in trips.items()}
        usual_ns = statistics.median(shortest.values()) if shortest else 0
        slow = [member for member, trip_ns in shortest.items() if SLOW_TRIPS * usual_ns < trip_ns < FAR_TRIP_NS]
        await self._at_once(more, slow, NEAR_CLOCKS_AT_ONCE)
        for member, found in trips.items():
            try:
                tell(member, measured(found))
            except UnusableClock as exc:
                self._without_clock(member, Refused(str(exc)))

    def _without_clock(self, member: HostRun, exc: CliError) -> None:
        if member.clock is None:
            member.error = exc
        else:
            member.warnings.append(f"its clock was not measured again after the capture: {exc}")

    def _first_clock(self, member: HostRun, offset: Offset) -> None:
        member.clock = offset
        if abs(offset.offset_ns) >= FAR_NS:
            ahead = "behind" if offset.offset_ns > 0 else "ahead of"
            member.warnings.append(f"its clock is {format_duration(abs(offset.offset_ns))} {ahead} this machine's")

    def _last_clock(self, member: HostRun, offset: Offset) -> None:
        assert member.clock is not None
        member.clock, warning = joined(member.clock, offset, self.fleet.start_ns or member.clock.at_ns)
        if warning:
            member.warnings.append(warning)

    # ------------------------------------------------------------ the start

    async def _start(self, members: Sequence[HostRun]) -> None:
        if not members:
            return  # all were begun before
        spec = self._request.spec
        delivered_ns = delivery_ns(
            trip_ns=max(member.clock.trip_ns for member in members if member.clock is not None),
            round_ns=int(self._round_s * 1e9),
            armed_ns=int(self._slowest_s * 1e9),
        )
        iterations: dict[HostRun, list[pb.IterationStart]] = {}
        if spec.WhichOneof("extent") == "iterations":
            iterations = await self._common_iterations(members, delivered_ns / 1e9)
        else:
            self.fleet.start_ns = common_start_ns(
                time.time_ns(), warmup_ns=spec.warmup_ns, delivered_ns=delivered_ns, wanted_ns=spec.start_time_ns
            )
        await self._at_once(lambda member: self._start_one(member, iterations.get(member, [])), members)
        started = sum(member.started for member in members)
        what = "a common iteration"
        if start_ns := self.fleet.start_ns:
            what = f"{time.strftime('%H:%M:%S', time.localtime(start_ns / 1e9))}.{start_ns // 10**6 % 1000:03}"
        self._progress.note(f"{started:,} host{' starts' if started == 1 else 's start'} at {what}")

    async def _at_once(
        self, call: Callable[[HostRun], Awaitable[None]], members: Iterable[HostRun], most: int = CALLS_AT_ONCE
    ) -> None:
        at_once = asyncio.Semaphore(most)

        async def one(member: HostRun) -> None:
            async with at_once:
                await call(member)

        await asyncio.gather(*(one(member) for member in members))

    async def _start_one(self, member: HostRun, iterations: Sequence[pb.IterationStart]) -> None:
        capture, clock = member.capture, member.clock
        assert capture is not None and clock is not None
        start_ns = self.fleet.start_ns
        request = pb.StartCaptureRequest(
            id=capture.id,
            start_time_ns=start_ns - clock.offset_ns if start_ns else 0,
            iterations=iterations,
            clock=pb.ClockOffset(offset_ns=clock.offset_ns, uncertainty_ns=clock.uncertainty_ns),
        )
        limit_s = max(0.0, (start_ns - time.time_ns()) / 1e9) + START_LATE_S
        client = self._clients[member]
        try:
            async with asyncio.timeout(limit_s):
                member.capture = await client.start(request)
            member.started = True
        except (TimeoutError, Unreachable):  # only its daemon knows whether it has started
            member.warnings.append("its daemon did not confirm the start")
            member.started = True
        except CliError as exc:
            member.error = exc
        self._progress.update(member)

    async def _common_iterations(
        self, members: Sequence[HostRun], delivery_s: float
    ) -> dict[HostRun, list[pb.IterationStart]]:
        """The iterations that the processes of each host are to record."""
        ranks = [
            Rank(member, target)
            for member in members
            for target in member.targets
            if target.state != pb.TARGET_STATE_ENDED
        ]
        samples = [await self._sample(members, ranks)]
        give_up_at = time.monotonic() + FIRST_STEP_S
        while len(samples) < SAMPLES or (_is_awaited(ranks) and time.monotonic() < give_up_at):
            await asyncio.sleep(SAMPLE_PAUSE_S)
            samples.append(await self._sample(members, ranks))
        samples = samples[-SAMPLES:]
        window = self._request.spec.iterations
        wanted = Iterations(window.start if window.HasField("start") else None, window.roundup, window.warmup)
        comparable = not any(rank.target.process.attached for rank in ranks)
        planned = plan(samples, wanted, comparable=comparable, patience_ns=MEET_WITHIN_NS, delivery_s=delivery_s)
        found: dict[HostRun, list[pb.IterationStart]] = {}
        for rank, each in zip(ranks, planned, strict=True):
            if each.warning:
                rank.member.warnings.append(f"{enum_names.target(rank.target)}: {each.warning}")
            if each.start_iteration is not None:
                start = pb.IterationStart(
                    pid=rank.target.pid, start=each.start_iteration, warmup=each.warmup_iterations
                )
                found.setdefault(rank.member, []).append(start)
        return found

    async def _sample(self, members: Sequence[HostRun], ranks: Sequence[Rank]) -> Sample:
        """The current iteration of each process. A host that does not answer keeps its counts."""

        async def one(member: HostRun) -> None:
            capture = member.capture
            assert capture is not None
            try:
                now = await self._clients[member].capture(capture.id)
            except CliError:
                return
            counts = {target.pid: target.process.iterations for target in now.targets}
            for target in capture.targets:
                target.process.iterations = counts.get(target.pid, target.process.iterations)

        await self._at_once(one, members)
        return Sample(time.monotonic_ns(), tuple(rank.target.process.iterations for rank in ranks))

    # ------------------------------------------------------------ the end

    async def finish(self) -> None:
        """Follows all captures to the end. Those that were not started have ended already."""
        running = [member for member in self.fleet.members if member.is_running and member.error is None]
        following = asyncio.gather(*(self._follow(member) for member in running))
        interrupted = asyncio.create_task(self._interrupted.wait())
        try:
            either: tuple[asyncio.Future[Any], ...] = (following, interrupted)
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                await self.cancel()
            await following
        finally:
            following.cancel()
            interrupted.cancel()
            await asyncio.gather(following, interrupted, return_exceptions=True)
        if not self.fleet.interrupted:
            there = [member for member in running if member.error is None and member.clock is not None]
            await self._measure(there, self._last_clock)

    async def _follow(self, member: HostRun) -> None:
        client, capture = self._clients[member], member.capture
        assert capture is not None
        patience = Patience(self._request.timeout_s)
        try:
            while not has_ended(capture):
                try:
                    async for event in client.watch(capture.id, limit_s=WATCH_S):
                        apply_event(capture, event)
                        patience.progressed()
                        self._progress.update(member)
                except RETRYABLE as exc:
                    if not isinstance(exc, TimedOut):
                        await asyncio.sleep(patience.pause_s(exc))
                if not has_ended(capture):
                    capture.CopyFrom(await self._alive(client, capture.id, patience))
        except CliError as exc:
            member.error = exc
        self._progress.update(member)

    async def _alive(self, client: HostClient, capture_id: str, patience: Patience) -> pb.Capture:
        """The capture, once its daemon answers. Raises the error if the daemon stays unreachable."""
        while True:
            try:
                capture = await client.capture(capture_id, limit_s=ALIVE_S)
            except RETRYABLE as exc:
                await asyncio.sleep(patience.pause_s(exc))
            else:
                patience.progressed()
                return capture

    async def cancel(self) -> None:
        """Ends the capture on every host that has it. After a Ctrl-C, what was recorded is kept."""
        running = [member for member in self.fleet.members if member.is_running]
        if running:
            what = "stopping the capture" if self.fleet.interrupted else "cancelling the capture"
            kept = " and keeping what was recorded" if self.fleet.interrupted else ""
            where = f"{len(running):,} host{'' if len(running) == 1 else 's'}"
            self._progress.note(f"{what} on {where}{kept}; press Ctrl-C again to exit at once")
        await self._at_once(self._cancel_one, running)

    async def _cancel_one(self, member: HostRun) -> None:
        assert member.capture is not None
        try:
            member.capture.CopyFrom(
                await self._clients[member].cancel(member.capture.id, keep_partial=self.fleet.interrupted)
            )
        except CliError as exc:
            member.error = member.error or exc
        self._progress.update(member)


def _is_awaited(ranks: Iterable[Rank]) -> bool:
    """Whether an attached agent of a torch program has not seen an iteration yet."""
    processes = (rank.target.process for rank in ranks)
    return any(each.attached and each.framework and each.iterations == NEVER for each in processes)


# When the hosts of a capture start: a time, or an iteration, that all of them can still reach. Pure.
class Iterations(NamedTuple):
    """The requested iterations, as `kineto_protos.alignment.plan` takes them."""

    start_iteration: int | None
    iteration_roundup: int
    warmup_iterations: int


def delivery_ns(*, trip_ns: int, round_ns: int, armed_ns: int) -> int:
    """How long it takes until every agent has accepted its request, in ns.

    trip_ns: the longest round trip to a host; round_ns: the time to call each host once; armed_ns: how long the slowest
    host took to get ready.
    """
    busy_ns = min(armed_ns // BUSY_SHARE, MAX_BUSY_NS)
    return TAKEN_UP_NS + TRIPS * trip_ns + ROUNDS * round_ns + busy_ns


def common_start_ns(now_ns: int, *, warmup_ns: int, delivered_ns: int, wanted_ns: int = 0) -> int:
    """When the window starts on all hosts, in Unix ns by our clock. wanted_ns: the requested time; 0 for the earliest.

    delivered_ns: how long it takes until all have their request. Raises UsageProblem if wanted_ns is too near.
    """
    earliest_ns = now_ns + warmup_ns + delivered_ns
    if not wanted_ns:
        return earliest_ns
    if wanted_ns < earliest_ns:
        raise UsageProblem(
            f"--start-at is {format_duration(earliest_ns - wanted_ns)} too soon: even with the processes ready, "
            f"the hosts need another {format_duration(earliest_ns - now_ns)}"
        )
    return wanted_ns


def unmet(requirement: str, *, hosts: int, begun: int, whole: int) -> str:
    """Why a requirement (one of REQUIREMENTS) is not met, or empty if it is.

    begun: number of hosts with a process that is ready; whole: with all processes ready.
    """
    if requirement == "all" and whole < hosts:
        return f"only {whole} of {hosts} hosts have all their processes ready, but --require all needs every host"
    if requirement == "quorum" and 2 * begun <= hosts:
        return f"only {begun} of {hosts} hosts are ready, but --require quorum needs more than half"
    return "" if begun else "no host has a process that is ready"


def run_fleet(fleet_run: FleetRun, *steps: Callable[[], Awaitable[None]]) -> None:
    """Runs the steps of a capture, one after the other. Raises KeyboardInterrupt on the second Ctrl-C.

    The first one cancels the capture, also where another thread runs the loop, as in Jupyter. If Ctrl-C is ignored, or
    handled by the program, that is not changed.
    """
    tasks: list[asyncio.Task[None]] = []
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # asyncio.run() changes it

    async def work() -> None:
        tasks.append(_own_task())
        here = is_ours and threading.current_thread() is threading.main_thread()
        with _interrupts(fleet_run, tasks[0]) if here else contextlib.nullcontext():
            async with fleet_run:
                for step in steps:
                    await step()

    def interrupted() -> None:
        if not tasks or fleet_run.fleet.interrupted:
            raise KeyboardInterrupt
        tasks[0].get_loop().call_soon_threadsafe(_interrupted, fleet_run, tasks[0])

    run(work, interrupted)


def _own_task() -> asyncio.Task[None]:
    task = asyncio.current_task()
    assert task is not None
    return task


def _interrupted(fleet_run: FleetRun, task: asyncio.Task[None]) -> bool:
    """The first time stops the capture, then cancels the task. Tells which."""
    if fleet_run.fleet.interrupted:
        return task.cancel()
    fleet_run.interrupt()
    return False


@contextlib.contextmanager
def _interrupts(fleet_run: FleetRun, task: asyncio.Task[None]) -> Iterator[None]:
    loop, left = task.get_loop(), False

    def interrupted() -> None:
        nonlocal left
        left = _interrupted(fleet_run, task)

    loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        yield
    except asyncio.CancelledError:
        if left:
            raise KeyboardInterrupt from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.default_int_handler)
