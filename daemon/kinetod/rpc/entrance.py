"""The first step of every call, including health and reflection: count it for its caller before it is read.

gRPC counts calls for all callers together and calls a handler only once the request has arrived. Here every method
becomes one that streams in both directions, which is the same on the wire: its handler runs as soon as a call begins.
"""

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from kinetod.access.call_limits import Doorkeeper
from kinetod.base.errors import Exhausted
from kinetod.rpc.error_status import Context, auth_of, to_status

REQUEST_S = 20.0  # a request that comes in parts is there within this time
UNKNOWN = "(unknown method)"  # in the audit log: whoever calls chooses the name


class Entrance(grpc.aio.ServerInterceptor):
    """Intercepts the calls of every service. own: the one whose calls pass a gate."""

    def __init__(self, doorkeeper: Doorkeeper, own: str) -> None:
        self._doorkeeper = doorkeeper
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
                    await self._doorkeeper.introduced(connection, auth)
                    held.enter_context(self._doorkeeper.entered(name, connection, auth, ungated=ungated))
                except Exhausted as exc:
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
    return await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no request")


async def _no_such_method(_requests: AsyncIterator[Any], context: Context) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this daemon has no such method")
