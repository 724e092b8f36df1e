"""From the options of `kinetoctl trace`, and a Kineto configuration, to the request."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click
from kineto_protos.kineto_config import (
    KinetoConfig,
    KinetoConfigError,
    RequestedCapture,
    is_inline,
    merged,
    parse,
    parse_inline,
    request,
)
from kineto_protos.options import Parsed
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.store.output_formats import SUFFIXES, LogFile, parse_log_file

from kinetoctl.base.common_options import completed
from kinetoctl.base.value_types import (
    ACTIVITIES,
    COUNTERS,
    DELAY,
    DURATION,
    FOLDER,
    KEEP,
    LABEL,
    SIZE,
    START,
    parse_positive_duration_ns,
)
from kinetoctl.client.condition_wait import DEFAULT_LASTS_NS, FIGURES, SHARES, GpuCondition
from kinetoctl.client.enum_names import RECORDERS
from kinetoctl.client.fleet.fleet_run import REQUIREMENTS
from kinetoctl.client.selection import Selection
from kinetoctl.errors import UsageProblem
from kinetoctl.options.selection_options import PARAMETERS, PLACE_OPTIONS, place_options, required, selector_options

DEFAULT_DURATION_NS = 5_000_000_000
STACKS = ("sample", "trace")  # by our sampler, or every call by torch's tracer
MAX_STACK_HZ = 1000  # above that the sampler would distort what it measures
MAX_FILE_CHARS = 1 << 20
OPERATOR_OPTIONS = ("record_shapes", "with_modules", "with_flops")
_OPTION = "option"
_FORM = "NAME<NUMBER or NAME>NUMBER, optionally with `for DURATION`, for example 'sm_active<30% for 10s'"
_CONDITION = re.compile(
    r"\s*(?P<figure>\w+)\s*(?P<sign>[<>])\s*(?P<limit>[-+.\deE]+)\s*(?P<percent>%?)(?:\s+for\s+(?P<lasts>\S+))?\s*"
)
F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")


def read_config(text: str) -> KinetoConfig:
    """The configuration in KEY=VALUE,… or in the file that the text names. Raises ValueError."""
    if is_inline(text):
        return parse_inline(text)
    try:
        with Path(text).open(encoding="utf-8", errors="replace") as stream:
            content = stream.read(MAX_FILE_CHARS + 1)
    except OSError as exc:
        raise ValueError(f"expected KEY=VALUE,… or a file, got {text!r:.200}: {exc.strerror}") from exc
    if len(content) > MAX_FILE_CHARS:
        raise ValueError(f"{text} is too large for a configuration (limit: 1 MiB)")
    return parse(content, text)


def parse_gpu_condition(text: str) -> GpuCondition:
    """The condition in `sm_active<30% for 10s`. Raises ValueError."""
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise ValueError(f"expected {_FORM}, got {text!r}")
    figure = match["figure"]
    if figure not in FIGURES:
        raise ValueError(f"unknown GPU value {figure!r}; expected one of {', '.join(FIGURES)}")
    try:
        limit = float(match["limit"])
    except ValueError:
        limit = math.nan
    if not math.isfinite(limit):
        raise ValueError(f"expected {_FORM}; {match['limit']!r} is not a number")
    if match["percent"] and figure not in SHARES:
        raise ValueError(f"{figure} is not a fraction: give its limit without %")
    limit = limit / 100 if match["percent"] else limit
    if figure in SHARES and not 0 <= limit <= 1:
        raise ValueError(f"{figure} is a fraction: give its limit as 0% to 100%, or as 0 to 1")
    lasts_ns = parse_positive_duration_ns(match["lasts"]) if match["lasts"] else DEFAULT_LASTS_NS
    return GpuCondition(figure=figure, below=match["sign"] == "<", limit=limit, lasts_ns=lasts_ns)


def option_name(attribute: str) -> str:
    """The option of an attribute: --start-at for start_at."""
    return f"--{attribute.replace('_', '-')}"


class _Option(NamedTuple):
    """How the command line declares a field of TraceOptions. usual: whether --help shows it; --help-all shows all."""

    section: str
    usual: bool
    names: tuple[str, ...]  # empty: --field-name
    attributes: dict[str, Any]  # click's


def _option(section: str, help_text: str, *names: str, usual: bool = False, **attributes: Any) -> Any:
    return field(metadata={_OPTION: _Option(section, usual, names, {"help": help_text, **attributes})})


def _switch(section: str, help_text: str, *, usual: bool = False) -> Any:
    """A flag that is None unless it is given."""
    return _option(section, help_text, usual=usual, is_flag=True, default=None)


_HOSTS, _WHEN, _WHAT, _WHO = "Which hosts", "How long and when", "What to record", "Who records"
_FILES = "The files"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """The options of `kinetoctl trace`: each is declared here alone, in the order of the help. Durations are ns."""

    selection: Selection
    require: str | None = _option(
        _HOSTS,
        "How many hosts must be ready before any starts: all (with all processes), quorum (more than half) or any.  "
        "[default: any]",
        type=click.Choice(REQUIREMENTS),
    )
    duration: int | None = _option(
        _WHEN, "Length of the trace, for example 500ms, 5s or 2min.  [default: 5s]", type=DURATION, usual=True
    )
    warmup: int | None = _option(_WHEN, "Time to collect and discard before --duration starts.", type=DELAY)
    start_at: int | None = _option(  # Unix ns
        _WHEN, "Start time: +10s (from now), or a local time such as 2030-01-31T12:00:00.", type=START
    )
    when: GpuCondition | None = _option(  # noqa: RUF009 - no default, but how the field is declared
        _WHEN,
        "Start once a GPU of a traced process meets this condition, for example 'sm_active<30% for 10s': a value of "
        "`kinetoctl top -o json`, then < or >, then a limit.  [default: for 5s]",
        type=Parsed("condition", parse_gpu_condition),
        metavar="CONDITION",
    )
    when_within: int | None = _option(
        _WHEN, "With --when: give up if the condition is not met within this time.  [default: never]", type=DURATION
    )
    iterations: int | None = _option(
        _WHEN,
        "Length of the trace in training iterations, instead of --duration.",
        metavar="N",
        type=click.IntRange(1),
        usual=True,
    )
    start_iteration: int | None = _option(
        _WHEN, "First iteration to record.  [default: the next]", metavar="N", type=click.IntRange(0)
    )
    roundup: int | None = _option(
        _WHEN, "Round the first iteration up to a multiple of N.", metavar="N", type=click.IntRange(1)
    )
    warmup_iterations: int | None = _option(
        _WHEN, "Iterations to collect and discard before the first one.", metavar="N", type=click.IntRange(0)
    )
    or_duration: int | None = _option(
        _WHEN,
        "With --iterations: if no iteration starts within this time, record for this long instead.  [default: refuse]",
        type=DURATION,
    )
    wait_for_user_profiler: bool | None = _switch(
        _WHEN, "Wait until the program's own torch.profiler has finished, if it is running.  [default: refuse]"
    )
    activities: tuple[str, ...] | None = _option(
        _WHAT,
        "Kineto's activity types, for example cpu_op,kernel,gpu_memcpy.  [default: all with low overhead]",
        type=ACTIVITIES,
        shell_complete=completed("activities"),
        usual=True,
    )
    record_shapes: bool | None = _switch(_WHAT, "Record the shapes and types of operator inputs.", usual=True)
    with_stack: str | None = _option(  # of STACKS
        _WHAT,
        "Record Python stacks too: sampled or, with --with-stack=trace, every call.",
        type=click.Choice(STACKS),
        is_flag=False,
        flag_value="sample",
        usual=True,
    )
    stack_hz: int | None = _option(
        _WHAT, "Python stack samples per second.  [default: 100]", metavar="N", type=click.IntRange(1, MAX_STACK_HZ)
    )
    with_modules: bool | None = _switch(_WHAT, "Record every call of a torch.nn.Module.")
    with_flops: bool | None = _switch(_WHAT, "Record estimated FLOPs of operators; uses torch's profiler.")
    memory: bool | None = _switch(_WHAT, "Record allocations and frees of CUDA memory as [memory] events.", usual=True)
    counters: tuple[str, tuple[str, ...]] | None = _option(  # a set, or metrics
        _WHAT,
        "Sample hardware counters of the GPUs too: a set listed by `kinetoctl counters sets`, or the vendor's "
        "metrics. Without a value: overview. Costs about 30 W per NVIDIA GPU; at the power limit, about 1 % of speed.",
        type=COUNTERS,
        metavar="SET|METRIC,…",
        is_flag=False,
        flag_value="overview",
        shell_complete=completed("counter_sets"),
        usual=True,
    )
    counter_interval: int | None = _option(
        _WHAT,
        "Time between two samples of --counters, 10us to 1s.  [default: 1ms, or the GPU's shortest]",
        type=DURATION,
    )
    buffer_limit: int | None = _option(
        _WHAT, "Memory limit for records in each process, for example 256MiB.", type=SIZE
    )
    kineto_config: tuple[KinetoConfig, ...] = _option(
        _WHAT,
        "Kineto or Dynolog configuration; repeatable. Command-line options take precedence over its keys.",
        type=Parsed("file|key=value,…", read_config),
        metavar="FILE|KEY=VALUE,…",
        shell_complete=completed("kineto_config"),
        multiple=True,
    )
    recorder: str | None = _option(  # of RECORDERS
        _WHO,
        "Who records in processes started with KINETO_USE_DAEMON: kinetod's agent, or their own libkineto.  "
        "[default: the daemon's setting dynolog.tracing]",
        type=click.Choice(list(RECORDERS)),
    )
    no_attach: bool = _option(
        _WHO, "Trace only processes that already have an agent; attach to no others.", is_flag=True
    )
    keep_agent: int | None = _option(
        _WHO,
        "How long an attached agent stays after the capture; 0 removes it at once.  [default: the daemon's]",
        type=KEEP,
    )
    formats: tuple[str, ...] = _option(
        _FILES,
        "Format of the file to write; repeatable.  [default: chrome, a .json.gz file]",
        "--format",
        type=click.Choice(list(SUFFIXES)),
        multiple=True,
    )
    output_dir: Path | None = _option(  # noqa: RUF009 - as above
        _FILES, "Folder for the files.  [default: .]", type=FOLDER, usual=True
    )
    report: bool = _option(_FILES, "At the end, print a report of the traces.", is_flag=True, usual=True)
    no_fetch: bool = _option(_FILES, "Leave the files in the daemon's store.", is_flag=True)
    no_merge: bool = _option(_FILES, "With several hosts: do not merge the traces into one.", is_flag=True)
    labels: tuple[tuple[str, str], ...] = _option(
        _FILES, "Label for the capture, for example team=vision; repeatable.", "--label", type=LABEL, multiple=True
    )
    idempotency_key: str | None = _option(
        _FILES, "If a capture was started with this key, return it instead of starting another."
    )


_DECLARED: dict[str, _Option] = {
    each.name: each.metadata[_OPTION] for each in fields(TraceOptions) if _OPTION in each.metadata
}
SECTIONS = {
    "Which processes": PARAMETERS,
    **{
        section: (
            *(PLACE_OPTIONS if section == _HOSTS else ()),
            *(name for name, option in _DECLARED.items() if option.section == section),
        )
        for section in (_HOSTS, _WHEN, _WHAT, _WHO, _FILES)
    },
}
USUAL = (
    *("pids", "command_regex", "ranks", "job_ids", "lists", "help_all", "help"),
    *(name for name, option in _DECLARED.items() if option.usual),
)


_FIELD = re.compile(r"\bspec\.([a-z_]+(?:\.[a-z_]+)?)(?:\[[^\]]*\])?(?=:? )")
_FIELD_OPTIONS = {  # those of the request whose names are not those of the options
    "activity_types": "--activities",
    "formats": "--format",
    "iterations.count": "--iterations",
    "iterations.start": "--start-iteration",
    "iterations.warmup": "--warmup-iterations",
    "keep_agent_ns": "--keep-agent",
    "labels": "--label",
    "options.profile_memory": "--memory",
    "options.stack_sample_hz": "--stack-hz",
    "counters.interval_ns": "--counter-interval",
    "counters.metrics": "--counters",
    "counters.set": "--counters",
    "selector.command_regex": "--command",
    "selector.job_ids": "--job-id",
    "selector.pids": "--pid",
    "selector.ranks": "--rank",
    "start_time_ns": "--start-at",
}


def _option_of(match: re.Match[str]) -> str:
    name = match[1].rpartition(".")[2].removesuffix("_ns").removesuffix("_bytes")
    return _FIELD_OPTIONS.get(match[1]) or (option_name(name) if name in _DECLARED else match[0])


@contextmanager
def named_by_options() -> Iterator[None]:
    """What the daemon says of a field of the request is said of the option."""
    try:
        yield
    except UsageProblem as exc:
        raise UsageProblem(_FIELD.sub(_option_of, str(exc)), reason_code=exc.reason_code) from exc


def trace_option(field_name: str) -> Callable[[F], F]:
    """The option of `kinetoctl trace` for a field of TraceOptions, for another command that has it, too."""
    option = _DECLARED[field_name]
    return click.option(*(option.names or (option_name(field_name),)), field_name, **option.attributes)


def trace_options(function: Callable[..., R]) -> Callable[..., R]:
    """Adds all options whose values TraceOptions takes, and those that name hosts."""
    decorated: Callable[..., R] = function
    for name in reversed(_DECLARED):
        decorated = trace_option(name)(decorated)
    return selector_options(place_options(decorated))


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
        raise click.UsageError("--duration and --iterations cannot be combined")
    if options.warmup is not None:
        raise click.UsageError("--warmup needs --duration; use --warmup-iterations with --iterations")
    if options.start_at is not None:
        raise click.UsageError("--start-at needs --duration; use --start-iteration with --iterations")


def _check_recording(options: TraceOptions) -> None:
    if options.wait_for_user_profiler and options.start_at is not None:
        raise click.UsageError(
            "--wait-for-user-profiler and --start-at cannot be combined: a capture with a start time cannot wait"
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


_TIMED = ("duration", "warmup", "start_at")
_ITERATED = ("iterations", "start_iteration", "roundup", "warmup_iterations", "or_duration")
_RECORDING = (
    *("activities", "record_shapes", "with_stack", "with_modules", "with_flops", "memory"),
    "counters",
    "buffer_limit",
)


def asked_for(configs: Sequence[KinetoConfig], now_ns: int) -> RequestedCapture:
    """What all configurations together request; later ones take precedence. Raises UsageError."""
    try:
        return request(merged(configs), now_ns)
    except KinetoConfigError as exc:
        raise click.UsageError(f"--kineto-config: {exc}") from exc


def configured(options: TraceOptions, asked: RequestedCapture) -> tuple[TraceOptions, LogFile | None, list[str]]:
    """The options, completed by the configuration; the file names that it requests; and notes for the user.

    Raises UsageError.
    """
    wanted = {name: getattr(asked, name) for name in (*_TIMED, *_ITERATED, *_RECORDING)}
    wanted["with_stack"] = "sample" if asked.with_stack else None
    notes = list(asked.notes)
    notes += _drop_other_extent(options, wanted, asked)
    for name, value in wanted.items():
        given = getattr(options, name)
        if given is None or given == value or value is None:
            continue
        if origin := asked.origins.get(name):
            notes.append(f"{origin}: no effect: {option_name(name)} takes precedence")
    values = {name: value for name, value in wanted.items() if value is not None and getattr(options, name) is None}
    notes += _drop_operator_options(options, values, asked)
    labels = dict(asked.labels) | dict(options.labels)
    result = replace(options, **values, labels=tuple(labels.items()))
    return *_with_files(result, asked, notes), notes


def _drop_other_extent(options: TraceOptions, wanted: dict[str, Any], asked: RequestedCapture) -> Iterator[str]:
    """Drops the configuration's iterations if a duration is given on the command line, and vice versa."""
    if options.duration is not None:
        chosen, others = "duration", frozenset(_ITERATED)
    elif options.iterations is not None:
        chosen, others = "iterations", frozenset(_TIMED)
    else:
        return
    for name in sorted(others & wanted.keys()):
        if wanted.pop(name) is not None and name in asked.origins:
            yield f"{asked.origins[name]}: no effect: {option_name(chosen)} takes precedence"


def _drop_operator_options(options: TraceOptions, values: dict[str, Any], asked: RequestedCapture) -> Iterator[str]:
    """Drops options that describe operators if none are recorded: Kineto accepts and ignores them there."""
    activities = options.activities or values.get("activities")
    if activities and "cpu_op" not in activities:
        for name in OPERATOR_OPTIONS:
            if values.pop(name, None):
                yield f"{asked.origins[name]}: no effect: it applies to cpu_op, which is not recorded"


def _with_files(
    options: TraceOptions, asked: RequestedCapture, notes: list[str]
) -> tuple[TraceOptions, LogFile | None]:
    if asked.log_file is None:
        return options, None
    where = asked.origins["log_file"]
    try:
        log_file = parse_log_file(asked.log_file)
    except ValueError as exc:
        raise click.UsageError(f"--kineto-config: {where}: {exc}") from exc
    directory = log_file.directory
    if options.output_dir is not None and options.output_dir.absolute() != directory.absolute():
        notes.append(f"{where}: the folder given here is ignored: --output-dir takes precedence")
        directory = options.output_dir
    if options.formats and log_file.format not in options.formats:
        notes.append(f"{where}: its suffix has no effect: --format takes precedence")
    formats = options.formats or (log_file.format,)
    return replace(options, output_dir=Path(directory), formats=formats), log_file
