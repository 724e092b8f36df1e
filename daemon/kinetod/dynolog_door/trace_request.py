"""From the configuration text of a request to the capture that it asks for. Pure.

Theory of operation
    The text is libkineto's, so `kineto_protos.kineto_config` reads it, as for `kinetoctl trace --kineto-config`.
    One key is ours, for clients that send text of their own: REQUEST_RECORDER=agent or kineto says who records in
    processes whose libkineto polls this daemon, where the setting dynolog.tracing does not refuse that.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from kineto_protos import kineto_config
from kineto_protos.kineto_config import KinetoConfigError, RequestedCapture
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.visible_text import one_line
from kineto_trace.store.requested_names import LogFile, parse_log_file

RECORDER_KEY = "REQUEST_RECORDER"
RECORDERS = {"agent": pb.RECORDER_AGENT, "kineto": pb.RECORDER_KINETO}
LOG_FILE_LABEL = "dynolog.log_file"
_MAX_LABEL_CHARS = 255
_RECORDER_LINE = re.compile(rf"^[ \t]*{RECORDER_KEY}[ \t]*=[ \t]*(.*?)[ \t]*$", re.MULTILINE)
_OPERATOR_OPTIONS = ("record_shapes", "with_modules", "with_flops")
_OBJECT_STORES = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedTrace:
    """A capture to create for these pids. log_file: where its traces are to appear; None: in the store only.

    notes: what the configuration asked for and does not get, for people.
    """

    spec: pb.CaptureSpec
    log_file: LogFile | None
    notes: tuple[str, ...]


def requested_trace(text: str, pids: Iterable[int], now_ns: int) -> RequestedTrace:
    """Reads a configuration text. now_ns: Unix ns. Raises KinetoConfigError."""
    asked = kineto_config.request(kineto_config.parse(_RECORDER_LINE.sub("", text)), now_ns)
    notes = list(asked.notes)
    log_file = _log_file(asked.log_file, notes)
    spec = pb.CaptureSpec(
        selector=pb.Selector(pids=sorted(pids)),
        warmup_ns=asked.warmup or 0,
        start_time_ns=asked.start_at or 0,
        activity_types=asked.activities or (),
        options=_options(asked, notes),
        buffer_limit_bytes=asked.buffer_limit or 0,
        formats=[log_file.format] if log_file is not None else [],
        labels=_labels(asked),
        or_duration_ns=asked.or_duration,
        recorder=_recorder(text),
    )
    if asked.counters is not None:
        set_name, metrics = asked.counters
        spec.counters.CopyFrom(pb.CounterRequest(set=set_name, metrics=metrics))
    if asked.iterations is None:
        spec.duration_ns = asked.duration or kineto_config.DEFAULT_DURATION_NS
    else:
        spec.iterations.CopyFrom(_iterations(asked))
        if asked.or_duration is None:  # as libkineto does for a process that never steps
            spec.or_duration_ns = kineto_config.DEFAULT_DURATION_NS
    return RequestedTrace(spec=spec, log_file=log_file, notes=tuple(notes))


def _recorder(text: str) -> pb.Recorder:
    found = _RECORDER_LINE.findall(text)
    if not found:
        return pb.RECORDER_UNSPECIFIED
    if found[-1].lower() not in RECORDERS:
        raise KinetoConfigError(f"{RECORDER_KEY}: expected {' or '.join(RECORDERS)}, got {found[-1]!r:.80}")
    return RECORDERS[found[-1].lower()]


def _iterations(asked: RequestedCapture) -> pb.IterationWindow:
    return pb.IterationWindow(
        count=asked.iterations,
        start=asked.start_iteration,
        roundup=asked.roundup or 0,
        warmup=asked.warmup_iterations or 0,
    )


def _options(asked: RequestedCapture, notes: list[str]) -> pb.Options:
    chosen = {name: bool(getattr(asked, name)) for name in _OPERATOR_OPTIONS}
    if asked.activities and "cpu_op" not in asked.activities:
        for name in filter(chosen.get, _OPERATOR_OPTIONS):
            chosen[name] = False
            notes.append(f"{asked.origins[name]}: no effect: it describes cpu_op, which is not recorded")
    return pb.Options(**chosen, with_stack=bool(asked.with_stack), profile_memory=bool(asked.memory))


def _labels(asked: RequestedCapture) -> dict[str, str]:
    labels = dict(asked.labels)
    if asked.log_file is not None:
        labels[LOG_FILE_LABEL] = one_line(asked.log_file)[:_MAX_LABEL_CHARS]
    return labels


def _log_file(text: str | None, notes: list[str]) -> LogFile | None:
    if text is None:
        return None
    try:
        if _OBJECT_STORES.match(text):
            raise ValueError(f"{text!r:.200} is not a path of this host; set upload.url to keep traces elsewhere")
        return parse_log_file(text)
    except ValueError as exc:
        notes.append(f"ACTIVITIES_LOG_FILE: {exc}; the trace is in the store only")
        return None
