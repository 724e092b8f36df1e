"""Builds the text that asks libkineto for a trace, and finds the parts of a request that it cannot carry out. Pure.

Theory of operation
    libkineto reads lines of KEY=VALUE (Config.cpp, AbstractConfig.cpp). A line with a second "=" or with an invalid
    value ends the reading, and the lines before it are carried out unchecked; unknown names are skipped. So every value
    is written in a form that all of its versions accept, and the list of activity types, which differs between
    versions, comes last and contains only those that all have.

Rules
    PROFILE_MEMORY is never sent: the thread that it starts runs in a loop without a pause until the process ends.
    A request by iteration always includes a duration: libkineto uses it in a program that does not step, and 500 ms by
    default. With a duration of 0 it refuses such a request, as kinetod's agent does. A start time in the past is an
    error in libkineto, and the request is dropped silently.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kineto_agent.protocol import wire
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.quantities import format_duration, times

# The types that libkineto has known since it began to poll; an unknown one ends the reading of the text.
ACTIVITY_TYPES = (
    "cpu_op",
    "user_annotation",
    "gpu_user_annotation",
    "gpu_memcpy",
    "gpu_memset",
    "kernel",
    "external_correlation",
    "cuda_runtime",
    "cuda_driver",
    "cpu_instant_event",
    "python_function",
    "overhead",
    "cuda_sync",
)
POLL_PERIOD_NS = 5 * 10**9  # Config.cpp; only a configuration file of the process changes it
# A timed trace begins this long after its request was read, so that the loop of 1 s does not miss its start
# (Config.cpp).
START_DELAY_NS = 2 * 10**9
LEAST_LEAD_NS = POLL_PERIOD_NS + START_DELAY_NS  # earliest start time that libkineto can keep
_MS, _S, _MIB = 10**6, 10**9, 1 << 20
_MOST = (1 << 31) - 1  # libkineto reads most numbers as int32
_MIN_BUFFER_MIB = 1
_OPTION_KEYS = {
    "record_shapes": "PROFILE_REPORT_INPUT_SHAPES",
    "profile_memory": "PROFILE_PROFILE_MEMORY",
    "with_stack": "PROFILE_WITH_STACK",
    "with_flops": "PROFILE_WITH_FLOPS",
    "with_modules": "PROFILE_WITH_MODULES",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceDestination:
    """Where libkineto must write, and the id that the file must repeat. folder, stem: as the process sees them.

    libkineto puts the process's own pid between stem and suffix.
    """

    folder: str
    stem: str
    trace_id: int

    @property
    def path(self) -> str:
        """The value of ACTIVITIES_LOG_FILE."""
        return f"{self.folder}/{self.stem}.json"

    def name(self, own_pid: int) -> str:
        """The file's name in its folder. own_pid: the process's pid in its own namespace."""
        return f"{self.stem}_{own_pid}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class KinetoText:
    """A request for libkineto. warnings: how it differs from the caller's request."""

    text: bytes
    warnings: tuple[str, ...]


def unsupported(spec: pb.CaptureSpec) -> str:
    """The part of a request that libkineto cannot carry out, with advice; empty if there is none."""
    unknown = [name for name in spec.activity_types if name not in ACTIVITY_TYPES]
    if unknown:
        return (
            f"libkineto cannot record {', '.join(unknown)} on demand; leave these types out, or let kinetod's agent "
            "record (--recorder agent)"
        )
    if spec.options.stack_sample_hz:
        return "libkineto does not sample stacks; leave stack_sample_hz out, or use --recorder agent"
    if spec.options.wait_for_user_profiler:
        return "libkineto does not wait for the program's own profiler; trace again once that has ended"
    return ""


def kineto_text(
    start: wire.Start,
    spec: pb.CaptureSpec,
    destination: TraceDestination,
    *,
    now_ns: int,
) -> KinetoText:
    """The text for one process. start: when and for how long; spec: the rest. now_ns: Unix time of the offer."""
    warnings: list[str] = []
    entries = {"ACTIVITIES_LOG_FILE": destination.path, "REQUEST_TRACE_ID": str(destination.trace_id)}
    entries |= _iterations(start, warnings) if start.iterations is not None else _duration(start, now_ns, warnings)
    for option, key in _OPTION_KEYS.items():
        entries[key] = "true" if start.options.get(option) else "false"
    if spec.options.with_stack and not spec.options.stack_trace:
        warnings.append("libkineto records every Python call instead of sampling stacks, which costs much more")
    if spec.buffer_limit_bytes:
        buffers_mib = max(_MIN_BUFFER_MIB, spec.buffer_limit_bytes // _MIB)
        entries["ACTIVITIES_MAX_GPU_BUFFER_SIZE_MB"] = str(min(buffers_mib, _MOST))
    if types := _types(spec, start.activity_types):
        entries["ACTIVITY_TYPES"] = ",".join(types)
    return KinetoText(
        text="".join(f"{key}={value}\n" for key, value in entries.items()).encode(), warnings=tuple(warnings)
    )


def _types(spec: pb.CaptureSpec, recorded: Iterable[str]) -> list[str]:
    """The types named by the caller, and those that options add."""
    return list(dict.fromkeys([*spec.activity_types, *recorded])) if spec.activity_types else []


def _duration(start: wire.Start, now_ns: int, warnings: list[str]) -> dict[str, str]:
    warmup_s = -(-start.warmup_ns // _S)
    if start.warmup_ns % _S:
        warnings.append(f"libkineto's warm-up is in whole seconds: rounded up to {warmup_s} s")
    begin_ms = 0
    if start.start_time_ns:
        lead_ns = start.start_time_ns - warmup_s * _S - now_ns
        if lead_ns >= LEAST_LEAD_NS:
            begin_ms = start.start_time_ns // _MS
        else:
            warnings.append(
                f"libkineto polls for requests only every {format_duration(POLL_PERIOD_NS)}, so it cannot meet a start "
                "time this soon; it begins as soon as it has received the request, up to "
                f"{format_duration(LEAST_LEAD_NS)} after the request was made"
            )
    return {
        "PROFILE_START_TIME": str(begin_ms),
        "ACTIVITIES_DURATION_MSECS": _duration_ms(start.duration_ns or 0),
        "ACTIVITIES_WARMUP_PERIOD_SECS": str(min(warmup_s, _MOST)),
    }


def _iterations(start: wire.Start, warnings: list[str]) -> dict[str, str]:
    if start.or_duration_ns is not None:
        warnings.append(
            "libkineto does not report which of the two it recorded: "
            f"{times(start.iterations or 0, 'iteration')} or, in a program that does not step, "
            f"{format_duration(start.or_duration_ns)}"
        )
    entries = {
        "PROFILE_START_ITERATION": str(min(start.start_iteration or 0, _MOST)),
        "ACTIVITIES_ITERATIONS": str(start.iterations),
        "ACTIVITIES_DURATION_MSECS": _duration_ms(start.or_duration_ns or 0),
        "ACTIVITIES_WARMUP_PERIOD_SECS": "0",
    }
    if start.iteration_roundup > 1:
        entries["PROFILE_START_ITERATION_ROUNDUP"] = str(min(start.iteration_roundup, _MOST))
    if start.warmup_iterations:
        entries["ACTIVITIES_WARMUP_ITERATIONS"] = str(start.warmup_iterations)
    return entries


def _duration_ms(duration_ns: int) -> str:
    return str(min(-(-duration_ns // _MS), _MOST))
