"""The W3C trace context of a call, in the metadata that OpenTelemetry's instrumentations of gRPC send."""

import contextvars
import functools
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kineto_trace.base.telemetry_ids import TRACE_PARENT

from kinetod.processes.telemetry_variables import checked_trace_parent
from kinetod.rpc.error_status import Context

Service = TypeVar("Service")
Request = TypeVar("Request")
Response = TypeVar("Response")

caller_trace_parent: contextvars.ContextVar[str] = contextvars.ContextVar("caller_trace_parent", default="")


def traced(
    handler: Callable[[Service, Request, Context], Awaitable[Response]],
) -> Callable[[Service, Request, Context], Awaitable[Response]]:
    """Lets the method read `caller_trace_parent`: the caller's span; "" for none or one that is not valid."""

    @functools.wraps(handler)
    async def tracing(self: Service, request: Request, context: Context) -> Response:
        metadata = context.invocation_metadata() or ()
        text = next((value for name, value in metadata if name == TRACE_PARENT and isinstance(value, str)), "")
        token = caller_trace_parent.set(checked_trace_parent(text))
        try:
            return await handler(self, request, context)
        finally:
            caller_trace_parent.reset(token)

    return tracing
