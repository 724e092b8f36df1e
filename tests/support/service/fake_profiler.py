"""A real gRPC server with scripted answers, for the tests of clients.

    with serve(FakeProfiler()) as server:
        client = Client(server.address)

Every answer is an attribute that a test sets; every request is kept. A stream script is a list of items:
a message is sent, an `Abort` ends the call with that error, WAIT_FOR_CANCEL waits until CancelCapture came.
"""

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from kineto_protos.services import add_to_server
from kineto_protos.v1 import profiler_pb2 as pb

from support.waiting import scaled

START_DEADLINE_S = 10


@dataclass(frozen=True)
class Abort:
    """Ends a call with an error. reason: the ErrorInfo's; empty for an error without one."""

    code: grpc.StatusCode
    details: str = "no"
    reason: str = ""


class WaitForCancel:
    """Stops a stream until CancelCapture was called."""


WAIT_FOR_CANCEL = WaitForCancel()
StreamItem = pb.CaptureEvent | pb.TraceChunk | Abort | WaitForCancel


async def _abort(context: Any, abort: Abort) -> None:
    if not abort.reason:
        await context.abort(abort.code, abort.details)
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(domain="kineto", reason=abort.reason))
    status = status_pb2.Status(code=abort.code.value[0], message=abort.details, details=[detail])
    await context.abort_with_status(rpc_status.to_status(status))


@dataclass
class FakeProfiler:
    """The scripts and what was asked."""

    processes: list[pb.Process] | Abort = field(default_factory=list)
    created: pb.Capture | Abort = field(default_factory=pb.Capture)
    stored: pb.Capture | Abort = field(default_factory=pb.Capture)
    answered: bool = True  # whether `stored` has an answer, perhaps an empty one
    pages: list[pb.ListCapturesResponse] = field(default_factory=list)  # one per call, the last one repeats
    cancelled: pb.Capture | Abort = field(default_factory=pb.Capture)
    host: pb.Host | Abort = field(default_factory=pb.Host)
    diagnosis: pb.Diagnosis | Abort = field(default_factory=pb.Diagnosis)
    host_diagnosis: pb.HostDiagnosis | Abort = field(default_factory=pb.HostDiagnosis)
    host_samples: list[pb.HostSample | Abort | WaitForCancel] = field(default_factory=list)
    counters: pb.ListCountersResponse | Abort = field(default_factory=pb.ListCountersResponse)
    counter_means: list[pb.CounterMeans | Abort] = field(default_factory=list)
    stacks: list[Sequence[pb.ProcessStacks | Abort | WaitForCancel]] = field(
        default_factory=list
    )  # one script per call, the last repeats
    checks: list[pb.FileCheck] = field(default_factory=list)
    watches: list[list[StreamItem]] = field(default_factory=list)  # one script per call, the last one repeats
    content: bytes = b""  # of the stored file
    chunk_bytes: int = 1 << 20
    fetch_limits: list[int | Abort | WaitForCancel] = field(default_factory=list)  # per call: bytes before it breaks
    requests: list[Any] = field(default_factory=list)
    metadata: list[tuple[str, str]] = field(default_factory=list)  # of the latest unary call
    cancel_seen: asyncio.Event = field(default_factory=asyncio.Event)

    async def _answer(self, request: Any, answer: Any, context: Any) -> Any:
        self.requests.append(request)
        self.metadata = [(name, str(value)) for name, value in context.invocation_metadata() or ()]
        if isinstance(answer, Abort):
            await _abort(context, answer)
        return answer

    async def ListProcesses(self, request: pb.ListProcessesRequest, context: Any) -> Any:
        answer = self.processes
        return await self._answer(
            request, answer if isinstance(answer, Abort) else pb.ListProcessesResponse(processes=answer), context
        )

    async def CreateCapture(self, request: pb.CreateCaptureRequest, context: Any) -> Any:
        return await self._answer(request, self.created, context)

    async def GetCapture(self, request: pb.GetCaptureRequest, context: Any) -> Any:
        if isinstance(self.stored, pb.Capture) and self.answered:
            self.stored.answer.SetInParent()
        return await self._answer(request, self.stored, context)

    async def ListCaptures(self, request: pb.ListCapturesRequest, context: Any) -> Any:
        return await self._answer(request, self.pages.pop(0) if len(self.pages) > 1 else self.pages[0], context)

    async def CancelCapture(self, request: pb.CancelCaptureRequest, context: Any) -> Any:
        self.cancel_seen.set()
        return await self._answer(request, self.cancelled, context)

    async def DeleteCapture(self, request: pb.DeleteCaptureRequest, context: Any) -> Any:
        return await self._answer(request, pb.DeleteCaptureResponse(), context)

    async def PinCapture(self, request: pb.PinCaptureRequest, context: Any) -> Any:
        return await self._answer(request, self.stored, context)

    async def VerifyCapture(self, request: pb.VerifyCaptureRequest, context: Any) -> AsyncIterator[pb.FileCheck]:
        self.requests.append(request)
        for check in self.checks:
            yield check

    async def GetHost(self, request: pb.GetHostRequest, context: Any) -> Any:
        return await self._answer(request, self.host, context)

    async def WatchHost(self, request: pb.WatchHostRequest, context: Any) -> AsyncIterator[pb.HostSample]:
        self.requests.append(request)
        for item in self.host_samples:
            if isinstance(item, Abort):
                await _abort(context, item)
            elif isinstance(item, WaitForCancel):
                await self.cancel_seen.wait()
            else:
                yield item

    async def DiagnoseProcess(self, request: pb.DiagnoseProcessRequest, context: Any) -> Any:
        return await self._answer(request, self.diagnosis, context)

    async def DiagnoseHost(self, request: pb.DiagnoseHostRequest, context: Any) -> Any:
        return await self._answer(request, self.host_diagnosis, context)

    async def ReadStacks(self, request: pb.ReadStacksRequest, context: Any) -> AsyncIterator[pb.ProcessStacks]:
        self.requests.append(request)
        for item in self.stacks.pop(0) if len(self.stacks) > 1 else self.stacks[0]:
            if isinstance(item, Abort):
                await _abort(context, item)
            elif isinstance(item, WaitForCancel):
                await self.cancel_seen.wait()
            else:
                yield item

    async def ListCounters(self, request: pb.ListCountersRequest, context: Any) -> Any:
        return await self._answer(request, self.counters, context)

    async def WatchCounters(self, request: pb.WatchCountersRequest, context: Any) -> AsyncIterator[pb.CounterMeans]:
        self.requests.append(request)
        for item in self.counter_means:
            if isinstance(item, Abort):
                await _abort(context, item)
            else:
                yield item

    async def WatchCapture(self, request: pb.WatchCaptureRequest, context: Any) -> AsyncIterator[pb.CaptureEvent]:
        self.requests.append(request)
        script = self.watches.pop(0) if len(self.watches) > 1 else self.watches[0]
        for item in script:
            if isinstance(item, Abort):
                await _abort(context, item)
            elif isinstance(item, WaitForCancel):
                await self.cancel_seen.wait()
            elif isinstance(item, pb.CaptureEvent):
                yield item

    async def FetchTrace(self, request: pb.FetchTraceRequest, context: Any) -> AsyncIterator[pb.TraceChunk]:
        self.requests.append(request)
        limit = self.fetch_limits.pop(0) if self.fetch_limits else len(self.content)
        if isinstance(limit, Abort):
            await _abort(context, limit)
            return
        if isinstance(limit, WaitForCancel):
            await self.cancel_seen.wait()
            return
        offset = request.offset
        while offset < min(len(self.content), request.offset + limit):
            data = self.content[offset : min(offset + self.chunk_bytes, request.offset + limit)]
            yield pb.TraceChunk(offset=offset, data=data)
            offset += len(data)
        if offset < len(self.content):
            await _abort(context, Abort(grpc.StatusCode.UNAVAILABLE, "broken on purpose"))


@dataclass(frozen=True)
class FakeServer:
    """A running server: its address and its profiler."""

    address: str
    profiler: FakeProfiler


async def _serve(profiler: FakeProfiler, address: str, started: threading.Event, stop: asyncio.Event) -> None:
    server = grpc.aio.server()
    add_to_server(profiler, server)
    server.add_insecure_port(address)
    await server.start()
    started.set()
    await stop.wait()
    await server.stop(None)


@contextlib.contextmanager
def serve(profiler: FakeProfiler) -> Iterator[FakeServer]:
    """Run the server in a thread of its own."""
    with tempfile.TemporaryDirectory(prefix="kineto-fake-", dir="/tmp") as folder:
        address = f"unix:{Path(folder, 'rpc.sock')}"
        started, loop, stop = threading.Event(), asyncio.new_event_loop(), asyncio.Event()
        thread = threading.Thread(target=loop.run_until_complete, args=(_serve(profiler, address, started, stop),))
        thread.start()
        try:
            assert started.wait(scaled(START_DEADLINE_S))
            yield FakeServer(address, profiler)
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
            loop.close()
