"""Stubs and handlers of gRPC services, made from their descriptors: protoc's plug-in would write out each method."""

from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from kineto_protos.v1 import profiler_pb2

PROFILER: ServiceDescriptor = profiler_pb2.DESCRIPTOR.services_by_name["Profiler"]


def _arity(method: MethodDescriptor) -> str:
    """What gRPC calls the method's kind: unary_unary, unary_stream and so on."""
    return "_".join("stream" if streams else "unary" for streams in (method.client_streaming, method.server_streaming))


class Stub:
    """The methods of a service over a channel, grpc's or grpc.aio's: an attribute for each."""

    def __init__(self, channel: Any, service: ServiceDescriptor) -> None:
        for method in service.methods:
            call = getattr(channel, _arity(method))(
                f"/{service.full_name}/{method.name}",
                request_serializer=GetMessageClass(method.input_type).SerializeToString,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            setattr(self, method.name, call)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class ProfilerStub(Stub):
    """The calls of profiler.proto."""

    def __init__(self, channel: Any) -> None:
        super().__init__(channel, PROFILER)


def add_to_server(servicer: object, server: Any, service: ServiceDescriptor = PROFILER) -> None:
    """Has the server answer calls of the service by the servicer's methods of the same names, others by UNIMPLEMENTED.

    server: grpc's or grpc.aio's.
    """
    handlers = {
        method.name: getattr(grpc, f"{_arity(method)}_rpc_method_handler")(
            getattr(servicer, method.name),
            request_deserializer=GetMessageClass(method.input_type).FromString,
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
        for method in service.methods
        if hasattr(servicer, method.name)
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
