"""The daemon's metrics about itself, for Prometheus. All collectors are here, and functions for what is not one count.

Theory of operation
    Counting only changes numbers in memory: cheap, from any thread, with or without scrapes. Values read at each
    scrape are in host_sample.py, gpu_metrics.py and metrics_server.py, which serves all of them.

    Labels have few values: never a pid, a capture or a user. Values chosen by an agent or another process (reason
    codes, names of sources) go through `_Few`, which replaces all but the first MAX_VALUES by "OTHER".
"""

import contextlib
import platform
import time
from collections.abc import Iterable, Iterator
from functools import partial

import prometheus_client
from kineto_protos.v1 import profiler_pb2 as pb
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector

from kinetod import __version__
from kinetod.base.errors import Reason, VerdictReason

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each counter

MAX_VALUES = 64
OTHER = "OTHER"
_FAST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_WAIT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LONG_S = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_STOP_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 1)

REGISTRY = CollectorRegistry(auto_describe=True)
_counter = partial(Counter, registry=REGISTRY)
_gauge = partial(Gauge, registry=REGISTRY)
_histogram = partial(Histogram, registry=REGISTRY)
ProcessCollector(registry=REGISTRY)


class _Few:
    """Limits the number of values of a label that others choose."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        self._values = set(known)
        self._room = MAX_VALUES

    def __call__(self, value: str) -> str:
        if value not in self._values:
            if self._room == 0:
                return OTHER
            self._room -= 1
            self._values.add(value)
        return value


_few_reasons = _Few(str(code) for codes in (VerdictReason, Reason) for code in codes)
_few_sources = _Few()

_BUILD = Info("kineto_build", "Version of the running daemon and of its Python.", registry=REGISTRY)
_BUILD.info({"version": __version__, "python_version": platform.python_version()})

_CAPTURES = _counter("kineto_captures", "Captures that have ended.", ["status"])
_CAPTURE_S = _histogram(
    "kineto_capture_duration_seconds",
    "Time from the request for a capture to the verdict of its last target.",
    ["status"],
    buckets=_LONG_S,
)
_TARGETS = _counter("kineto_targets", "Processes whose capture has ended, by verdict.", ["verdict", "reason"])
_START_S = _histogram(
    "kineto_capture_start_seconds",
    "Time from the request until a process is recording: attach, wait for an iteration or start time, warm-up.",
    buckets=_WAIT_S,
)
_RECORDS = _counter("kineto_records", "Records collected by captures that have ended.", ["source"])
_DROPPED = _counter(
    "kineto_records_dropped", "Records lost because buffers were full, in captures that have ended.", ["source"]
)
_RAW_BYTES = _counter("kineto_raw_bytes", "Size of the raw records of captures that have ended.", ["source"])

_ATTACHES = _counter("kineto_attaches", "Agents attached to processes.", ["method"])
ATTACH_FAILURES = _counter("kineto_attach_failures", "Processes to which no agent could be attached.", ["reason"])
_ATTACH_S = _histogram(
    "kineto_attach_duration_seconds",
    "Time from the request until the agent's code ran in the process.",
    ["method"],
    buckets=_FAST_S,
)
_STOPPED_S = _histogram(
    "kineto_attach_stopped_seconds",
    "Longest time for which an attach stopped a thread of the process.",
    ["method"],
    buckets=_STOP_S,
)

_STORED = _counter("kineto_stored_bytes", "Size of finished trace files.", ["format"])
_UPLOADED = _counter("kineto_uploaded_bytes", "Bytes uploaded and verified.")
_UPLOAD_S = _histogram("kineto_upload_duration_seconds", "Time to upload one capture.", buckets=_LONG_S)
_UPLOAD_FAILURES = _counter("kineto_upload_failures", "Upload attempts that failed.", ["reason"])
UPLOADS_WAITING = _gauge("kineto_uploads_waiting", "Captures whose upload has not been verified yet.")
_PRUNED = _counter("kineto_pruned_bytes", "Bytes removed by retention.", ["reason"])
_PRUNED_CAPTURES = _counter("kineto_pruned_captures", "Captures removed by retention.", ["reason"])

HOOKS = _counter(
    "kineto_hook_calls",
    "Attempts to run the hook command, call a webhook or push profiles after a capture has ended; result "
    '"dropped" means that too many were waiting or kinetod was stopping.',
    ["hook", "result"],
)
_HOOK_S = _histogram("kineto_hook_duration_seconds", "Time of one hook attempt.", ["hook"], buckets=_LONG_S)
HOOKS_WAITING = _gauge("kineto_hooks_waiting", "Hooks that are in progress, or waiting for their turn or a retry.")

_DECODE_WAIT_S = _histogram(
    "kineto_decode_queue_seconds", "Time that a target waits for a decode worker.", buckets=_WAIT_S
)
_DECODE_S = _histogram("kineto_decode_duration_seconds", "Time to decode one target.", ["outcome"], buckets=_LONG_S)
_DECODE_WAITING = _gauge("kineto_decode_waiting", "Targets waiting for a decode worker.")
DECODER_CRASHES = _counter("kineto_decode_worker_crashes", "Decode workers that crashed.")

LINK_REFUSALS = _counter(
    "kineto_link_refusals", "Connections to the agent socket that were refused or closed.", ["reason"]
)
LINK_THROTTLED = _counter("kineto_link_throttled", "Times an agent was read more slowly because it sent too much.")

POLLING_PROCESSES = _gauge("kineto_polling_processes", "Processes whose libkineto polls this daemon.")
POLLS_ANSWERED = _counter("kineto_polls_answered", "Polls from libkineto that were answered.")
POLLED_CONFIGURATIONS = _counter(
    "kineto_polled_configurations",
    "Configurations for libkineto: sent in answer to polls (repeats included), and accepted by its profiler.",
    ["event"],
)
POLLS_DROPPED = _counter(
    "kineto_polls_dropped",
    "Datagrams from libkineto, or from programs that imitate it, that were not answered.",
    ["reason"],
)

_CALLS = _counter("kineto_grpc_requests", "gRPC calls that have ended.", ["method", "code"])
_CALL_S = _histogram("kineto_grpc_request_duration_seconds", "Duration of gRPC calls.", ["method"], buckets=_FAST_S)
_LIMITED = _counter(
    "kineto_limited_requests",
    "Requests and connections refused or slowed down because one caller, or all together, exceeded a limit.",
    ["limit"],
)
_CALLS_RUNNING = _gauge("kineto_grpc_requests_running", "gRPC calls in progress.", ["method"])

DYNOLOG_REQUESTS = _counter(
    "kineto_dynolog_requests",
    "Requests from Dynolog's clients, by function and outcome.",
    ["function", "outcome"],
)
DYNOLOG_FILES = _counter(
    "kineto_dynolog_files", "Trace files that Dynolog's clients requested outside the store.", ["result"]
)

LINK_REASONS = ("protocol", "handshake", "too_many", "version", "unidentified", "slow_reader")
POLL_DROP_REASONS = ("malformed", "unnamed", "unidentified", "too_often", "too_many", "unread")
for _reason in LINK_REASONS:
    LINK_REFUSALS.labels(_reason)  # present from the beginning: rate() needs the 0
for _reason in POLL_DROP_REASONS:
    POLLS_DROPPED.labels(_reason)
for _event in ("sent", "taken"):
    POLLED_CONFIGURATIONS.labels(_event)
for _limit in ("TOO_MANY_REQUESTS", "TOO_MANY_CALLS", "CONNECTIONS", "CONNECTION_RATE", "BYTES", "CALLS"):
    _LIMITED.labels(_limit)
for _status in ("DONE", "PARTIAL", "FAILED", "CANCELLED"):
    _CAPTURES.labels(_status)
for _result in ("written", "refused"):
    DYNOLOG_FILES.labels(_result)
for _hook in ("command", "webhook", "profiles"):
    for _result in ("ok", "failed", "timeout", "dropped"):
        HOOKS.labels(_hook, _result)


# captures


def capture_ended(capture: pb.Capture) -> None:
    """Counts an ended capture and the verdicts of its targets."""
    status = pb.CaptureStatus.Name(capture.status).removeprefix("CAPTURE_STATUS_")
    _CAPTURES.labels(status).inc()
    _CAPTURE_S.labels(status).observe(max(0, capture.ended_ns - capture.created_ns) / 1e9)
    for target in capture.targets:
        _target_ended(target)


def _target_ended(target: pb.Target) -> None:
    verdict = pb.Verdict.Name(target.verdict).removeprefix("VERDICT_")
    _TARGETS.labels(verdict, _few_reasons(target.reason_code)).inc()
    if target.collecting_ns and target.requested_ns:
        _START_S.observe(max(0, target.collecting_ns - target.requested_ns) / 1e9)
    for counts in target.counts:
        source = _few_sources(counts.source)
        _RECORDS.labels(source).inc(max(0, counts.records))
        _DROPPED.labels(source).inc(max(0, counts.dropped))
        _RAW_BYTES.labels(source).inc(max(0, counts.bytes))
    for file in target.files:
        _STORED.labels(file.format).inc(max(0, file.size_bytes))


# attaching


def attached(method: str, latency_ns: int, stopped_ns: int) -> None:
    """Counts an attached agent."""
    _ATTACHES.labels(method).inc()
    _ATTACH_S.labels(method).observe(latency_ns / 1e9)
    _STOPPED_S.labels(method).observe(stopped_ns / 1e9)


# store


def uploaded(size_bytes: int, seconds: float) -> None:
    """Counts a capture that was uploaded and verified."""
    _UPLOADED.inc(size_bytes)
    _UPLOAD_S.observe(seconds)


def upload_failed(reason: str) -> None:
    """Counts a failed upload attempt; `reason` is a code."""
    _UPLOAD_FAILURES.labels(_few_reasons(reason)).inc()


def pruned(reason: str, size_bytes: int) -> None:
    """Counts a capture removed by retention; `reason`: age, bytes, user, …"""
    _PRUNED_CAPTURES.labels(_few_reasons(reason)).inc()
    _PRUNED.labels(_few_reasons(reason)).inc(size_bytes)


# hooks


def hook_called(hook: str, result: str, seconds: float) -> None:
    """Counts a hook attempt that ended: ok, failed or timeout."""
    HOOKS.labels(hook, result).inc()
    _HOOK_S.labels(hook).observe(seconds)


# decoding


class Decode:
    """Times the decoding of one target, which waits for a worker until `begins`."""

    def __init__(self) -> None:
        self.asked = time.perf_counter()
        self.began: float | None = None
        _DECODE_WAITING.inc()

    def begins(self) -> None:
        """Notes that the target has a worker."""
        self.began = time.perf_counter()
        _DECODE_WAITING.dec()
        _DECODE_WAIT_S.observe(self.began - self.asked)

    def ends(self, outcome: str) -> None:
        """Notes the outcome: "ok" or "failed"."""
        if self.began is None:
            _DECODE_WAITING.dec()
        else:
            _DECODE_S.labels(outcome).observe(time.perf_counter() - self.began)


@contextlib.contextmanager
def decode() -> Iterator[Decode]:
    """Wrap the decoding of one target in it, including the wait."""
    job = Decode()
    outcome = "failed"
    try:
        yield job
        outcome = "ok"
    finally:
        job.ends(outcome)


# calls


def limited(limit: str) -> None:
    """Counts a refused request (by reason code), or a connection refused (CONNECTIONS, …) or slowed (BYTES, CALLS)."""
    _LIMITED.labels(_few_reasons(limit)).inc()


class GrpcCall:
    """One gRPC call; it ends with `code` unless that is set before."""

    def __init__(self) -> None:
        self.code = "OK"


@contextlib.contextmanager
def call(method: str) -> Iterator[GrpcCall]:
    """Wrap a gRPC call in it. method: one of the service's; code: the name of a gRPC status code."""
    made = GrpcCall()
    began = time.perf_counter()
    _CALLS_RUNNING.labels(method).inc()
    try:
        yield made
    except BaseException:  # the caller went away, or the call was aborted
        if made.code == "OK":
            made.code = "CANCELLED"
        raise
    finally:
        _CALLS_RUNNING.labels(method).dec()
        _CALLS.labels(method, made.code).inc()
        _CALL_S.labels(method).observe(time.perf_counter() - began)
