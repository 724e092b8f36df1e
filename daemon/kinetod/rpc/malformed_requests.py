"""Requests that are no message.

gRPC itself would answer UNKNOWN, write a traceback for each, and ask nobody who it was. Here such a request becomes an
`Empty`, which passes the gate like any other (where the service has one), and is then refused by `readable`.
"""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message

from kinetod.base.errors import invalid

Request = TypeVar("Request")


class Tolerant(grpc.aio.ServerInterceptor):
    """Lets requests through that cannot be read."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """The handler of a method, with a way of reading that never raises."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        return handler._replace(request_deserializer=tolerant(handler.request_deserializer))


def tolerant(read: Callable[[bytes], Message]) -> Callable[[bytes], Message]:
    """The same reader, that gives Empty for what is no message."""

    def reader(data: bytes) -> Message:
        try:
            return read(data)
        except DecodeError:
            return Empty()

    return reader


def readable(request: Request) -> Request:
    """The request. Raises InvalidRequest if it was no message."""
    if isinstance(request, Empty):
        raise invalid("request", "it is no message of this method; do client and daemon have the same interface?")
    return request
