"""Checks a caller's request field by field and turns it into the request for the agents. Pure."""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from kineto_agent.protocol import wire
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.quantities import format_duration, format_size
from kineto_trace.base.telemetry_ids import TRACE_PARENT
from kineto_trace.store.output_formats import DEFAULT_FORMAT, FILE_NAMES

from kinetod.base.errors import check_shown, invalid
from kinetod.captures.counters.counter_request import SamplingRequest, checked_counters
from kinetod.config.settings import Config
from kinetod.selection.process_registry import Match, checked_selector

FORMATS = tuple(FILE_NAMES)
DEFAULT_FORMATS = (DEFAULT_FORMAT,)
MAX_ITERATIONS = 1_000_000
MAX_LABELS = 64
MAX_LABEL_KEY_CHARS = 63
MAX_LABEL_VALUE_CHARS = 255
MAX_ACTIVITY_TYPES = 64
MAX_STACK_SAMPLE_HZ = 1000
MIN_BUFFER_BYTES = 1 << 20
MAX_BUFFER_BYTES = 16 << 30
MAX_KEY_CHARS = 128
START_TIME_SLACK_NS = 2 * 10**9  # a start time that has just passed, during delivery of the request
# Kineto's types that no source records, and the types that each needs instead.
_DERIVED_TYPES = {
    "external_correlation": (),  # every trace has the links between operators, calls and GPU work
    "gpu_user_annotation": ("user_annotation",),  # derived from these and the GPU work under them
}
# Options that add an activity type to the named ones.
_TYPES_OF_OPTIONS = {
    "with_stack": "python_function",
    "stack_trace": "python_function",
    "profile_memory": "cpu_instant_event",
}
# torch's observer reads the top of a stack that is empty if it starts or ends while operators of other threads run.
_EXECUTION_TRACE = "execution_trace"
_NO_EXECUTION_TRACE = (
    "kinetod never starts torch's ExecutionTraceObserver, which can crash a running program when started from outside; "
    "use it inside the program, around whole steps, or record cpu_op with record_shapes instead"
)
_WITH_OWN_STACKS = {"memory_snapshot"}  # with_stack: the stacks of its allocations
_OPERATOR_OPTIONS = ("record_shapes", "with_modules", "with_flops")  # they describe cpu_op rows
_ACTIVITY_TYPE = re.compile(r"[a-z][a-z0-9_]{0,63}")
_LABEL_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureRequest:
    """A valid request. recording: what goes to the agents, still without the capture's id.

    keep_agent_ns: how long an attached agent stays afterwards. counters: hardware counters to sample too.
    """

    match: Match
    recording: wire.Start
    formats: tuple[str, ...]
    no_attach: bool
    keep_agent_ns: int
    counters: SamplingRequest | None = None


def request_hash(spec: pb.CaptureSpec) -> str:
    """Digest of a request that does not depend on the order of its labels."""
    return hashlib.sha256(spec.SerializeToString(deterministic=True)).hexdigest()


def with_trace_parent(spec: pb.CaptureSpec, trace_parent: str) -> pb.CaptureSpec:
    """Returns the spec with the caller's span as a label, unless there is none or the caller set that label."""
    if not trace_parent or TRACE_PARENT in spec.labels:
        return spec
    labelled = pb.CaptureSpec()
    labelled.CopyFrom(spec)
    labelled.labels[TRACE_PARENT] = trace_parent
    return labelled


def checked_key(key: str) -> str:
    """Returns the idempotency key if it can be stored. Raises InvalidRequest."""
    if len(key) > MAX_KEY_CHARS:
        raise invalid("idempotency_key", f"must be at most {MAX_KEY_CHARS} characters long")
    check_shown("idempotency_key", key)
    return key


def checked_spec(spec: pb.CaptureSpec, config: Config, now_ns: int) -> CaptureRequest:
    """Validates a spec. Raises InvalidRequest, which names the wrong field."""
    _check_labels(spec)
    types = _activity_types(spec)
    _check_options(spec.options, types)
    window = _iterations(spec, config)
    _check_warmup(spec, config)
    _check_arming(spec, config)
    check_start_time("spec.start_time_ns", spec.start_time_ns, spec, config, now_ns)
    recording = wire.Start(
        capture_id="",
        activity_types=list(types),
        duration_ns=None if window else spec.duration_ns,
        iterations=window.count if window else None,
        start_iteration=window.start if window and window.HasField("start") else None,
        iteration_roundup=window.roundup if window else 0,
        warmup_iterations=window.warmup if window else 0,
        warmup_ns=spec.warmup_ns,
        start_time_ns=spec.start_time_ns,
        buffer_limit_bytes=_buffer_limit(spec, config),
        or_duration_ns=_or_duration(spec, config),
        options=_options(spec.options),
        gpu_drain_ms=config.gpu_drain_limit_ns // 1_000_000,
    )
    return CaptureRequest(
        match=checked_selector(spec.selector, "spec.selector"),
        recording=recording,
        formats=_formats(spec.formats),
        no_attach=spec.no_attach,
        keep_agent_ns=_keep_agent(spec, config),
        counters=checked_counters(spec),
    )


def _iterations(spec: pb.CaptureSpec, config: Config) -> pb.IterationWindow | None:
    """The iterations to record; None for a duration. Raises InvalidRequest if either is wrong."""
    extent = spec.WhichOneof("extent")
    if extent is None:
        raise invalid("spec", "set either duration_ns or iterations to say how much to record")
    if extent != "iterations":
        _check_range("spec.duration_ns", spec.duration_ns, config.max_duration_ns, least=1)
        return None
    window, path = spec.iterations, "spec.iterations"
    if not 0 < window.count <= MAX_ITERATIONS:
        raise invalid(f"{path}.count", f"must be 1 to {MAX_ITERATIONS}, got {window.count}")
    for name, value in (("start", window.start), ("roundup", window.roundup), ("warmup", window.warmup)):
        if value < 0:
            raise invalid(f"{path}.{name}", f"must not be negative, got {value}")
    if window.warmup > MAX_ITERATIONS:
        raise invalid(f"{path}.warmup", f"must be at most {MAX_ITERATIONS}, got {window.warmup}")
    return window


def _or_duration(spec: pb.CaptureSpec, config: Config) -> int | None:
    if not spec.HasField("or_duration_ns"):
        return None
    if spec.WhichOneof("extent") != "iterations":
        raise invalid("spec.or_duration_ns", "is only for captures by iteration; leave it out with duration_ns")
    _check_range("spec.or_duration_ns", spec.or_duration_ns, config.max_duration_ns, least=1)
    return spec.or_duration_ns


def _check_range(field: str, value_ns: int, most_ns: int, least: int = 0) -> None:
    if value_ns < least:
        raise invalid(field, f"must be {'greater than 0' if least else '0 or more'}, got {value_ns}")
    if value_ns > most_ns:
        raise invalid(
            field,
            f"{format_duration(value_ns)} is longer than the {format_duration(most_ns)} that this daemon allows "
            "(kinetod --max-duration)",
        )


def _check_warmup(spec: pb.CaptureSpec, config: Config) -> None:
    _check_range("spec.warmup_ns", spec.warmup_ns, config.max_duration_ns)
    if spec.warmup_ns and spec.WhichOneof("extent") == "iterations":
        raise invalid("spec.warmup_ns", "is only for captures by duration; with iterations, set their warm-up instead")


def _check_arming(spec: pb.CaptureSpec, config: Config) -> None:
    _check_range("spec.arm_ns", spec.arm_ns, config.max_duration_ns)
    if spec.arm_ns and spec.start_time_ns:
        raise invalid(
            "spec.start_time_ns", "cannot be combined with arm_ns: StartCapture sets when an armed capture starts"
        )


def check_start_time(field: str, start_time_ns: int, spec: pb.CaptureSpec, config: Config, now_ns: int) -> None:
    """Checks a start time by this host's clock; 0 means at once. Raises InvalidRequest."""
    if start_time_ns == 0:
        return
    if spec.WhichOneof("extent") == "iterations":
        raise invalid(field, "is only for captures by duration; with iterations, set the first iteration instead")
    if spec.options.wait_for_user_profiler:
        raise invalid(field, "cannot be combined with wait_for_user_profiler; leave one of them out")
    if start_time_ns < now_ns - START_TIME_SLACK_NS:
        raise invalid(field, f"is {format_duration(now_ns - start_time_ns)} in the past by this host's clock")
    _check_range(field, start_time_ns - now_ns, config.max_duration_ns, least=-START_TIME_SLACK_NS)


def _activity_types(spec: pb.CaptureSpec) -> tuple[str, ...]:
    if len(spec.activity_types) > MAX_ACTIVITY_TYPES:
        raise invalid(
            "spec.activity_types", f"at most {MAX_ACTIVITY_TYPES} are allowed, got {len(spec.activity_types)}"
        )
    for index, name in enumerate(spec.activity_types):
        if not _ACTIVITY_TYPE.fullmatch(name):
            raise invalid(f"spec.activity_types[{index}]", f"expected a name like gpu_memcpy, got {name!r:.80}")
        if name == _EXECUTION_TRACE:
            raise invalid(f"spec.activity_types[{index}]", _NO_EXECUTION_TRACE)
    types = [each for name in spec.activity_types for each in _DERIVED_TYPES.get(name, (name,))]
    if spec.activity_types and not types:
        raise invalid(
            "spec.activity_types",
            "external_correlation is part of every trace and records nothing by itself; add another type",
        )
    if types and not set(types) <= _WITH_OWN_STACKS:
        types += (name for option, name in _TYPES_OF_OPTIONS.items() if getattr(spec.options, option))
    return tuple(dict.fromkeys(types))


def _check_options(options: pb.Options, types: tuple[str, ...]) -> None:
    if options.execution_trace:
        raise invalid(f"spec.options.{_EXECUTION_TRACE}", _NO_EXECUTION_TRACE)
    if options.stack_sample_hz > MAX_STACK_SAMPLE_HZ:
        raise invalid(
            "spec.options.stack_sample_hz", f"must be 0 to {MAX_STACK_SAMPLE_HZ}, got {options.stack_sample_hz}"
        )
    if options.stack_trace and options.stack_sample_hz:
        raise invalid(
            "spec.options.stack_sample_hz",
            "cannot be combined with stack_trace, which records every call instead of sampling",
        )
    for name in _OPERATOR_OPTIONS:
        if types and getattr(options, name) and "cpu_op" not in types:
            raise invalid(f"spec.options.{name}", "applies to operators only; add cpu_op to activity_types")


def _options(options: pb.Options) -> dict[str, bool | int]:
    """The options that are set, as the agent receives them; stack_trace implies with_stack."""
    chosen = {field.name: value for field, value in options.ListFields()}
    return {**chosen, "with_stack": True} if options.stack_trace else chosen


def _buffer_limit(spec: pb.CaptureSpec, config: Config) -> int:
    limit = spec.buffer_limit_bytes
    if limit == 0:
        return config.buffer_limit_bytes
    if not MIN_BUFFER_BYTES <= limit <= MAX_BUFFER_BYTES:
        raise invalid(
            "spec.buffer_limit_bytes",
            f"must be {format_size(MIN_BUFFER_BYTES)} to {format_size(MAX_BUFFER_BYTES)}, got {limit} bytes",
        )
    return limit


def _keep_agent(spec: pb.CaptureSpec, config: Config) -> int:
    if not spec.HasField("keep_agent_ns"):
        return config.keep_agent_ns
    if spec.keep_agent_ns < 0:
        raise invalid("spec.keep_agent_ns", f"must be 0 or more, got {spec.keep_agent_ns}")
    return spec.keep_agent_ns


def _formats(formats: Iterable[str]) -> tuple[str, ...]:
    wanted = tuple(dict.fromkeys(formats)) or DEFAULT_FORMATS
    for index, name in enumerate(wanted):
        if name not in FORMATS:
            raise invalid(
                f"spec.formats[{index}]", f"unknown format {name!r:.80}; expected one of {', '.join(FORMATS)}"
            )
    return wanted


def _check_labels(spec: pb.CaptureSpec) -> None:
    if len(spec.labels) > MAX_LABELS:
        raise invalid("spec.labels", f"at most {MAX_LABELS} labels are allowed, got {len(spec.labels)}")
    for key, value in spec.labels.items():
        if len(key) > MAX_LABEL_KEY_CHARS or not _LABEL_KEY.fullmatch(key):
            raise invalid(
                "spec.labels", f"the key {key!r:.80} is not 1 to {MAX_LABEL_KEY_CHARS} letters, digits, . _ / or -"
            )
        if len(value) > MAX_LABEL_VALUE_CHARS:
            raise invalid(f"spec.labels[{key!r}]", f"must be at most {MAX_LABEL_VALUE_CHARS} characters long")
        check_shown(f"spec.labels[{key!r}]", value)
