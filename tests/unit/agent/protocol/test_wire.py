import json
import random
import struct
from typing import Any, List

import pytest
from kineto_agent.protocol import wire
from support.agent.agent_daemon import start_request

HELLO = wire.Hello(
    agent_version="0.1.0",
    pid=7,
    python_version="3.11.7",
    framework="torch 2.11.0+cu130",
    rank=3,
    world_size=None,
    job_id="77",
    iterations=-1,
    sources={"cupti": ["kernel", "gpu_memcpy"], "python_stacks": ["python_function"]},
    argv=["python", "train.py"],
    busy_capture_id="",
)
MESSAGES: List[wire.Message] = [
    HELLO,
    wire.Welcome("0.1.0"),
    wire.Refuse("another version"),
    wire.Describe(),
    start_request(options={"stack_sample_hz": 50}),
    wire.Cancel("c1", True),
    wire.Release("c1"),
    wire.State("c1", "WARMUP", 1),
    wire.State("c1", "COLLECT", 1, {"torch.num_threads": 2}),
    wire.Arena("c1", "cupti", "cupti/1", {"version": 26}),
    wire.Result(
        "c1",
        "done",
        "",
        "",
        1,
        2,
        {"cupti": {"records": 1}},
        {"start_ns": 1},
        {"7": "main"},
        {"thread": 7, "starts": [[3, 1]]},
        ["w"],
        {"kernel": "CUPTI is taken"},
    ),
    wire.Rejected("c2", "BUSY", "busy with c1", "c1"),
]


def frame(number: int, payload: bytes, magic: bytes = b"KNTO", version: int = 1) -> bytes:
    return struct.pack("<4sHHII", magic, version, number, len(payload), 0) + payload


def with_field(name: str, value: Any) -> bytes:
    return frame(1, json.dumps({**HELLO._asdict(), name: value}).encode())


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_comes_back_as_it_was_sent(message: wire.Message) -> None:
    assert wire.decode(wire.encode(message)) == message


def test_the_layout_of_a_frame_is_fixed() -> None:
    assert wire.encode(wire.Release("c1")) == b"KNTO\x01\x00\x07\x00\x13\x00\x00\x00\x00\x00\x00\x00" + (
        b'{"capture_id":"c1"}'
    )


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "a frame of 0 bytes has no header"),
        (b"KNTO\x01", "a frame of 5 bytes has no header"),
        (frame(4, b"{}", magic=b"HTTP"), "not a kineto frame: it starts with b'HTTP'"),
        (frame(4, b"{}")[:-1], "the header announces 2 payload bytes, but 1 arrived"),
        (frame(4, b"{}") + b"x", "the header announces 2 payload bytes, but 3 arrived"),
        (frame(99, b"{}"), "unknown message type 99"),
        (frame(4, b"[]"), "the payload of Describe is not a JSON object"),
        (frame(7, b"{}"), "Release.capture_id is missing"),
        (frame(7, b'{"capture_id":5}'), "Release.capture_id has the wrong type: 5"),
        (b"x" * 65537, "a frame of 65537 bytes is over the limit of 65536"),
    ],
)
def test_a_frame_that_the_protocol_does_not_allow_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(wire.WireError) as caught:
        wire.decode(data)
    assert str(caught.value) == text


@pytest.mark.parametrize("payload", [b"{", b"\xff\xfe", b'{"a":', b"[" * 30000, b"1" * 6000])
def test_a_payload_that_is_not_a_json_object_is_refused(payload: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.decode(frame(4, payload))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pid", "7"),
        ("pid", True),
        ("pid", 7.0),
        ("pid", 1 << 63),
        ("pid", -(1 << 63) - 1),
        ("rank", "3"),
        ("argv", "python"),
        ("argv", [1]),
        ("sources", {"cupti": "kernel"}),
        ("sources", {"cupti": [None]}),
        ("sources", []),
        ("framework", None),
    ],
)
def test_a_field_of_a_wrong_type_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(wire.WireError, match=r"^Hello\.%s has the wrong type" % name):
        wire.decode(with_field(name, value))


def test_unknown_keys_are_skipped_for_newer_peers() -> None:
    assert wire.decode(with_field("news", 1)) == HELLO


def test_another_version_is_told_apart_from_nonsense() -> None:
    with pytest.raises(wire.VersionMismatch) as caught:
        wire.decode(frame(4, b"{}", version=9))
    assert caught.value.theirs == 9


def test_a_message_over_the_limit_is_not_encoded() -> None:
    with pytest.raises(wire.WireError, match=r"a Hello frame of .* bytes is over the limit of 65536"):
        wire.encode(HELLO._replace(argv=["x" * 70000]))


def test_random_damage_gives_a_message_or_a_wire_error_and_nothing_else() -> None:
    generator = random.Random(2026)
    frames = [wire.encode(message) for message in MESSAGES]
    outcomes = {"message": 0, "error": 0}
    for _ in range(3000):
        data = bytearray(generator.choice(frames))
        for _ in range(generator.randint(1, 4)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        damaged = bytes(data[: generator.randint(0, len(data))]) if generator.random() < 0.3 else bytes(data)
        try:
            wire.decode(damaged)
            outcomes["message"] += 1
        except wire.WireError:
            outcomes["error"] += 1
    assert sum(outcomes.values()) == 3000
    assert outcomes["error"] > 1000


def test_a_state_of_an_older_agent_has_no_settings() -> None:
    frame = wire.encode(wire.State("c1", "COLLECT", 1))
    payload = frame[wire.HEADER_BYTES :].replace(b',"settings":{}', b"")
    header = bytearray(frame[: wire.HEADER_BYTES])
    header[8:12] = struct.pack("<I", len(payload))
    assert wire.decode(bytes(header) + payload) == wire.State("c1", "COLLECT", 1)
