"""From the options of `kinetoctl trace` to the request."""

from dataclasses import dataclass
from pathlib import Path

import click
from kineto_protos.kineto_config import KinetoConfig
from kineto_protos.v1 import profiler_pb2 as pb

from kinetoctl.client.enum_names import RECORDERS
from kinetoctl.client.selection import Selection
from kinetoctl.options.selection_options import required

DEFAULT_DURATION_NS = 5_000_000_000
STACKS = ("sample", "trace")  # by our sampler, or every call by torch's tracer
OPERATOR_OPTIONS = ("record_shapes", "with_modules", "with_flops")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """The options of `kinetoctl trace` as click parsed them; None or empty: not given."""

    selection: Selection
    duration: int | None  # ns
    iterations: int | None
    start_iteration: int | None
    roundup: int | None
    warmup_iterations: int | None
    or_duration: int | None  # ns
    warmup: int | None  # ns
    start_at: int | None  # Unix ns
    activities: tuple[str, ...] | None
    wait_for_user_profiler: bool | None
    record_shapes: bool | None
    with_stack: str | None  # of STACKS
    stack_hz: int | None
    with_modules: bool | None
    with_flops: bool | None
    memory: bool | None
    counters: tuple[str, tuple[str, ...]] | None  # a set, or metrics
    counter_interval: int | None  # ns
    buffer_limit: int | None  # bytes per target
    recorder: str | None  # of RECORDERS
    no_attach: bool
    keep_agent: int | None  # ns
    formats: tuple[str, ...]
    labels: tuple[tuple[str, str], ...]
    output_dir: Path | None
    idempotency_key: str | None
    no_fetch: bool
    kineto_config: tuple[KinetoConfig, ...]


def _check_extent(options: TraceOptions) -> None:
    if options.iterations is None:
        given = {
            "--start-iteration": options.start_iteration,
            "--roundup": options.roundup,
            "--warmup-iterations": options.warmup_iterations,
            "--or-duration": options.or_duration,
        }
        for name, value in given.items():
            if value is not None:
                raise click.UsageError(f"{name} needs --iterations")
        return
    if options.duration is not None:
        raise click.UsageError("--duration and --iterations exclude each other")
    if options.warmup is not None:
        raise click.UsageError("--warmup needs --duration; use --warmup-iterations with --iterations")
    if options.start_at is not None:
        raise click.UsageError("--start-at needs --duration; use --start-iteration with --iterations")


def _check_recording(options: TraceOptions) -> None:
    if options.wait_for_user_profiler and options.start_at is not None:
        raise click.UsageError(
            "--wait-for-user-profiler and --start-at exclude each other: a capture with a start time cannot wait"
        )
    if options.recorder == "kineto" and options.stack_hz is not None:
        raise click.UsageError("--stack-hz needs --recorder agent; libkineto records every call")
    if options.with_stack == "trace" and options.stack_hz is not None:
        raise click.UsageError("--stack-hz needs sampled stacks; --with-stack=trace records every call")
    if options.counters is None and options.counter_interval is not None:
        raise click.UsageError("--counter-interval needs --counters")
    for name in OPERATOR_OPTIONS:
        if getattr(options, name) and options.activities and "cpu_op" not in options.activities:
            option = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{option} describes operators, so --activities must include cpu_op")


def _recording(options: TraceOptions) -> pb.Options:
    return pb.Options(
        record_shapes=bool(options.record_shapes),
        with_stack=options.with_stack is not None,
        with_modules=bool(options.with_modules),
        with_flops=bool(options.with_flops),
        profile_memory=bool(options.memory),
        stack_sample_hz=options.stack_hz or 0,
        stack_trace=options.with_stack == "trace",
        wait_for_user_profiler=bool(options.wait_for_user_profiler),
    )


def _iterations(options: TraceOptions) -> pb.IterationWindow:
    return pb.IterationWindow(
        count=options.iterations,
        start=options.start_iteration,
        roundup=options.roundup or 0,
        warmup=options.warmup_iterations or 0,
    )


def build_spec(options: TraceOptions, *, selects: bool = True) -> pb.CaptureSpec:
    """The capture to request. Raises click.UsageError if the options contradict each other.

    selects: whether the options must select processes; otherwise the hosts do.
    """
    _check_extent(options)
    _check_recording(options)
    spec = pb.CaptureSpec(
        selector=(required(options.selection) if selects else options.selection).to_proto(),
        warmup_ns=options.warmup or 0,
        start_time_ns=options.start_at or 0,
        activity_types=options.activities or (),
        options=_recording(options),
        buffer_limit_bytes=options.buffer_limit or 0,
        formats=dict.fromkeys(options.formats),
        labels=dict(options.labels),
        recorder=RECORDERS.get(options.recorder or "", pb.RECORDER_UNSPECIFIED),
        no_attach=options.no_attach,
        keep_agent_ns=options.keep_agent,
        or_duration_ns=options.or_duration,
    )
    if options.counters is not None:
        set_name, metrics = options.counters
        wanted = pb.CounterRequest(set=set_name, metrics=metrics, interval_ns=options.counter_interval or 0)
        spec.counters.CopyFrom(wanted)
    if options.iterations is None:
        spec.duration_ns = options.duration or DEFAULT_DURATION_NS
    else:
        spec.iterations.CopyFrom(_iterations(options))
    return spec
