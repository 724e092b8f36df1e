"""Frames of the link as they are, and as they should not be: for both directions."""

import json
import random
from typing import Any

from kineto_agent.protocol import wire
from support.agent.agent_daemon import start_request
from support.agent.scripted_agent import FORMAT, SOURCE, hello_message

from fuzz import mutate

CAPTURE = "20200101-000000-000-000000"  # stands for the id of the running capture, which is as long
NOW_NS = 1_795_163_478_000_000_000


def of_agent(rng: random.Random) -> wire.Message:
    """Something that an agent sends."""
    return rng.choice(
        (
            hello_message(iterations=5, rank=1, world_size=2, framework="torch 2.11.0"),
            wire.State(CAPTURE, rng.choice(("WAIT_FOR_REQUEST", "WARMUP", "COLLECT", "PROCESS")), NOW_NS),
            wire.Arena(CAPTURE, SOURCE, FORMAT, {"interval_ns": 1_000_000, "way": "sampler"}),
            result(),
            wire.Rejected(CAPTURE, "BUSY", "another capture runs", "20200101-000000-000-000001"),
        )
    )


def result(**changes: Any) -> wire.Result:
    """A message that ends a capture."""
    return wire.Result(
        capture_id=CAPTURE,
        outcome="done",
        reason_code="",
        reason="",
        window_start_ns=NOW_NS,
        window_end_ns=NOW_NS + 10**9,
        sources={SOURCE: {"records": 10, "dropped": 0, "bytes": 240, "metadata": {"extra": 1, "way": "sampler"}}},
        overhead={"start_ns": 1000, "stop_ns": 2000, "detach_ns": 0, "agent_cpu_ns": 3000, "step_ratio": 1.5},
        threads={"1": "MainThread", "7": "loader"},
        iterations={"thread": 1, "starts": [[3, NOW_NS + 1], [4, NOW_NS + 2]]},
        warnings=["careful"],
    )._replace(**changes)


def of_daemon(rng: random.Random) -> wire.Message:
    """Something that a daemon sends."""
    options = {
        "record_shapes": True, "with_stack": True, "stack_sample_hz": 1000, "stack_trace": rng.random() < 0.1,
        "wait_for_user_profiler": rng.random() < 0.1,
    }  # fmt: skip
    start = start_request(CAPTURE, duration_ns=rng.choice((1_000, 2_000_000, 3600 * 10**9)), options=options)
    counted = start._replace(duration_ns=None, iterations=rng.choice((1, 3)), or_duration_ns=rng.choice((None, 1000)))
    return rng.choice(
        (
            wire.Welcome("0.1.0"),
            wire.Describe(),
            start,
            start,
            counted,
            wire.Cancel(CAPTURE, rng.random() < 0.5),
            wire.Release(CAPTURE),
            wire.Refuse("too many connections"),
        )
    )


def damaged(message: wire.Message, rng: random.Random) -> bytes:
    """The frame: as it is, with values that it should not have, or with bytes that it should not have."""
    try:
        frame = wire.encode(message)
    except wire.WireError:
        return b""
    kind = rng.random()
    if kind < 0.35:
        return frame
    if kind < 0.85:
        values: Any = message._asdict()
        for _ in range(rng.choice((1, 1, 2, 4))):
            values = mutate.changed(values, rng)
        payload = json.dumps(values).encode()
        number = int.from_bytes(frame[6:8], "little") if rng.random() < 0.9 else rng.randrange(14)
        return header(number, len(payload)) + payload
    if kind < 0.95:
        return mutate.damaged(frame, rng)
    payload = rng.choice(
        (b"[" * 20_000, b'{"a":' * 10_000, b"9" * 60_000, b'{"pid":' + b"9" * 5000 + b"}", b"\xff" * 99)
    )
    return header(rng.randrange(1, 12), len(payload)) + payload


def header(number: int, size: int) -> bytes:
    """Header of a frame of this type and payload."""
    return (
        b"KNTO"
        + wire.PROTOCOL_VERSION.to_bytes(2, "little")
        + number.to_bytes(2, "little")
        + size.to_bytes(8, "little")
    )


def meant_for(frame: bytes, capture_id: str) -> bytes:
    """The frame with the id of the capture that runs now."""
    return frame.replace(CAPTURE.encode(), capture_id.encode()) if len(capture_id) == len(CAPTURE) else frame
