"""The asynchronous client of kinetod, for many daemons at once; its errors are those of `client.daemon_client`.

Every call has a deadline. A call that cannot reach its daemon is retried for RETRY_S; every other error is final.
A capture is created with an idempotency key, so that a retry does not create it twice.
"""

import asyncio
import functools
import os
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

import grpc
from kineto_protos.services import ProfilerStub
from kineto_protos.v1 import profiler_pb2 as pb

from kinetoctl.client.channel import DaemonConnection, StubCalls, open_async_connection
from kinetoctl.client.daemon_client import CHANNEL_OPTIONS, translate
from kinetoctl.client.fleet.clock_offsets import RoundTrip
from kinetoctl.client.retry import Patience
from kinetoctl.errors import TimedOut, Unreachable

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
