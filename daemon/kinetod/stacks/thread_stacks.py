"""The stacks of one process as values, and as the line of JSON that travels from the reading process to the daemon."""

from typing import Annotated

import msgspec

NO_SUCH_PROCESS = 3  # exit status of the reading process
MAX_THREADS = 512
MAX_FRAMES = 100  # of one thread: the inner ones, without which nothing can be told, and the outermost
MAX_TEXT_CHARS = 300
MAX_ANSWER_BYTES = 3 << 20  # a gRPC client takes 4 MiB
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT_CHARS)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class StackFrame(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """profiler.proto's Frame."""

    function: Text
    file: Text
    line: Count
    code: Text = ""
    own: bool = False


class ThreadStack(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """profiler.proto's ThreadStack; `state` and `wait` are names without their prefix."""

    thread: Count
    name: Text
    state: Text
    cpu_ns: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    system_call: Text = ""
    holds_gil: bool = False
    wait: Text = ""
    waits: Text = ""
    frames: Annotated[list[StackFrame], msgspec.Meta(max_length=MAX_FRAMES)] = []
    left_out: Count = 0


class StackReading(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """profiler.proto's ProcessStacks without the process."""

    time_ns: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0
    threads: Annotated[list[ThreadStack], msgspec.Meta(max_length=MAX_THREADS)] = []
    left_out: Count = 0
    reason: Text = ""


encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(StackReading)


def decode(line: bytes) -> StackReading:
    """The stacks in one line. Raises ValueError."""
    return _decoder.decode(line)


def only_reason(reason: str) -> StackReading:
    """Of a process of which nothing could be read."""
    return StackReading(reason=reason[:MAX_TEXT_CHARS])
