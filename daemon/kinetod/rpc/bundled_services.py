"""The services bundled with gRPC, health and reflection: they refuse what they cannot answer as our own does.

gRPC itself would answer UNKNOWN and log a traceback for each such call, which anybody may make as often as they like.
They serve every caller (docs/access.md), so the gate is not asked; the doorkeeper counts their calls.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from kinetod.base.errors import InvalidRequest
from kinetod.rpc.error_status import to_status
from kinetod.rpc.malformed_requests import readable

_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
Behaviour = Callable[[Any, Any], Any]


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
        except NotImplementedError:  # of a method that is newer than what answers it
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this daemon has no such method")

    return refusing


async def _readable_ones(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield readable(request)
