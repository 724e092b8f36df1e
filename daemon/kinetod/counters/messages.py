"""Messages between the daemon and kinetod-counters: one SOCK_SEQPACKET packet is one message.

Theory of operation
    A packet is a head (magic, version) and one JSON object, whose `type` is one of the structures below. Everything has
    a bound, and unknown fields are refused. The daemon sends a request and waits for its answer. A SamplingStarted
    carries the descriptor of the ring of samples (SCM_RIGHTS). A connection samples one GPU at most: when either side
    closes it, the sampling ends. Nothing is sent unasked; the state of the sampling is in the ring.

    No message names a file: the command line of kinetod-counters decides which library is loaded.
"""

from collections.abc import Callable
from typing import Annotated

import msgspec

from kinetod.counters.interface import (
    MAX_METRICS,
    MOST_DURATION_NS,
    MOST_INTERVAL_NS,
    CounterDevice,
    CounterPlan,
)
from kinetod.supervise.helper_connection import PacketFormat

VERSION = 1
MAX_REQUEST_BYTES = 16 << 10
MAX_ANSWER_BYTES = 128 << 10  # a packet must fit into the socket's buffer, 208 KiB

Uuid = Annotated[str, msgspec.Meta(max_length=64)]
Short = Annotated[str, msgspec.Meta(max_length=128)]
MetricNames = Annotated[tuple[Annotated[str, msgspec.Meta(max_length=128)], ...], msgspec.Meta(max_length=MAX_METRICS)]


class BadCounterMessage(Exception):
    """The packet is not one of the expected messages. The message text says why."""


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    pass


class ListGpus(_Message, frozen=True, tag="list_gpus"):
    """Asks which GPUs there are. Answered, like every request, by its reply (GpusReply) or CountersRefused."""


class ListBaseMetrics(_Message, frozen=True, tag="list_metrics"):
    """Asks for the metrics of a GPU. Answered by BaseMetricsReply."""

    gpu: Uuid


class PlanSampling(_Message, frozen=True, tag="plan"):
    """Asks what would be sampled. Answered by PlanReply."""

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
    """All GPUs that the library sees."""

    gpus: Annotated[tuple[CounterDevice, ...], msgspec.Meta(max_length=64)]
    backend: Short
    library_version: Short


class BaseMetricsReply(_Message, frozen=True, tag="metrics"):
    """As many names as fit into a packet."""

    names: Annotated[tuple[Short, ...], msgspec.Meta(max_length=4096)]


class PlanReply(_Message, frozen=True, tag="planned"):
    """The metrics that fit."""

    plan: CounterPlan


class SamplingStarted(_Message, frozen=True, tag="started"):
    """The counters are held, and samples arrive. The ring's descriptor comes with it."""

    gpu: CounterDevice
    plan: CounterPlan
    interval_ns: Annotated[int, msgspec.Meta(gt=0, le=MOST_INTERVAL_NS)]
    backend: Short
    library_version: Short


class SamplingStopped(_Message, frozen=True, tag="stopped"):
    """The counters are free, and the ring has its last row."""


class CountersRefused(_Message, frozen=True, tag="refused"):
    """code: an interface.CounterCode; REQUEST or VERSION for an invalid request."""

    code: Short
    reason: Annotated[str, msgspec.Meta(max_length=2000)]


CounterAnswer = GpusReply | BaseMetricsReply | PlanReply | SamplingStarted | SamplingStopped | CountersRefused


def _other_version(theirs: int) -> BadCounterMessage:
    return BadCounterMessage(
        f"the other side uses version {theirs} of kinetod-counters' protocol, but this side uses version {VERSION}; "
        "restart both after an upgrade"
    )


_PACKETS = PacketFormat(
    b"KCTR",
    VERSION,
    BadCounterMessage,
    "a packet that is not a message of kinetod-counters' protocol",
    _other_version,
)

encode: Callable[[CounterRequest | CounterAnswer], bytes] = _PACKETS.encode
# For the daemon and for kinetod-counters; both raise BadCounterMessage.
_requests: msgspec.json.Decoder[CounterRequest] = msgspec.json.Decoder(CounterRequest)
_answers: msgspec.json.Decoder[CounterAnswer] = msgspec.json.Decoder(CounterAnswer)
request = _PACKETS.reader(_requests, MAX_REQUEST_BYTES)
answer = _PACKETS.reader(_answers, MAX_ANSWER_BYTES)
