"""The one place where the daemon's errors become gRPC statuses."""

import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, NoReturn, Protocol, TypeVar

import grpc
from google.protobuf import any_pb2
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from kinetod.access.call_gate import FLOODS, Authorizer
from kinetod.access.callers import KEYS, Auth
from kinetod.access.token_users import TOKEN_KEY
from kinetod.base import errors, metrics
from kinetod.base.errors import invalid
from kinetod.permissions.role_policy import Caller

log = logging.getLogger(__name__)

DOMAIN = "kineto"
STATUS_CODES: dict[type[errors.KinetodError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.NotIdentified: grpc.StatusCode.UNAUTHENTICATED,
    errors.NotPermitted: grpc.StatusCode.PERMISSION_DENIED,
    errors.Precondition: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Exhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.OutOfRange: grpc.StatusCode.OUT_OF_RANGE,
    errors.DataLoss: grpc.StatusCode.DATA_LOSS,
    errors.Stopping: grpc.StatusCode.UNAVAILABLE,
}
Servicer = TypeVar("Servicer", bound="Guarded")

Response = TypeVar("Response")
Context = Any  # grpc.aio.ServicerContext; its stub is generic over the messages of each method
Request = TypeVar("Request")


# Handles requests that are not a message of their method.
#
# gRPC itself would answer UNKNOWN, log a traceback for each, and not identify the caller. Here such a request becomes
# an `Empty`, which passes the gate like any other (if the service has one) and is then refused by `readable`.
class Tolerant(grpc.aio.ServerInterceptor):
    """Lets unreadable requests through, so that our own code can refuse them."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """Returns the handler of a method, with a deserializer that never raises."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        return handler._replace(request_deserializer=tolerant(handler.request_deserializer))


def tolerant(read: Callable[[bytes], Message]) -> Callable[[bytes], Message]:
    """The reader, changed to return Empty for what is not a message."""

    def reader(data: bytes) -> Message:
        try:
            return read(data)
        except DecodeError:
            return Empty()

    return reader


def readable(request: Request) -> Request:
    """Returns the request. Raises InvalidRequest if it was not a message."""
    if isinstance(request, Empty):
        raise invalid(
            "request",
            "it is not a valid message for this method; do client and daemon use the same version of the interface?",
        )
    return request


def to_status(error: errors.KinetodError) -> grpc.Status:
    """The status with one ErrorInfo."""
    return _status(STATUS_CODES[type(error)], str(error.reason), error.message, dict(error.metadata))


def _status(code: grpc.StatusCode, reason: str, message: str, metadata: dict[str, str]) -> grpc.Status:
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata))
    number: int = code.value[0]
    status: grpc.Status = rpc_status.to_status(status_pb2.Status(code=number, message=message, details=[detail]))
    return status


def _code_of(exc: Exception) -> grpc.StatusCode:
    return STATUS_CODES[type(exc)] if isinstance(exc, errors.KinetodError) else grpc.StatusCode.INTERNAL


async def _abort(context: Context, exc: Exception, method: str) -> NoReturn:
    if isinstance(exc, errors.KinetodError):
        level = logging.DEBUG if exc.reason in FLOODS else logging.INFO  # those the audit log counts
        log.log(level, "%s refused: %s: %s", method, exc.reason, exc.message)
        await context.abort_with_status(to_status(exc))
    else:
        log.error("%s failed", method, exc_info=exc)
        text = "an internal error of the daemon; its log has the details"
        await context.abort_with_status(_status(grpc.StatusCode.INTERNAL, errors.Reason.INTERNAL, text, {}))
    raise AssertionError("abort_with_status returned")


def auth_of(context: Context) -> Auth:
    """The caller's credentials: the certificate's properties, the token, and whom it calls for."""
    shown: dict[str, Iterable[bytes]] = dict(context.auth_context())
    metadata = context.invocation_metadata() or ()
    for key in (TOKEN_KEY, *KEYS):
        shown[key] = [str(value).encode() for name, value in metadata if name == key]
    return shown


class Guarded(Protocol):
    """A service whose calls pass a gate."""

    gate: Authorizer


def unary(
    method: Callable[[Servicer, Request, Caller], Awaitable[Response]],
) -> Callable[[Servicer, Request, Context], Awaitable[Response]]:
    """Makes a gRPC handler from a method that may raise KinetodError; it runs after the gate admits the caller."""

    @functools.wraps(method)
    async def handler(self: Servicer, request: Request, context: Context) -> Response:
        with metrics.call(method.__name__) as call:
            try:
                caller = await self.gate.admit(method.__name__, context.peer(), auth_of(context), request)
                with self.gate.noted(method.__name__, caller, request) as noted:
                    noted.answer = await method(self, readable(request), caller)
                return noted.answer  # type: ignore[no-any-return]  # it is what the method answered
            except Exception as exc:  # noqa: BLE001  # logged and told as INTERNAL
                call.code = _code_of(exc).name
                return await _abort(context, exc, method.__name__)

    return handler


def streaming(
    method: Callable[[Servicer, Request, Caller], AsyncIterator[Response]],
) -> Callable[[Servicer, Request, Context], AsyncIterator[Response]]:
    """Like `unary`, for a server stream: the audit log has how it began, up to its first answer."""

    @functools.wraps(method)
    async def handler(self: Servicer, request: Request, context: Context) -> AsyncIterator[Response]:
        with metrics.call(method.__name__) as call:
            try:
                caller = await self.gate.admit(method.__name__, context.peer(), auth_of(context), request)
                responses = method(self, request, caller)
                with self.gate.noted(method.__name__, caller, request):
                    readable(request)
                    first = await _first(responses)
                for response in first:
                    yield response
                async for response in responses:
                    yield response
            except Exception as exc:  # noqa: BLE001  # logged and told as INTERNAL
                call.code = _code_of(exc).name
                await _abort(context, exc, method.__name__)

    return handler


async def _first(responses: AsyncIterator[Response]) -> Sequence[Response]:
    """The first response, if there is one."""
    async for response in responses:
        return [response]
    return ()
