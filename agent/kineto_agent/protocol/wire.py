"""The link between an agent and the daemon: frames <-> frozen values, no I/O.

Theory of operation
    One `SOCK_SEQPACKET` Unix socket per agent, so that a read gives exactly one frame. A frame is a
    16-byte header (magic, protocol version, message type, payload length) and a JSON object. File
    descriptors travel with a frame by SCM_RIGHTS: `Arena` and `Plugins` carry one each, the others none.

    agent -> daemon   Hello, State, Arena, Result, Rejected
    daemon -> agent   Welcome, Refuse, Plugins, Describe, Start, Cancel, Release

    Both sides treat input as untrusted: `decode` raises `WireError` on anything that is not exactly a known message
    with the right types. Unknown keys are skipped and fields with a default may be missing, so that a newer peer may
    add such fields; anything else changes `PROTOCOL_VERSION`.

Times are Unix nanoseconds, durations nanoseconds. Runs on CPython 3.9 and later, standard library only.
"""

import json
import struct
from typing import Any, Dict, List, NamedTuple, Optional, Tuple, Type, Union

PROTOCOL_VERSION = 1
PLUGIN_INTERFACE = 1  # version of the interface of plug-ins (plugin_bundle.py)
MAX_FRAME_BYTES = 64 * 1024  # well under the default socket buffer (212,992): one send, one packet
_HEADER = struct.Struct("<4sHHII")  # magic, version, type, payload bytes, reserved
HEADER_BYTES = _HEADER.size
_MAGIC = b"KNTO"


class WireError(Exception):
    """A frame that the protocol does not allow. The connection cannot be used any further."""


class VersionMismatch(WireError):
    """The peer speaks another protocol version."""

    def __init__(self, theirs: int) -> None:
        super().__init__("the peer uses protocol version %d, but this side uses %d" % (theirs, PROTOCOL_VERSION))
        self.theirs = theirs


class Hello(NamedTuple):
    """Describes the agent. Sent after connecting and as the answer to `Describe`.

    The kernel's credentials are the identity; `pid` is only the number that the process itself sees.
    """

    agent_version: str
    pid: int
    python_version: str
    framework: str
    rank: Optional[int]
    world_size: Optional[int]
    job_id: str
    iterations: int  # -1: never stepped
    sources: Dict[str, List[str]]  # source name -> Kineto activity types available now
    argv: List[str]
    busy_capture_id: str
    iteration_ns: int = 0  # median length of the latest iterations; 0: unknown, or the running one takes far longer
    plugins: int = 0  # PLUGIN_INTERFACE of the agent; 0: it accepts no plug-ins
    stalled_ns: int = 0  # for how long the running iteration has lasted, if that is far longer than the latest ones


class Welcome(NamedTuple):
    """The daemon has taken the agent into its registry."""

    daemon_version: str


class Refuse(NamedTuple):
    """The daemon refuses this agent, which must not reconnect at once."""

    reason: str


class Plugins(NamedTuple):
    """The daemon's plug-ins, in a sealed memfd (one descriptor with this frame); see plugin_bundle.py.

    Sent after Welcome, only to agents whose Hello accepts them. digest: of the memfd's content.
    """

    digest: str
    names: List[str]


class Describe(NamedTuple):
    """Asks for a fresh Hello."""


class Start(NamedTuple):
    """A capture request. Exactly one of duration_ns and iterations is set."""

    capture_id: str
    activity_types: List[str]  # empty: the sources' defaults
    duration_ns: Optional[int]
    iterations: Optional[int]
    start_iteration: Optional[int]
    iteration_roundup: int
    warmup_iterations: int
    warmup_ns: int
    start_time_ns: int  # 0: at once
    buffer_limit_bytes: int
    or_duration_ns: Optional[int]  # with iterations: what to record instead in a process that has never stepped
    options: Dict[str, Any]  # by the names of the public `Options`
    gpu_drain_ms: int = 300  # queued GPU work that CUPTI's first and last call may wait for


class Cancel(NamedTuple):
    """Ends a capture early. keep_partial: data recorded in the window so far is a trace, otherwise it is discarded."""

    capture_id: str
    keep_partial: bool


class Release(NamedTuple):
    """The daemon has copied everything: the agent may free the arenas of this capture."""

    capture_id: str


class State(NamedTuple):
    """A transition. state: WAIT_FOR_REQUEST, WARMUP, COLLECT or PROCESS.

    WAIT_FOR_REQUEST with a capture's id means: accepted, waiting for its start time or iteration. settings: with
    COLLECT, those of control/program_settings.py. call: no transition, but a call into a vendor's library made for this
    capture: it has been blocked since call_since_ns, or has returned (0).
    """

    capture_id: str
    state: str
    time_ns: int
    settings: Dict[str, Any] = {}  # noqa: RUF012 - a default of a NamedTuple, never changed
    call: str = ""
    call_since_ns: int = 0


class Arena(NamedTuple):
    """Announces the memfd (one descriptor with this frame) into which a source writes.

    format: one of `kineto_agent.protocol.records`. metadata is the source's own.
    """

    capture_id: str
    source: str
    format: str
    metadata: Dict[str, Any]


class Result(NamedTuple):
    """The end of a capture. Sent when every source has stopped and all buffers are READY.

    outcome: "done", "partial", "failed" or "cancelled". window_*: the intended window. sources: per source {"records",
    "dropped", "bytes", "metadata"}; metadata["way"] describes for people how it recorded, metadata["covered_ns"] is its
    start and end (Unix ns). iterations: empty; of earlier agents {"thread": system thread id that steps, "starts":
    [[number, Unix ns], ...]}. overhead: {"start_ns", "stop_ns", "detach_ns", "agent_cpu_ns", "step_ratio",
    "least_step_ratio"}. not_recorded: requested activity types that no source could begin to record, and why.
    """

    capture_id: str
    outcome: str
    reason_code: str
    reason: str
    window_start_ns: int
    window_end_ns: int
    sources: Dict[str, Any]
    overhead: Dict[str, Any]
    threads: Dict[str, str]  # system thread id -> name
    iterations: Dict[str, Any]
    warnings: List[str]
    not_recorded: Dict[str, str] = {}  # noqa: RUF012 - a default of a NamedTuple, never changed


class Rejected(NamedTuple):
    """The agent will not make this capture (BUSY with busy_capture_id, NOTHING_TO_RECORD, ...)."""

    capture_id: str
    reason_code: str
    reason: str
    busy_capture_id: str


Message = Union[Hello, Welcome, Refuse, Plugins, Describe, Start, Cancel, Release, State, Arena, Result, Rejected]
WITH_DESCRIPTOR = (Arena, Plugins)

_TYPES: Dict[int, Type[Any]] = {
    1: Hello,
    2: Welcome,
    3: Refuse,
    4: Describe,
    5: Start,
    6: Cancel,
    7: Release,
    8: State,
    9: Arena,
    10: Result,
    11: Rejected,
    12: Plugins,
}
_NUMBERS = {cls: number for number, cls in _TYPES.items()}


def _is_str_list(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(1 << 63) <= value < 1 << 63


_CHECKS: Dict[Any, Any] = {
    str: lambda v: isinstance(v, str),
    int: _is_int,
    bool: lambda v: isinstance(v, bool),
    Optional[int]: lambda v: v is None or _is_int(v),
    List[str]: _is_str_list,
    Dict[str, Any]: lambda v: isinstance(v, dict),
    Dict[str, str]: lambda v: isinstance(v, dict) and all(isinstance(item, str) for item in v.values()),
    Dict[str, List[str]]: lambda v: isinstance(v, dict) and all(_is_str_list(item) for item in v.values()),
}


def encode(message: Message) -> bytes:
    """One frame. Raises WireError if it would be longer than MAX_FRAME_BYTES."""
    payload = json.dumps(message._asdict(), separators=(",", ":")).encode()
    size = HEADER_BYTES + len(payload)
    if size > MAX_FRAME_BYTES:
        name = type(message).__name__
        raise WireError("a %s frame of %d bytes is over the limit of %d" % (name, size, MAX_FRAME_BYTES))
    return _HEADER.pack(_MAGIC, PROTOCOL_VERSION, _NUMBERS[type(message)], len(payload), 0) + payload


def _split(frame: bytes) -> Tuple[int, bytes]:
    if len(frame) < HEADER_BYTES:
        raise WireError("a frame of %d bytes has no header" % len(frame))
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError("a frame of %d bytes is over the limit of %d" % (len(frame), MAX_FRAME_BYTES))
    magic, version, number, length, _reserved = _HEADER.unpack_from(frame)
    if magic != _MAGIC:
        raise WireError("not a kineto frame: it starts with %r" % frame[:4])
    if version != PROTOCOL_VERSION:
        raise VersionMismatch(version)
    if length != len(frame) - HEADER_BYTES:
        raise WireError("the header announces %d payload bytes, but %d arrived" % (length, len(frame) - HEADER_BYTES))
    return number, frame[HEADER_BYTES:]


def decode(frame: bytes) -> Message:
    """The message in one frame. Raises WireError (VersionMismatch for another protocol version)."""
    number, payload = _split(frame)
    cls = _TYPES.get(number)
    if cls is None:
        raise WireError("unknown message type %d" % number)
    try:
        values = json.loads(payload)
    except (ValueError, RecursionError) as exc:
        raise WireError("the payload of %s is not JSON: %s" % (cls.__name__, exc)) from exc
    if not isinstance(values, dict):
        raise WireError("the payload of %s is not a JSON object" % cls.__name__)
    fields = {}
    for name, kind in cls.__annotations__.items():
        if name not in values:
            if name in cls._field_defaults:
                continue  # missing from an older peer
            raise WireError("%s.%s is missing" % (cls.__name__, name))
        if not _CHECKS[kind](values[name]):
            raise WireError("%s.%s has the wrong type: %.80r" % (cls.__name__, name, values[name]))
        fields[name] = values[name]
    message: Message = cls(**fields)
    return message
