"""Bytes that call themselves a request: captures, selectors, and what the daemon tells agents of them."""

from collections.abc import Iterator
from pathlib import Path

from google.protobuf.message import DecodeError
from kineto_agent.protocol import wire
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.visible_text import one_line
from kinetod.base.errors import InvalidRequest
from kinetod.captures.request import capture_spec
from kinetod.config.settings import Config
from kinetod.selection.process_registry import checked_selector

CONFIG = Config(listen=(), agent_socket=Path("/x"), state_dir=Path("/x"))
NOW_NS = 1_795_163_478_000_000_000


def play(data: bytes) -> None:
    try:
        asked = pb.CreateCaptureRequest.FromString(data)
    except DecodeError:
        return
    for check in (_capture, _selector, _key):
        try:
            check(asked)
        except InvalidRequest as exc:
            assert exc.metadata["field"] and one_line(exc.message) == exc.message, exc.message


def _capture(asked: pb.CreateCaptureRequest) -> None:
    request = capture_spec.checked_spec(asked.spec, CONFIG, NOW_NS)
    assert capture_spec.request_hash(asked.spec)
    frame = wire.encode(request.recording._replace(capture_id="20200101-000000-000-000000"))
    assert isinstance(wire.decode(frame), wire.Start)
    for key, value in asked.spec.labels.items():
        assert one_line(key + value) == key + value


def _selector(asked: pb.CreateCaptureRequest) -> None:
    assert one_line(str(checked_selector(asked.spec.selector)))


def _key(asked: pb.CreateCaptureRequest) -> None:
    capture_spec.checked_key(asked.idempotency_key)


def seeds() -> Iterator[bytes]:
    """Captures by duration and by iteration, with all options and selectors."""
    everything = pb.Selector(pids=[1, 2], gpus=[0], ranks=[3], job_ids=["42"], command_regex="train.*(a|b)+")
    capture = pb.CaptureSpec(
        selector=everything, duration_ns=10**9, warmup_ns=5, labels={"team": "ml", "a/b": "c"}, formats=["chrome"],
        activity_types=["cpu_op", "kernel"], buffer_limit_bytes=1 << 26, start_time_ns=NOW_NS + 10**9,
        options=pb.Options(record_shapes=True, stack_sample_hz=100, with_stack=True),
    )  # fmt: skip
    yield pb.CreateCaptureRequest(spec=capture, idempotency_key="again").SerializeToString(deterministic=True)
    window = pb.IterationWindow(count=20, roundup=100, warmup=2)
    counted = pb.CaptureSpec(iterations=window, or_duration_ns=10**9, no_attach=True, keep_agent_ns=5, arm_ns=7)
    yield pb.CreateCaptureRequest(spec=counted).SerializeToString(deterministic=True)
