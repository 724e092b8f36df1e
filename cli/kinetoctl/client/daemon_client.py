"""The typed client of kinetod. Only this module, `channel` and `fleet.host_client` know gRPC.

Every call has a deadline. Every gRPC error becomes a `kinetoctl.errors.CliError` here: the class by the
status code (`ERRORS`, complete by test), the text and the reason by the daemon's google.rpc.ErrorInfo.
"""

import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, NamedTuple, TypeVar

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its C core logs to our stderr otherwise

import grpc
from kineto_protos.services import ProfilerStub
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.telemetry_ids import TRACE_PARENT, TRACE_PARENT_VARIABLE, TraceContext

from kinetoctl import errors
from kinetoctl.client.channel import StubCalls, open_connection, unreachable

ERROR_DOMAIN = "kineto"
STATUS_KEY = "grpc-status-details-bin"  # of the trailing metadata in which gRPC puts a google.rpc.Status
TOO_MANY_STACKS = "the answer is too large to read at once: select fewer processes"
STREAM_DEADLINE_S = (
    300.0  # a longer watch or fetch is reopened, so that a dead peer is noticed after this time at the latest
)
CLOSE_LIMIT_S = 1.0
CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),  # clusters often set http_proxy; a daemon is never behind it
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),  # how long one attempt to connect may take: the host may be busy
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", 16 << 20),  # gRPC's own limit is 4 MiB
)

# Status code -> our class. OK never arrives as an error.
ERRORS: dict[grpc.StatusCode, type[errors.CliError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.UsageProblem,
    grpc.StatusCode.OUT_OF_RANGE: errors.UsageProblem,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.ALREADY_EXISTS: errors.Refused,
    grpc.StatusCode.FAILED_PRECONDITION: errors.Refused,
    grpc.StatusCode.ABORTED: errors.Refused,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Refused,
    grpc.StatusCode.UNIMPLEMENTED: errors.Unsupported,
    grpc.StatusCode.PERMISSION_DENIED: errors.Denied,
    grpc.StatusCode.UNAUTHENTICATED: errors.Denied,
    grpc.StatusCode.UNAVAILABLE: errors.Unreachable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.TimedOut,
    grpc.StatusCode.CANCELLED: errors.CancelledByDaemon,
    grpc.StatusCode.UNKNOWN: errors.DaemonFault,
    grpc.StatusCode.INTERNAL: errors.DaemonFault,
    grpc.StatusCode.DATA_LOSS: errors.DaemonFault,
}


def _reason_code(error: grpc.RpcError) -> str:
    """The reason in the daemon's ErrorInfo; empty if the error is gRPC's own."""
    trailing: Any = error.trailing_metadata() or ()
    if all(key != STATUS_KEY for key, _ in trailing):
        return ""
    from google.rpc import error_details_pb2  # 10 ms that only an error needs
    from grpc_status import rpc_status

    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]  # an RpcError of a call is a Call
    except ValueError:  # details that contradict the status connection: not from a kinetod
        return ""
    info = error_details_pb2.ErrorInfo()
    for detail in status.details if status else ():
        if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
            return str(info.reason)
    return ""


def translate(error: grpc.RpcError, *, address: str, timeout_s: float) -> errors.CliError:
    """The kinetoctl error for one of gRPC. The daemon's message is kept."""
    code, details = error.code(), error.details() or ""
    reason_code = _reason_code(error)
    if reason_code:
        return ERRORS[code](details, reason_code=reason_code)
    if code is grpc.StatusCode.UNAVAILABLE:
        return unreachable(address, details)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.TimedOut(f"the daemon at {address} did not answer within {timeout_s:g} s")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return errors.Unsupported(f"the daemon at {address} does not support this call ({details})")
    return ERRORS[code](f"the daemon at {address} answered {code.name}: {details}")


class StackAnswer(NamedTuple):
    """The processes whose stacks came, in the order in which they were read. error: why others did not come."""

    stacks: list[pb.ProcessStacks]
    error: errors.CliError | None = None


class Client:
    """One connection to a daemon. Use it as a context manager.

    outlives_command: whether the daemon runs on when the command has ended.
    metadata: goes with each call, as does the span of TRACEPARENT in `environ`, which the daemon notes in captures.
    """

    outlives_command = True

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = 30.0,
        metadata: Sequence[tuple[str, str]] = (),
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._connection = open_connection(address, CHANNEL_OPTIONS, environ)
        span = environ.get(TRACE_PARENT_VARIABLE, "")
        own = ((TRACE_PARENT, span),) if TraceContext.parse(span) else ()
        self._stub = StubCalls(self._connection, ProfilerStub, (*metadata, *own))

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exc: object) -> None:
        self.close(0.0 if kind is KeyboardInterrupt else CLOSE_LIMIT_S)

    def close(self, limit_s: float = CLOSE_LIMIT_S) -> None:
        """Close the connection. Running calls are cancelled.

        A Ctrl-C inside gRPC can leave a call behind for which close() and the channel's destructor wait forever. Hence
        a thread, which keeps the channel alive and is not waited for longer than limit_s seconds.
        """
        closer = threading.Thread(target=self._close, name="close", daemon=True)
        closer.start()
        closer.join(limit_s)

    def _close(self) -> None:
        for channel in self._connection.channels:
            channel.close()
        self._connection.close_folders()

    @contextmanager
    def _translated(self, timeout_s: float) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as exc:
            raise translate(exc, address=self.address, timeout_s=timeout_s) from exc

    def _call(self, method: Any, request: Any) -> Any:
        with self._translated(self.timeout_s):
            return method(request, timeout=self.timeout_s)

    def _stream(self, method: Any, request: Any, limit_s: float = STREAM_DEADLINE_S) -> Generator[Any, None, None]:
        call = None
        try:
            with self._translated(limit_s):
                call = method(request, timeout=limit_s)
                yield from call
        finally:
            if call is not None:
                call.cancel()  # a consumer that stops early must not leave the stream open

    def processes(
        self, selector: pb.Selector, *, include_without_agent: bool = False, trainers: bool = False
    ) -> list[pb.Process]:
        """The processes that match; of an empty selector with `trainers`, what a person would trace."""
        request = pb.ListProcessesRequest(
            selector=selector, include_without_agent=include_without_agent, trainers=trainers
        )
        return list(self._call(self._stub.ListProcesses, request).processes)

    def create(self, spec: pb.CaptureSpec, idempotency_key: str) -> pb.Capture:
        """Start a capture. Repeated with the same key, it returns the same capture."""
        request = pb.CreateCaptureRequest(spec=spec, idempotency_key=idempotency_key)
        capture: pb.Capture = self._call(self._stub.CreateCapture, request)
        return capture

    def watch(self, capture_id: str) -> Iterator[pb.CaptureEvent]:
        """The current capture, then each change. Ends with the capture, or with an error after STREAM_DEADLINE_S."""
        return self._stream(self._stub.WatchCapture, pb.WatchCaptureRequest(id=capture_id))

    def capture(self, capture_id: str) -> pb.Capture:
        """The current state of one capture."""
        capture: pb.Capture = self._call(self._stub.GetCapture, pb.GetCaptureRequest(id=capture_id))
        return capture

    def captures(self, labels: Mapping[str, str], *, limit: int) -> Iterator[pb.Capture]:
        """At most limit captures, newest first."""
        token = ""
        while limit > 0:
            request = pb.ListCapturesRequest(labels=labels, page_size=min(limit, 100), page_token=token)
            page: pb.ListCapturesResponse = self._call(self._stub.ListCaptures, request)
            yield from page.captures[:limit]
            limit -= len(page.captures)
            token = page.next_page_token
            if not token:
                return

    def cancel(self, capture_id: str, *, keep_partial: bool = False) -> pb.Capture:
        """Stop the capture in all its targets."""
        request = pb.CancelCaptureRequest(id=capture_id, keep_partial=keep_partial)
        capture: pb.Capture = self._call(self._stub.CancelCapture, request)
        return capture

    def delete(self, capture_id: str, *, keep_uploaded: bool = False) -> None:
        """Remove an ended capture and its files."""
        self._call(self._stub.DeleteCapture, pb.DeleteCaptureRequest(id=capture_id, keep_uploaded=keep_uploaded))

    def pin(self, capture_id: str, *, pinned: bool) -> None:
        """Protect a capture from retention, or end the protection."""
        self._call(self._stub.PinCapture, pb.PinCaptureRequest(id=capture_id, pinned=pinned))

    def verify(self, capture_id: str, *, uploaded: bool = False) -> Iterator[pb.FileCheck]:
        """Make the daemon verify the stored files of an ended capture."""
        return self._stream(self._stub.VerifyCapture, pb.VerifyCaptureRequest(id=capture_id, uploaded=uploaded))

    def fetch(self, capture_id: str, *, pid: int, file_format: str, offset: int) -> Iterator[pb.TraceChunk]:
        """The bytes of one stored file, starting at an offset."""
        request = pb.FetchTraceRequest(capture_id=capture_id, pid=pid, format=file_format, offset=offset)
        return self._stream(self._stub.FetchTrace, request)

    def host(self) -> pb.Host:
        """The daemon's host."""
        host: pb.Host = self._call(self._stub.GetHost, pb.GetHostRequest())
        return host

    def watch_host(
        self, selector: pb.Selector, *, interval_ns: int, include_without_agent: bool
    ) -> Iterator[pb.HostSample]:
        """Samples of the host. Ends with an error after STREAM_DEADLINE_S at the latest."""
        request = pb.WatchHostRequest(
            selector=selector, interval_ns=interval_ns, include_without_agent=include_without_agent
        )
        return self._stream(self._stub.WatchHost, request)

    def diagnose_host(self) -> pb.HostDiagnosis:
        """What on the daemon's host prevents traces."""
        diagnosis: pb.HostDiagnosis = self._call(self._stub.DiagnoseHost, pb.DiagnoseHostRequest())
        return diagnosis

    def diagnose(self, pid: int) -> pb.Diagnosis:
        """Whether and how a process could be traced."""
        diagnosis: pb.Diagnosis = self._call(self._stub.DiagnoseProcess, pb.DiagnoseProcessRequest(pid=pid))
        return diagnosis

    def stacks(self, selector: pb.Selector, fits: Callable[[int], bool] | None = None) -> StackAnswer:
        """Where the threads of the processes that match stand. Raises NotFound if none matches.

        An error that comes after the first process is part of the answer. fits: asked with the bytes of each process;
        once it says no, the rest is not read.
        """
        found: list[pb.ProcessStacks] = []
        request = pb.ReadStacksRequest(selector=selector)
        try:
            with closing(self._stream(self._stub.ReadStacks, request, self.timeout_s)) as stream:
                for each in stream:
                    if fits and not fits(each.ByteSize()):
                        raise errors.Refused(TOO_MANY_STACKS)
                    found.append(each)
        except errors.CliError as exc:
            if not found:
                raise
            return StackAnswer(found, exc)
        return StackAnswer(found)

    def counters(self, *, base_metrics: bool = False) -> pb.ListCountersResponse:
        """The GPUs whose hardware counters can be sampled, and what of them."""
        request = pb.ListCountersRequest(base_metrics=base_metrics)
        response: pb.ListCountersResponse = self._call(self._stub.ListCounters, request)
        return response

    def watch_counters(self, request: pb.WatchCountersRequest) -> Iterator[pb.CounterMeans]:
        """Means of hardware counters. Ends with an error after STREAM_DEADLINE_S at the latest."""
        return self._stream(self._stub.WatchCounters, request)


# Reopens and retries calls: how long a client puts up with a daemon that does not answer, and streams that go on.
# What a stream may end with when the daemon restarts. Any other error is an answer, not an absence.
RETRYABLE = (errors.Unreachable, errors.CancelledByDaemon)
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
SHORTEST_STREAM_S = 1.0  # a stream that ends sooner is not reopened
T = TypeVar("T")


class Patience:
    """Pauses between retries. After limit_s seconds without progress, the error is raised instead."""

    def __init__(
        self,
        limit_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._sleep = sleep
        self.progressed()

    def progressed(self) -> None:
        """Notes progress: the limit and the pauses start again."""
        self._since = self._clock()
        self._pause_s = FIRST_PAUSE_S

    def wait(self, error: errors.CliError) -> None:
        """Pause before the next try. Raises error if the limit is reached."""
        self._sleep(self.pause_s(error))

    def pause_s(self, error: errors.CliError) -> float:
        """How long to pause before the next try. Raises error if the limit is reached."""
        pause_s = self._pause_s
        if self._clock() - self._since + pause_s > self._limit_s:
            raise error
        self._pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return pause_s


def kept_open(watch: Callable[[], Iterator[T]]) -> Iterator[T]:
    """Yields what the daemon sends as long as it does; reopens a stream that reaches its deadline."""
    while True:
        began = time.monotonic()
        try:
            yield from watch()
            return
        except errors.TimedOut:
            if time.monotonic() - began < SHORTEST_STREAM_S:
                raise
