"""Frames of the link. Whoever gets one takes it or raises WireError; what is taken has the form that others rely on."""

import random
from collections.abc import Iterator

from google.protobuf.message import Message
from kineto_agent.control.events import StartRequested
from kineto_agent.control.session import problem_of
from kineto_agent.protocol import wire
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.agents.agent_hub import checked_hello
from kinetod.captures.target.conversion import overhead_of
from kinetod.captures.target.target_description import describe_target
from support.agent.agent_daemon import start_request
from support.agent.scripted_agent import hello_message

from fuzz import frames

HELLO = hello_message()._replace(pid=7, argv=["train.py"])
START = start_request(frames.CAPTURE, duration_ns=1)


def play(data: bytes) -> None:
    try:
        message = wire.decode(data)
    except wire.WireError:
        return
    _use(message)
    try:
        again = wire.encode(message)
    except wire.WireError:  # escaped it is longer than a frame may be
        return
    assert repr(wire.decode(again)) == repr(message)


def _use(message: wire.Message) -> None:
    if isinstance(message, wire.Start):
        problem_of(_asked(message))
    if isinstance(message, wire.Hello):
        hello = checked_hello(message)
        process = pb.Process(job_id=hello.job_id, framework=hello.framework, command=hello.argv)
        process.rank = hello.rank if hello.rank is not None else 0
        process.world_size = hello.world_size if hello.world_size is not None else 0
        process.iterations = hello.iterations
        _serialized(process)
    if isinstance(message, wire.Result):
        _serialized(overhead_of(message.overhead))
        info = describe_target(
            capture_id=message.capture_id, host="h", process=pb.Process(command=["x"]), hello=HELLO, start=START,
            result=message, window_ns=(message.window_start_ns, message.window_end_ns), labels={},
        )  # fmt: skip
        type(info).from_json(info.to_json())


def _asked(start: wire.Start) -> StartRequested:
    return StartRequested(request=start, now_ns=frames.NOW_NS, iteration=3, refusal=None, hooked_ns=0, step_ns=10**6)


def _serialized(message: Message) -> None:
    type(message).FromString(message.SerializeToString())


def mutated(_data: bytes, rng: random.Random) -> bytes:
    """A frame with a right head, and values that it should not have."""
    return frames.damaged(rng.choice((frames.of_agent, frames.of_daemon))(rng), rng)


def seeds() -> Iterator[bytes]:
    """One frame of each kind."""
    for message in (
        HELLO, START, START._replace(duration_ns=None, iterations=3), frames.result(), wire.Welcome("0.1.0"),
        wire.Describe(), wire.Cancel(frames.CAPTURE, True), wire.Release(frames.CAPTURE), wire.Refuse("no"),
        wire.State(frames.CAPTURE, "WARMUP", 5), wire.Rejected(frames.CAPTURE, "BUSY", "busy", ""),
        wire.Arena(frames.CAPTURE, "stacks", "python_stacks/1", {"hz": 1000}),
    ):  # fmt: skip
        yield wire.encode(message)
