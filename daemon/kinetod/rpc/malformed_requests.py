"""Requests that are not a message of their method.

gRPC itself would answer UNKNOWN, log a traceback for each, and not identify the caller. Here such a request becomes an
`Empty`, which passes the gate like any other (if the service has one) and is then refused by `readable`.
"""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message

from kinetod.base.errors import invalid

Request = TypeVar("Request")


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
            "request", "it is not a message of this method; do client and daemon use the same version of the interface?"
        )
    return request
