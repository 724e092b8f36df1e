"""The gRPC server: health, reflection, and its sockets behind the connection proxy (`access.connections`)."""

import asyncio
import contextlib
import inspect
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from kineto_protos.services import add_to_server
from kineto_protos.v1 import profiler_pb2 as pb

from kinetod.access.call_gate import CallTracker
from kinetod.access.connections.certificates import Certificates
from kinetod.access.connections.connection_proxy import (
    PLAIN_SOCKET,
    TLS_SOCKET,
    TLS_TOKEN_SOCKET,
    ConnectionProxy,
    PrivateFolder,
)
from kinetod.base.errors import Exhausted, InvalidRequest, NotPermitted, StartError
from kinetod.rpc.error_status import Context, Tolerant, auth_of, readable, to_status
from kinetod.rpc.profiler_service import ProfilerService

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Profiler"].full_name
MAX_REQUEST_BYTES = 1 << 20  # the largest request that makes sense has 4096 pids and 64 labels
HANDSHAKE_MS = 10_000  # TLS and HTTP/2, from the first byte on
MAX_PENDING = 1 << 15
MAX_STREAMS = 64  # calls at a time on one connection; clients wait beyond it
# Callers are identified when a connection is made. After this time it must be made anew, so that an expired
# certificate, or one whose authority was removed, does not stay valid.
MAX_CONNECTION_AGE_MS = 3_600_000
MAX_CONNECTION_GRACE_MS = 600_000  # for its calls; twice as long as kinetoctl leaves a stream open
_OPTIONS = (
    ("grpc.max_connection_age_ms", MAX_CONNECTION_AGE_MS),
    ("grpc.max_connection_age_grace_ms", MAX_CONNECTION_GRACE_MS),
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    # Calls waiting to be handled, of all callers: beyond the first number gRPC cancels some at random, whoever made
    # them (1000 by default, which one user's connections have). Connections and streams limit them.
    ("grpc.server.max_pending_requests", MAX_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_PENDING),
)
_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
Behaviour = Callable[[Any, Any], Any]
REQUEST_S = 20.0  # a request that arrives in parts must be complete within this time
UNKNOWN = "(unknown method)"  # in the audit log: callers choose the name


class RpcServer:
    """Serves until `stop`. Health is NOT_SERVING until `set_serving`. Clients come through the connection proxy."""

    def __init__(
        self,
        service: ProfilerService,
        front: ConnectionProxy,
        folder: PrivateFolder,
        certificates: Certificates | None,
        call_tracker: CallTracker,
    ) -> None:
        self.serving = False
        self._stopped = False
        self._front = front
        self._folder = folder
        self._certificates = certificates
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(
            options=_OPTIONS,
            interceptors=(Entrance(call_tracker, SERVICE_NAME), Tolerant(), Bundled(SERVICE_NAME)),
        )
        add_to_server(service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self) -> None:
        """Starts listening. Raises StartError."""
        try:
            await self._start()
        except StartError:
            await self._server.stop(None)  # otherwise it logs an error when the loop is gone
            raise

    async def _start(self) -> None:
        await self.set_serving(False)
        old_mask = os.umask(0o177)
        try:
            self._server.add_insecure_port(f"unix:{self._folder.socket_path(PLAIN_SOCKET)}")
            if self._certificates is not None:
                for name in (TLS_SOCKET, TLS_TOKEN_SOCKET):
                    credentials = self._certificates.credentials(of_clients=name == TLS_SOCKET)
                    self._server.add_secure_port(f"unix:{self._folder.socket_path(name)}", credentials)
        except RuntimeError as exc:
            raise StartError(f"gRPC cannot listen: {exc}") from exc
        finally:
            os.umask(old_mask)
        await self._server.start()
        await self._front.start()

    async def set_serving(self, serving: bool) -> None:
        """Sets what the health service reports."""
        self.serving = serving
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Accepts no more calls; those in progress get `grace_s` to finish. Only the first call counts."""
        if self._stopped:
            return
        self._stopped = True
        self._front.stop_accepting()
        await self._server.stop(grace_s)
        self._front.close()
        self._folder.close()


# The services bundled with gRPC, health and reflection: they refuse what they cannot answer as our own does.
#
# gRPC itself would answer UNKNOWN and log a traceback for each such call, which anybody may make as often as they like.
# They serve every caller (docs/access.md), so the gate is not asked; the call tracker counts their calls.
class Bundled(grpc.aio.ServerInterceptor):
    """Intercepts the calls of every service but our own."""

    def __init__(self, own: str) -> None:
        self._own = f"/{own}/"

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """Returns the handler of a method, wrapped so that it refuses properly."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(self._own):
            return handler
        return handler._replace(
            **{kind: _refusing(behaviour) for kind in _KINDS if (behaviour := getattr(handler, kind))}
        )


def _refusing(behaviour: Behaviour) -> Behaviour:
    """The behaviour, refusing requests that are not messages of the method; streamed answers are written here."""

    async def refusing(asked: Any, context: Any) -> Any:
        try:
            is_stream = hasattr(asked, "__aiter__")
            answers = behaviour(_readable_ones(asked) if is_stream else readable(asked), context)
            if not inspect.isasyncgen(answers):
                return await answers
            async for answer in answers:
                await context.write(answer)
        except InvalidRequest as exc:
            await context.abort_with_status(to_status(exc))
        except NotImplementedError:  # a method newer than the service that answers it
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this daemon has no such method")

    return refusing


async def _readable_ones(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield readable(request)


# The first step of every call, including health and reflection: count it for its caller before it is read.
# gRPC counts calls for all callers together and calls a handler only once the request has arrived. Here every method
# becomes one that streams in both directions, which is the same on the wire: its handler runs as soon as a call
# begins.
class Entrance(grpc.aio.ServerInterceptor):
    """Intercepts the calls of every service. own: the one whose calls pass a gate."""

    def __init__(self, call_tracker: CallTracker, own: str) -> None:
        self._call_tracker = call_tracker
        self._own = f"/{own}/"
        self._known: dict[str, Any] = {}
        unknown = self._entering(UNKNOWN, _no_such_method, ungated=True)
        self._unknown: Any = grpc.stream_stream_rpc_method_handler(unknown)

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """Returns the handler of a method, wrapped in admission control."""
        path = handler_call_details.method
        if path not in self._known:
            handler = await continuation(handler_call_details)
            if handler is None:
                return self._unknown
            self._known[path] = self._replaced(path, handler)
        return self._known[path]

    def _replaced(self, path: str, handler: Any) -> Any:
        async def run(requests: AsyncIterator[Any], context: Context) -> None:
            await _run(handler, requests, context)

        ungated = not path.startswith(self._own)
        name = path.removeprefix("/") if ungated else path.removeprefix(self._own)
        return handler._replace(
            request_streaming=True,
            response_streaming=True,
            unary_unary=None,
            unary_stream=None,
            stream_unary=None,
            stream_stream=self._entering(name, run, ungated=ungated),
        )

    def _entering(
        self, name: str, run: Callable[[AsyncIterator[Any], Context], Awaitable[None]], *, ungated: bool
    ) -> Callable[[AsyncIterator[Any], Context], Awaitable[None]]:
        async def entering(requests: AsyncIterator[Any], context: Context) -> None:
            with contextlib.ExitStack() as held:
                try:
                    connection, auth = context.peer(), auth_of(context)
                    unidentified = await self._call_tracker.introduced(connection, auth)
                    held.enter_context(
                        self._call_tracker.entered(name, connection, auth, ungated=ungated, unidentified=unidentified)
                    )
                except (Exhausted, NotPermitted) as exc:
                    await context.abort_with_status(to_status(exc))
                await run(requests, context)

        return entering


async def _run(handler: Any, requests: AsyncIterator[Any], context: Context) -> None:
    """Calls the behaviour as gRPC would for a method of the handler's kind."""
    asked: Any = requests if handler.request_streaming else await _only(requests, context)
    behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    answers = behaviour(asked, context)
    if not inspect.isasyncgen(answers):
        answer = await answers
        if not handler.response_streaming:
            await context.write(answer)
        return
    async with contextlib.aclosing(answers):
        async for answer in answers:
            await context.write(answer)


async def _only(requests: AsyncIterator[Any], context: Context) -> Any:
    try:
        async with asyncio.timeout(REQUEST_S):
            async for request in requests:
                return request
    except TimeoutError:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no request arrived within {REQUEST_S:g} s")
    return await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call contains no request")


async def _no_such_method(_requests: AsyncIterator[Any], context: Context) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this daemon has no such method")
