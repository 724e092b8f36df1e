"""Health and reflection, which come with gRPC: bytes that are no message, and methods that nobody answers."""

import random
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from fuzz import mutate
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from support.service.daemon import Daemon, error_of
from support.waiting import scaled

NO_MESSAGE = b"\xff\xff\xff"
CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
LIST = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()


def call(daemon: Daemon, path: str, *requests: bytes) -> Callable[[], object]:
    """A call with these bytes and no others."""
    method: Any = daemon.channel().stream_stream(path)  # over the wire one request is a stream of one
    return lambda: method(iter(requests), timeout=scaled(20))


@pytest.mark.parametrize("path", [CHECK, WATCH, REFLECTION])
def test_bytes_that_are_no_message_are_refused_without_a_traceback(daemon: Daemon, path: str) -> None:
    code, reason, message = error_of(call(daemon, path, NO_MESSAGE))
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert message.startswith("request: it is not a valid message for this method")
    assert "Traceback" not in daemon.log()


def test_what_came_before_the_broken_message_of_a_stream_is_answered(daemon: Daemon) -> None:
    answers: Any = call(daemon, REFLECTION, LIST, NO_MESSAGE, LIST)()
    assert reflection_pb2.ServerReflectionResponse.FromString(next(answers)).list_services_response.service
    assert error_of(lambda: answers)[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_health_is_still_watched(daemon: Daemon) -> None:
    answers: Any = call(daemon, WATCH, b"")()
    assert health_pb2.HealthCheckResponse.FromString(next(answers)).status == health_pb2.HealthCheckResponse.SERVING
    answers.cancel()


def test_a_method_that_nobody_answers_is_no_error_of_the_daemon(daemon: Daemon) -> None:
    with pytest.raises(grpc.RpcError) as failed:
        list(call(daemon, "/grpc.health.v1.Health/List", b"")())  # type: ignore[call-overload]  # it is an iterator
    assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "Traceback" not in daemon.log()


@pytest.mark.slow
def test_no_damaged_request_of_reflection_or_health_leaves_a_traceback(daemon: Daemon) -> None:
    rng = random.Random(5)
    whole = [
        LIST,
        health_pb2.HealthCheckRequest(service="nobody's").SerializeToString(),  # of the other one: a host
        reflection_pb2.ServerReflectionRequest(file_by_filename="kineto_protos/v1/profiler.proto").SerializeToString(),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="kineto.v1.Profiler").SerializeToString(),
        reflection_pb2.ServerReflectionRequest(
            file_containing_extension=reflection_pb2.ExtensionRequest(
                containing_type="google.protobuf.FileOptions", extension_number=-1
            )
        ).SerializeToString(),
        reflection_pb2.ServerReflectionRequest(all_extension_numbers_of_type="kineto.v1.Capture").SerializeToString(),
    ]
    codes = set[str]()
    for number in range(300):
        data = mutate.damaged(rng.choice(whole), rng) if number >= len(whole) else whole[number]
        try:
            list(call(daemon, CHECK if number % 3 == 2 else REFLECTION, data)())  # type: ignore[call-overload]  # likewise
            codes.add("OK")
        except grpc.RpcError as exc:
            codes.add(exc.code().name)
    assert codes == {"OK", "INVALID_ARGUMENT", "NOT_FOUND"}  # NOT_FOUND: of such a health check
    assert "Traceback" not in daemon.log()
