"""`kinetoctl trace`: the main job."""

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from kineto_trace.store.output_formats import SUFFIXES

from kinetoctl.base.common_options import CommonOptions, common_options, current
from kinetoctl.base.lazy_import import completed
from kinetoctl.base.value_types import ACTIVITIES, COUNTERS, DELAY, DURATION, KEEP, LABEL, SIZE, START
from kinetoctl.client.condition_wait import SAMPLE_NS, wait_for
from kinetoctl.client.daemon_client import Client
from kinetoctl.client.enum_names import RECORDERS
from kinetoctl.client.fleet.event_loop import run_fleet
from kinetoctl.client.fleet.fleet_files import check_promises
from kinetoctl.client.fleet.fleet_run import FleetRequest, FleetRun
from kinetoctl.client.fleet.host_run import Fleet
from kinetoctl.client.fleet.start_plan import REQUIREMENTS, WARMUP_NS
from kinetoctl.client.fleet.workflow import bring, merge_files, new_id
from kinetoctl.client.gpu_condition import GpuCondition
from kinetoctl.client.hosts.host_targets import Place
from kinetoctl.client.open_streams import kept_open
from kinetoctl.client.tracing import Outcome, TraceRequest, trace
from kinetoctl.options.capture_spec import STACKS, TraceOptions, build_spec
from kinetoctl.options.condition_option import GPU_CONDITION
from kinetoctl.options.help_sections import SectionedCommand
from kinetoctl.options.host_options import PLACE_OPTIONS, named_places, place_options
from kinetoctl.options.kineto_config_merge import KINETO_CONFIG, asked_for, configured
from kinetoctl.options.output_dir import FOLDER, prepare_folder
from kinetoctl.options.selection_options import PARAMETERS, selector_options
from kinetoctl.output.capture_progress import show_progress
from kinetoctl.output.capture_result import show_capture
from kinetoctl.output.console import say
from kinetoctl.output.fleet_progress import show_fleet
from kinetoctl.output.fleet_summary import note_merged, show_fleet_result

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

F = TypeVar("F", bound=Callable[..., Any])
MAX_STACK_HZ = 1000  # above that the sampler would distort what it measures


def run_trace(client: Client, request: TraceRequest, settings: CommonOptions) -> Outcome:
    """Trace and print the result. `kinetoctl demo` and `kinetoctl memory` use it too."""
    with show_progress(quiet=settings.quiet, color=settings.color) as progress:
        outcome = trace(client, request, progress)
        if outcome.interrupted and not any(target.files for target in outcome.capture.targets):
            progress.note(f"capture {outcome.capture.id} was stopped before anything was recorded")
    show_capture(outcome.capture, outcome.paths, settings)
    return outcome


def _trace_fleet(request: FleetRequest, directory: Path | None, settings: CommonOptions, *, merge: bool) -> Fleet:
    """Run the capture and print the result. directory None: the files stay in the daemons' stores.

    Raises UsageProblem for a start that is too near. KeyboardInterrupt leaves at once.
    """
    fleet = request.new_fleet()
    folder, merged = None, None
    with show_fleet(fleet.members, quiet=settings.quiet, color=settings.color) as progress:
        progress.note(f"capture {fleet.id} on {len(fleet.members):,} hosts")
        run = FleetRun(request, fleet, progress)
        try:
            run_fleet(run, run.begin, run.finish)
            check_promises(fleet)
            if directory is not None and not fleet.unmet:
                folder = bring(fleet, directory, progress, timeout_s=settings.timeout_s)
                if merge and folder is not None:
                    merged = merge_files(fleet, directory, progress)
                    note_merged(merged, progress)
        except KeyboardInterrupt:
            progress.note(f"`kinetoctl captures fetch {fleet.id}` with the same hosts downloads what is kept of it")
            raise
    show_fleet_result(fleet, folder, merged, settings)
    return fleet


SECTIONS = {
    "Which processes": PARAMETERS,
    "Which hosts": (*PLACE_OPTIONS, "require"),
    "How long and when": (
        *("duration", "warmup", "start_at", "when", "when_within"),
        *("iterations", "start_iteration", "roundup", "warmup_iterations", "or_duration"),
        "wait_for_user_profiler",
    ),
    "What to record": (
        *("activities", "record_shapes", "with_stack", "stack_hz", "with_modules", "with_flops"),
        *("memory", "counters", "counter_interval", "buffer_limit", "kineto_config"),
    ),
    "Who records": ("recorder", "no_attach", "keep_agent"),
    "The files": ("formats", "output_dir", "no_fetch", "no_merge", "labels", "idempotency_key"),
}
USUAL = (
    *("pids", "command_regex", "ranks", "job_ids", "lists", "duration", "iterations"),
    *("activities", "record_shapes", "with_stack", "memory", "counters", "output_dir", "help_all", "help"),
)


def _tell(notes: Iterable[str], settings: CommonOptions) -> None:
    for note in () if settings.quiet else notes:
        say(f"kineto config: {note}", err=True)


def _switch(name: str, text: str) -> Callable[[F], F]:
    """A flag that is None unless it is given."""
    return click.option(name, is_flag=True, default=None, help=text)


def _fleet_request(
    options: TraceOptions, spec: "pb.CaptureSpec", places: Sequence[Place], require: str | None, settings: CommonOptions
) -> FleetRequest:
    """Raises UsageError."""
    if options.wait_for_user_profiler:
        raise click.UsageError("--wait-for-user-profiler: hosts that start at the same time cannot wait; leave it out")
    if options.iterations is None and options.warmup is None:
        spec.warmup_ns = WARMUP_NS
    return FleetRequest(
        id=options.idempotency_key or new_id(),
        places=places,
        spec=spec,
        require=require or "any",
        timeout_s=settings.timeout_s,
    )


def _check_when(
    when: GpuCondition | None, within_ns: int | None, spec: "pb.CaptureSpec", *, several_hosts: bool
) -> None:
    """Raises UsageError."""
    if when is None:
        if within_ns is not None:
            raise click.UsageError("--when-within needs --when")
    elif several_hosts:
        raise click.UsageError("--when watches the GPUs of one host; leave out --host, --hosts, --slurm-job and --kube")
    elif spec.start_time_ns:
        raise click.UsageError("--when and a start time exclude each other")


def _wait(
    client: Client, spec: "pb.CaptureSpec", when: GpuCondition, within_ns: int | None, settings: CommonOptions
) -> None:
    """Raises ConditionNotMet."""
    if not settings.quiet:
        say(f"waiting for {when} on a GPU of the processes", err=True)
    samples = kept_open(lambda: client.watch_host(spec.selector, interval_ns=SAMPLE_NS, include_without_agent=True))
    met = wait_for(samples, when, within_ns)
    if met is not None and not settings.quiet:
        say(f"GPU {met.gpu}: {when.figure} is {when.shown(met.value)}; tracing", err=True)


@click.command("trace", cls=SectionedCommand, sections=SECTIONS, usual=USUAL)
@selector_options
@place_options
@click.option(
    "--require",
    type=click.Choice(REQUIREMENTS),
    help="Hosts that must be ready before any starts: all with all processes, more than half, or any.  [default: any]",
)
@click.option("--duration", type=DURATION, help="Length of the trace, for example 500ms, 5s or 2min.  [default: 5s]")
@click.option(
    "--iterations",
    metavar="N",
    type=click.IntRange(1),
    help="Length of the trace in training iterations, instead of --duration.",
)
@click.option(
    "--start-iteration", metavar="N", type=click.IntRange(0), help="First iteration to record.  [default: the next]"
)
@click.option("--roundup", metavar="N", type=click.IntRange(1), help="Round the first iteration up to a multiple of N.")
@click.option(
    "--warmup-iterations",
    metavar="N",
    type=click.IntRange(0),
    help="Iterations to collect and discard before the first one.",
)
@click.option(
    "--or-duration",
    type=DURATION,
    help="With --iterations: if none starts within this time, record for this long instead.  [default: refuse]",
)
@click.option("--warmup", type=DELAY, help="Time to collect and discard before --duration starts.")
@click.option("--start-at", type=START, help="Start time: +10s from now, or a local time such as 2030-01-31T12:00:00.")
@click.option(
    "--when",
    type=GPU_CONDITION,
    metavar="CONDITION",
    help="Start once a GPU of the processes meets this, for example 'sm_active<30% for 10s': a figure of "
    "`kinetoctl top -o json`, < or >, a limit.  [default: for 5s]",
)
@click.option(
    "--when-within",
    type=DURATION,
    help="With --when: give up if that has not happened within this time.  [default: never]",
)
@_switch(
    "--wait-for-user-profiler",
    "Wait until the program's own torch.profiler has finished, if it is running.  [default: refuse]",
)
@click.option(
    "--activities",
    type=ACTIVITIES,
    shell_complete=completed("activities"),
    help="Kineto's activity types, for example cpu_op,kernel,gpu_memcpy.  [default: all with a low overhead]",
)
@_switch("--record-shapes", "Record the shapes and types of operator inputs.")
@click.option(
    "--with-stack",
    type=click.Choice(STACKS),
    is_flag=False,
    flag_value="sample",
    help="Record Python stacks too: samples of them, or, with --with-stack=trace, every call.",
)
@click.option(
    "--stack-hz",
    metavar="N",
    type=click.IntRange(1, MAX_STACK_HZ),
    help="Python stack samples per second.  [default: 100]",
)
@_switch("--with-modules", "Record every call of a torch.nn.Module.")
@_switch("--with-flops", "Record estimated FLOPs of operators; uses torch's profiler.")
@_switch("--memory", "Record allocations and frees of CUDA memory as [memory] events.")
@click.option(
    "--counters",
    type=COUNTERS,
    metavar="SET|METRIC,…",
    is_flag=False,
    flag_value="overview",
    shell_complete=completed("counter_sets"),
    help="Sample hardware counters of the GPUs meanwhile: a set of `kinetoctl counters sets`, or the vendor's metrics. "
    "Without a value: overview. NVIDIA's GPUs take some 30 W more meanwhile; at their power limit they are about 1 % "
    "slower.",
)
@click.option(
    "--counter-interval",
    type=DURATION,
    help="Time between two samples of --counters, 10us to 1s.  [default: 1ms, or the GPU's shortest]",
)
@click.option("--buffer-limit", type=SIZE, help="Limit of the memory for records in each process, for example 256MiB.")
@click.option(
    "--kineto-config",
    type=KINETO_CONFIG,
    metavar="FILE|KEY=VALUE,…",
    shell_complete=completed("kineto_config"),
    multiple=True,
    help="Configuration of Kineto or Dynolog; repeatable. Command-line options take precedence over its keys.",
)
@click.option(
    "--recorder",
    type=click.Choice(list(RECORDERS)),
    help="Who records in processes started with KINETO_USE_DAEMON: kinetod's agent, or their own libkineto.  [default: "
    "the daemon's dynolog.tracing]",
)
@click.option("--no-attach", is_flag=True, help="Trace only processes that already have an agent; attach to no others.")
@click.option(
    "--keep-agent",
    type=KEEP,
    help="How long an attached agent stays after the capture; 0 removes it at once.  [default: the daemon's]",
)
@click.option(
    "--format",
    "formats",
    type=click.Choice(list(SUFFIXES)),
    multiple=True,
    help="Format of the file to write; repeatable.  [default: chrome, a .json.gz file]",
)
@click.option(
    "--label", "labels", type=LABEL, multiple=True, help="Label of the capture, for example team=vision; repeatable."
)
@click.option("--output-dir", type=FOLDER, help="Folder for the files.  [default: .]")
@click.option(
    "--idempotency-key",
    help="Return the existing capture if one was started with this key, instead of starting another.",
)
@click.option("--no-fetch", is_flag=True, help="Leave the files in the daemon's store.")
@click.option("--no-merge", is_flag=True, help="With several hosts: do not merge the traces into one.")
@common_options
def command(**values: Any) -> int:
    """Trace running processes and download the traces.

    \b
    kinetoctl trace 1234 --duration 5s
    kinetoctl trace 1234 --record-shapes --with-stack=trace
    kinetoctl trace --rank 0,8-15 --iterations 20 --roundup 100
    kinetoctl trace --command train.py --activities kernel,gpu_memcpy
    kinetoctl trace --hosts @nodes --rank all --duration 5s
    kinetoctl trace --rank all --when 'sm_active<30% for 10s'

    Select the processes with at least one condition; if several are given, all must hold. Launchers and
    DataLoader workers are left out: `kinetoctl ps` with the same options lists what would be traced. A process
    needs no preparation: the daemon attaches an agent, which is removed again after a while. Ctrl-C stops the
    capture and keeps what was recorded; a second Ctrl-C exits without waiting for that. Several hosts all start at
    the same time; hosts that fail are reported, and the traces are also merged into one.

    By default it records PyTorch operators, Python stacks, CUDA calls and GPU activity. While it records, steps
    take about 1.2 times as long if the GPU waits for launches, and 1.01 times otherwise. Options that use torch's
    profiler say so; with them, steps take 1.5 to 2 times as long.
    """
    places = named_places(values)
    require, no_merge = values.pop("require"), values.pop("no_merge")
    when, when_within = values.pop("when"), values.pop("when_within")
    options = TraceOptions(**values)
    settings = current()
    log_file = None
    if options.kineto_config:
        options, log_file, notes = configured(options, asked_for(options.kineto_config, time.time_ns()))
        _tell(notes, settings)
    spec = build_spec(options, selects=not (places and all(place.selects for place in places)))
    _check_when(when, when_within, spec, several_hosts=bool(places))
    directory = None if options.no_fetch else prepare_folder(options.output_dir or Path())
    if places:
        if log_file is not None:
            _tell(
                ["the name in ACTIVITIES_LOG_FILE has no effect: with several hosts, files keep their usual names"],
                settings,
            )
        fleet = _fleet_request(options, spec, places, require, settings)
        return _trace_fleet(fleet, directory, settings, merge=not no_merge).exit_code()
    for option, given in (("--require", require), ("--no-merge", no_merge)):
        if given:
            raise click.UsageError(
                f"{option} needs several hosts: name them with --host, --hosts, --slurm-job or --kube"
            )
    request = TraceRequest(
        spec=spec,
        idempotency_key=options.idempotency_key or uuid.uuid4().hex,
        directory=directory,
        log_file=log_file,
    )
    with Client(settings.address, timeout_s=settings.timeout_s) as client:
        if when is not None:
            _wait(client, spec, when, when_within, settings)
        return run_trace(client, request, settings).exit_code()
