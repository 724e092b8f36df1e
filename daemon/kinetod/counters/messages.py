"""What the daemon and kinetod-counters say to each other: one SOCK_SEQPACKET packet is one message.

Theory of operation
    A packet is a head (magic, version) and one JSON object, whose `type` is one of the structures below. Everything has
    a bound, and unknown fields are refused. The daemon sends a request and waits for its answer. A SamplingStarted
    brings the descriptor of the ring of samples (SCM_RIGHTS). A connection samples one GPU at most: when it ends,
    whoever ended it, the sampling ends. Nothing comes unasked; how the sampling stands is written in the ring.

    No message names a file: which library is loaded is decided where kinetod-counters is started.
"""

from typing import Annotated

import msgspec

from kinetod.counters.interface import (
    MAX_METRICS,
    MOST_DURATION_NS,
    MOST_INTERVAL_NS,
    CounterDevice,
    CounterPlan,
)
from kinetod.supervise.helper_packets import PacketFormat

VERSION = 1
MAX_REQUEST_BYTES = 16 << 10
MAX_ANSWER_BYTES = 128 << 10  # a packet must fit into the socket's buffer, 208 KiB

Uuid = Annotated[str, msgspec.Meta(max_length=64)]
Short = Annotated[str, msgspec.Meta(max_length=128)]
MetricNames = Annotated[tuple[Annotated[str, msgspec.Meta(max_length=128)], ...], msgspec.Meta(max_length=MAX_METRICS)]


class BadCounterMessage(Exception):
    """The packet is not one of the expected messages. The text says why."""


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    pass


class ListGpus(_Message, frozen=True, tag="list_gpus"):
    """Which GPUs there are. Answered by GpusReply or CountersRefused, as everything."""


class ListBaseMetrics(_Message, frozen=True, tag="list_metrics"):
    """What a GPU has. Answered by BaseMetricsReply."""

    gpu: Uuid


class PlanSampling(_Message, frozen=True, tag="plan"):
    """What would be sampled. Answered by PlanReply."""

    gpu: Uuid
    set_name: Short = ""
    metrics: MetricNames = ()


class StartSampling(_Message, frozen=True, tag="start"):
    """Samples until StopSampling, the end of the connection or most_ns. Answered by SamplingStarted.

    interval_ns: 0: the GPU's default.
    """

    gpu: Uuid
    interval_ns: Annotated[int, msgspec.Meta(ge=0, le=MOST_INTERVAL_NS)]
    most_ns: Annotated[int, msgspec.Meta(gt=0, le=MOST_DURATION_NS)]
    set_name: Short = ""
    metrics: MetricNames = ()


class StopSampling(_Message, frozen=True, tag="stop"):
    """Ends the sampling of this connection. Answered by SamplingStopped."""


CounterRequest = ListGpus | ListBaseMetrics | PlanSampling | StartSampling | StopSampling


class GpusReply(_Message, frozen=True, tag="gpus"):
    """All that the library sees."""

    gpus: Annotated[tuple[CounterDevice, ...], msgspec.Meta(max_length=64)]
    backend: Short
    library_version: Short


class BaseMetricsReply(_Message, frozen=True, tag="metrics"):
    """As many as fit into a packet."""

    names: Annotated[tuple[Short, ...], msgspec.Meta(max_length=4096)]


class PlanReply(_Message, frozen=True, tag="planned"):
    """What fits."""

    plan: CounterPlan


class SamplingStarted(_Message, frozen=True, tag="started"):
    """The counters are held, and samples come. The ring's descriptor comes with it."""

    gpu: CounterDevice
    plan: CounterPlan
    interval_ns: Annotated[int, msgspec.Meta(gt=0, le=MOST_INTERVAL_NS)]
    backend: Short
    library_version: Short


class SamplingStopped(_Message, frozen=True, tag="stopped"):
    """The counters are free, and the ring has its last row."""


class CountersRefused(_Message, frozen=True, tag="refused"):
    """code: an interface.CounterCode; REQUEST or VERSION for a request that is none."""

    code: Short
    reason: Annotated[str, msgspec.Meta(max_length=2000)]


CounterAnswer = GpusReply | BaseMetricsReply | PlanReply | SamplingStarted | SamplingStopped | CountersRefused

_requests: msgspec.json.Decoder[CounterRequest] = msgspec.json.Decoder(CounterRequest)
_answers: msgspec.json.Decoder[CounterAnswer] = msgspec.json.Decoder(CounterAnswer)


def _other_version(theirs: int) -> BadCounterMessage:
    return BadCounterMessage(
        f"the other side speaks version {theirs} of the protocol of kinetod-counters, and this one {VERSION}; "
        "restart both after an upgrade"
    )


_PACKETS = PacketFormat(
    b"KCTR",
    VERSION,
    BadCounterMessage,
    "a packet that is no message between kinetod and kinetod-counters",
    _other_version,
)


def encode(message: CounterRequest | CounterAnswer) -> bytes:
    """Encodes a message as one packet."""
    return _PACKETS.encode(message)


def request(packet: bytes) -> CounterRequest:
    """Decodes the daemon's request. Raises BadCounterMessage."""
    return _PACKETS.decode(packet, _requests, MAX_REQUEST_BYTES)


def answer(packet: bytes) -> CounterAnswer:
    """Decodes the answer of kinetod-counters. Raises BadCounterMessage."""
    return _PACKETS.decode(packet, _answers, MAX_ANSWER_BYTES)
