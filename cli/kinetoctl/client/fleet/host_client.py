"""The asynchronous client of kinetod, for many daemons at once; its errors are those of `client.daemon_client`.

Every call has a deadline. A call that cannot reach its daemon is retried for RETRY_S; every other error is final.
A capture is created with an idempotency key, so that a retry does not create it twice.
"""

import asyncio
import functools
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, NamedTuple, TypeVar

import grpc
from kineto_protos.services import ProfilerStub
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.store.upload_manifest import FLEET_LABEL

from kinetoctl.client.channel import DaemonConnection, StubCalls, open_async_connection
from kinetoctl.client.daemon_client import CHANNEL_OPTIONS, TOO_MANY_STACKS, Patience, StackAnswer, translate
from kinetoctl.client.fleet.host_run import Fleet, HostRun, RoundTrip, stored_clock
from kinetoctl.client.host_targets import Place
from kinetoctl.errors import CliError, NotFound, Refused, TimedOut, Unreachable
from kinetoctl.exit_codes import ExitCode

T = TypeVar("T")
HostConnection = DaemonConnection[grpc.aio.Channel]
RETRY_S = 2.0
CLOCK_DEADLINE_S = 2.0


@functools.cache
def _keep_grpc() -> None:
    """Keeps gRPC's thread alive. Otherwise gRPC joins it when the last channel is closed, where a Ctrl-C leaves a
    traceback. Not at import time: gRPC then asks for the thread's event loop, which may not exist.
    """
    grpc.aio.init_grpc_aio()


def connected(address: str, environ: Mapping[str, str] = os.environ) -> HostConnection:
    """The way to the daemon at this address, for clients on the running event loop. Raises UsageProblem."""
    _keep_grpc()
    return open_async_connection(address, CHANNEL_OPTIONS, environ)


async def close_connection(connection: HostConnection, grace_s: float | None = None) -> None:
    """Closes it on its event loop. Running calls have grace_s seconds to end, then they are cancelled."""
    for channel in connection.channels:
        await channel.close(grace_s)
    connection.close_folders()


class HostClient:
    """One connection to one daemon, used on one event loop and closed there."""

    def __init__(
        self,
        connection: HostConnection,
        *,
        timeout_s: float,
        metadata: Sequence[tuple[str, str]] = (),
        retry_s: float = RETRY_S,
    ) -> None:
        """metadata: goes with each call. retry_s: how long to retry a call that cannot reach the daemon."""
        self.address = connection.address
        self.timeout_s = timeout_s
        self._retry_s = retry_s
        self._connection = connection
        self._stub = StubCalls(connection, ProfilerStub, metadata)

    async def close(self) -> None:
        """Close the connection. Running calls are cancelled."""
        await close_connection(self._connection)

    async def _once(self, method: Any, request: Any, timeout_s: float) -> Any:
        try:
            return await method(request, timeout=timeout_s)
        except grpc.RpcError as exc:
            raise translate(exc, address=self.address, timeout_s=timeout_s) from exc

    async def _call(self, method: Any, request: Any, timeout_s: float | None = None) -> Any:
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        patience = Patience(min(self._retry_s, timeout_s))
        while True:
            try:
                return await self._once(method, request, timeout_s)
            except Unreachable as exc:
                if isinstance(exc, TimedOut):
                    raise
                await asyncio.sleep(patience.pause_s(exc))

    async def create(self, spec: pb.CaptureSpec, idempotency_key: str) -> pb.Capture:
        """Start or arm a capture. Repeated with the same key, it returns the same capture."""
        request = pb.CreateCaptureRequest(spec=spec, idempotency_key=idempotency_key)
        capture: pb.Capture = await self._call(self._stub.CreateCapture, request)
        return capture

    async def start(self, request: pb.StartCaptureRequest) -> pb.Capture:
        """Start an armed capture. Repeating the request changes nothing."""
        capture: pb.Capture = await self._call(self._stub.StartCapture, request)
        return capture

    async def check(self) -> None:
        """Raises Unsupported if the daemon is too old to arm captures: it would start them at once."""
        await self._call(self._stub.GetClock, pb.GetClockRequest())

    async def clock(self) -> RoundTrip:
        """One reading of the host's clock."""
        sent_ns = time.time_ns()
        clock = await self._once(self._stub.GetClock, pb.GetClockRequest(), min(CLOCK_DEADLINE_S, self.timeout_s))
        return RoundTrip(sent_ns, clock.received_ns, clock.sent_ns, time.time_ns())

    async def host(self) -> pb.Host:
        """The daemon's host."""
        host: pb.Host = await self._call(self._stub.GetHost, pb.GetHostRequest())
        return host

    async def processes(
        self, selector: pb.Selector, *, include_without_agent: bool = False, trainers: bool = False
    ) -> list[pb.Process]:
        """The processes that match; of an empty selector with `trainers`, what a person would trace."""
        request = pb.ListProcessesRequest(
            selector=selector, include_without_agent=include_without_agent, trainers=trainers
        )
        return list((await self._call(self._stub.ListProcesses, request)).processes)

    async def stacks(
        self, selector: pb.Selector, fits: Callable[[int], bool] | None = None, *, limit_s: float | None = None
    ) -> StackAnswer:
        """Where the threads of the processes that match stand, as Client.stacks. Raises NotFound if none matches."""

        async def read(request: pb.ReadStacksRequest, timeout: float) -> StackAnswer:
            found: list[pb.ProcessStacks] = []
            call = self._stub.ReadStacks(request, timeout=timeout)
            try:
                async for each in call:
                    if fits and not fits(each.ByteSize()):
                        call.cancel()
                        return StackAnswer(found, Refused(TOO_MANY_STACKS))
                    found.append(each)
            except grpc.RpcError as exc:
                if not found:
                    raise
                return StackAnswer(found, translate(exc, address=self.address, timeout_s=timeout))
            return StackAnswer(found)

        answer: StackAnswer = await self._call(read, pb.ReadStacksRequest(selector=selector), limit_s)
        return answer

    async def watch(self, capture_id: str, *, limit_s: float) -> AsyncIterator[pb.CaptureEvent]:
        """The current capture, then each change. Ends with the capture, or with an error after limit_s seconds."""
        call = self._stub.WatchCapture(pb.WatchCaptureRequest(id=capture_id), timeout=limit_s)
        try:
            async for event in call:
                yield event
        except grpc.RpcError as exc:
            raise translate(exc, address=self.address, timeout_s=limit_s) from exc
        finally:
            call.cancel()  # a consumer that stops early must not leave the stream open

    async def capture(self, capture_id: str, *, limit_s: float | None = None) -> pb.Capture:
        """The current state of one capture."""
        request = pb.GetCaptureRequest(id=capture_id)
        capture: pb.Capture = await self._call(self._stub.GetCapture, request, limit_s)
        return capture

    async def captures(self, labels: Mapping[str, str], *, limit: int) -> list[pb.Capture]:
        """At most limit captures, newest first."""
        found: list[pb.Capture] = []
        token = ""
        while len(found) < limit:
            request = pb.ListCapturesRequest(labels=labels, page_size=min(limit - len(found), 100), page_token=token)
            page: pb.ListCapturesResponse = await self._call(self._stub.ListCaptures, request)
            found += page.captures
            token = page.next_page_token
            if not token:
                break
        return found[:limit]

    async def cancel(self, capture_id: str, *, keep_partial: bool = False) -> pb.Capture:
        """Stop the capture in all its targets."""
        request = pb.CancelCaptureRequest(id=capture_id, keep_partial=keep_partial)
        capture: pb.Capture = await self._call(self._stub.CancelCapture, request)
        return capture


async def close_all(clients: Iterable[HostClient]) -> None:
    """Closes all clients concurrently."""
    await asyncio.gather(*(client.close() for client in clients))


def run(work: Callable[[], Awaitable[T]], interrupted: Callable[[], None] | None = None) -> T:
    """Runs the work to its end, in a new thread if this thread has a running event loop.

    interrupted: called on a KeyboardInterrupt while that thread works; waits on unless it raises.
    """

    async def awaited() -> T:
        return await work()

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(awaited())
    with ThreadPoolExecutor(1, thread_name_prefix="fleet") as pool:
        future = pool.submit(asyncio.run, awaited())
        while True:
            try:
                return future.result()
            except KeyboardInterrupt:
                if interrupted is None or future.done():
                    raise
                interrupted()


async def in_thread(work: Callable[[], T]) -> T:
    """Runs work that blocks, in a thread of its own, ended on return; being cancelled does not wait for it."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="fleet")
    future = asyncio.get_running_loop().run_in_executor(pool, work)
    try:
        return await future
    finally:
        pool.shutdown(wait=not future.cancelled())


# Asks many hosts at once, and returns the answers in the order of the hosts.
CALLS_AT_ONCE = 256


class HostAnswer(NamedTuple, Generic[T]):
    """The answer of one host: a value, or an error."""

    place: Place
    value: T | None
    error: CliError | None


def ask(
    places: Sequence[Place], question: Callable[[HostClient, Place], Awaitable[T]], *, timeout_s: float
) -> list[HostAnswer[T]]:
    """The answer or error of every host."""

    async def all_of_them() -> list[HostAnswer[T]]:
        at_once = asyncio.Semaphore(CALLS_AT_ONCE)
        return list(await asyncio.gather(*(one(place, at_once) for place in places)))

    async def one(place: Place, at_once: asyncio.Semaphore) -> HostAnswer[T]:
        async with at_once:
            try:
                client = HostClient(connected(place.address), timeout_s=timeout_s)
                try:
                    return HostAnswer(place, await question(client, place), None)
                finally:
                    await client.close()
            except CliError as exc:
                return HostAnswer(place, None, exc)

    return run(all_of_them)


def errors(answers: Sequence[HostAnswer[T]]) -> list[str]:
    """One message for each host without an answer."""
    return [f"{answer.place.host}: {answer.error}" for answer in answers if answer.error is not None]


def exit_code(answers: Sequence[HostAnswer[T]]) -> ExitCode:
    """The exit code of a command that shows the answers: PARTIAL if a host did not answer."""
    return ExitCode.DONE if all(answer.error is None for answer in answers) else ExitCode.PARTIAL


def values(answers: Sequence[HostAnswer[T]]) -> list[tuple[Place, T]]:
    """The answers of the hosts that answered. Raises the first error if none did."""
    found = [(answer.place, answer.value) for answer in answers if answer.error is None and answer.value is not None]
    first = next((answer.error for answer in answers if answer.error is not None), None)
    if not found and first is not None:
        raise first
    return found


LIMIT = 1000  # captures of one host that are parts of one capture


async def parts_of(client: HostClient, capture_id: str) -> list[pb.Capture]:
    """The parts of the capture on one host; empty if it has none."""
    found = await client.captures({FLEET_LABEL: capture_id}, limit=LIMIT)
    try:
        return found or [await client.capture(capture_id)]
    except NotFound:
        return []


def find_fleet(places: Sequence[Place], capture_id: str, *, timeout_s: float) -> Fleet:
    """The parts of the capture on these hosts: captures with its label, or the one capture with this id.

    A host that does not answer becomes a member with its error. Raises NotFound if no host has a part.
    """
    members = []
    answers = ask(places, lambda client, _place: parts_of(client, capture_id), timeout_s=timeout_s)
    for place, captures, error in answers:
        if error is not None:
            members.append(HostRun(place, error=error))
        members += [HostRun(place, each, clock=stored_clock(each), started=True) for each in captures or ()]
    if not any(member.capture for member in members):
        raise next((m.error for m in members if m.error), NotFound(f"no host has a capture {capture_id}"))
    return Fleet(id=capture_id, members=members)
