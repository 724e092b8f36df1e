"""`kinetoctl trace`, the main job, and `kinetoctl memory`, a capture of nothing but a memory snapshot."""

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import click
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.store.output_formats import ATTACHMENT_SUFFIXES

from kinetoctl.base.common_options import CommonOptions, common_options, current
from kinetoctl.base.own_daemon import NOT_PERMITTED, OwnDaemon, command_of_root, has_only_our_rights, reachable_daemon
from kinetoctl.base.value_types import (
    DURATION,
    SIZE,
    prepare_folder,
)
from kinetoctl.client.condition_wait import SAMPLE_NS, GpuCondition, wait_for
from kinetoctl.client.daemon_client import Client, kept_open
from kinetoctl.client.enum_names import RECORDERS
from kinetoctl.client.fleet.fleet_files import bring, check_promises, find_answer, merge_files, new_id
from kinetoctl.client.fleet.fleet_run import WARMUP_NS, FleetRequest, FleetRun, run_fleet
from kinetoctl.client.fleet.host_run import Fleet
from kinetoctl.client.host_targets import Place
from kinetoctl.client.selection import Selection
from kinetoctl.client.tracing import Outcome, TraceRequest, await_answer, trace
from kinetoctl.commands.report import print_report
from kinetoctl.options.capture_spec import (
    SECTIONS,
    USUAL,
    TraceOptions,
    asked_for,
    build_spec,
    configured,
    named_by_options,
    trace_option,
    trace_options,
)
from kinetoctl.options.selection_options import named_places, required, selector_options
from kinetoctl.output.capture_progress import show_fleet, show_progress
from kinetoctl.output.capture_summary import note_merged, show_capture, show_fleet_result
from kinetoctl.output.console import say, say_text

F = TypeVar("F", bound=Callable[..., Any])
SNAPSHOT = "memory_snapshot"  # the activity type of `kinetoctl memory`
SNAPSHOT_AFTER_NS = 10_000_000_000
MAX_STACK_HZ = 1000  # above that the sampler would distort what it measures
HELP_ALL = "--help-all"


class SectionedCommand(click.Command):
    """sections: heading -> names of parameters. What is in none comes last, under "Other options".

    usual: the parameters that --help shows; the others are left to --help-all.
    """

    def __init__(
        self,
        *args: Any,
        sections: Mapping[str, Sequence[str]] | None = None,
        usual: Iterable[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._sections = dict(sections or {})
        self._usual = frozenset(usual)
        self._whole = False
        self.params.append(
            click.Option(
                [HELP_ALL],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=self._show_all,
                help="Show all options and exit.",
            )
        )

    def _show_all(self, ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
        if wanted and not ctx.resilient_parsing:
            self._whole = True
            try:
                say_text(self.get_help(ctx))
            finally:
                self._whole = False
            ctx.exit()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Click's hook: one definition list per heading."""
        records = {param.name: param.get_help_record(ctx) for param in self.get_params(ctx)}
        if not self._whole:
            with formatter.section("Most used options"):
                formatter.write_dl([record for name, record in records.items() if name in self._usual and record])
            formatter.write_paragraph()
            formatter.write_text(f"`{ctx.command_path} {HELP_ALL}` shows all {len(records)} options.")
            return
        for heading, names in self._sections.items():
            _write(formatter, heading, [records.pop(name) for name in names])
        _write(formatter, "Other options", list(records.values()))


def _write(formatter: click.HelpFormatter, heading: str, records: Sequence[tuple[str, str] | None]) -> None:
    with formatter.section(heading):
        formatter.write_dl([record for record in records if record is not None])


def run_trace(client: Client, request: TraceRequest, settings: CommonOptions, *, reports: bool = False) -> Outcome:
    """Trace and print the result. `kinetoctl demo` and `kinetoctl memory` use it too.

    reports: whether a report follows, which finds the answer itself.
    """
    with show_progress(quiet=settings.quiet, color=settings.color) as progress:
        outcome = trace(client, request, progress)
        if outcome.interrupted and not any(target.files for target in outcome.capture.targets):
            progress.note(f"capture {outcome.capture.id} was stopped before anything was recorded")
        if not reports and request.directory is not None:
            await_answer(client, outcome, progress)
    show_capture(outcome.capture, outcome.paths, settings, outcome.problems)
    end_with(client, outcome)
    return outcome


def end_with(client: Client, outcome: Outcome) -> None:
    """Keeps an own daemon's folder if files could not be downloaded, and says what a daemon of root could do."""
    if isinstance(client, OwnDaemon) and outcome.problems:
        client.keeps_folder = True
        state = client.folder / "state"
        say(f"To download the missing files later, start their daemon again: kinetod --state-dir {state}", err=True)
    refused = any(target.reason_code == NOT_PERMITTED for target in outcome.capture.targets)
    if refused and has_only_our_rights(client):
        say(f"Root can trace it: {command_of_root()}", err=True)


def _traces(outcome: Outcome) -> list[str]:
    """One file of each process that has a trace."""
    found = {key[:2]: str(path) for key, path in outcome.paths.items() if key[2] not in ATTACHMENT_SUFFIXES}
    return list(found.values())


def _reported(code: int, traces: Sequence[str], options: TraceOptions) -> int:
    """Prints the report of the traces if it is asked for. Returns the exit code of both."""
    if not options.report or not traces:
        return code
    say("")
    return code or print_report(traces)


def _check_report(options: TraceOptions, settings: CommonOptions) -> None:
    """Raises UsageError."""
    if options.report and options.no_fetch:
        raise click.UsageError(
            "--report needs the files that --no-fetch leaves in the daemon's store: use only one of them"
        )
    if options.report and settings.output != "table":
        raise click.UsageError(
            f"--report only prints tables: leave it out, then run `kinetoctl report -o {settings.output}`"
        )


def _trace_fleet(
    request: FleetRequest, directory: Path | None, settings: CommonOptions, *, merge: bool, reports: bool
) -> tuple[Fleet, Path | None]:
    """Run the capture and print the result. directory None: the files stay in the daemons' stores.

    reports: whether a report follows, which finds the answer itself.
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
                if not reports:
                    find_answer(fleet, progress)
        except KeyboardInterrupt:
            progress.note(f"`kinetoctl captures fetch {fleet.id}` with the same hosts downloads what was kept")
            raise
    show_fleet_result(fleet, folder, merged, settings)
    return fleet, folder


def _tell(notes: Iterable[str], settings: CommonOptions) -> None:
    for note in () if settings.quiet else notes:
        say(f"kineto config: {note}", err=True)


def _fleet_request(
    options: TraceOptions, spec: pb.CaptureSpec, places: Sequence[Place], settings: CommonOptions
) -> FleetRequest:
    """Raises UsageError."""
    if options.wait_for_user_profiler:
        raise click.UsageError(
            "--wait-for-user-profiler: several hosts start at the same time and cannot wait; leave it out"
        )
    if options.iterations is None and options.warmup is None:
        spec.warmup_ns = WARMUP_NS
    return FleetRequest(
        id=options.idempotency_key or new_id(),
        places=places,
        spec=spec,
        require=options.require or "any",
        timeout_s=settings.timeout_s,
    )


def _check_when(options: TraceOptions, spec: pb.CaptureSpec, *, several_hosts: bool) -> None:
    """Raises UsageError."""
    if options.when is None:
        if options.when_within is not None:
            raise click.UsageError("--when-within needs --when")
    elif several_hosts:
        raise click.UsageError(
            "--when works with a single host only; leave out --host, --hosts, --slurm-job and --kube"
        )
    elif spec.start_time_ns:
        raise click.UsageError("--when and a start time cannot be combined")


def _wait(
    client: Client, spec: pb.CaptureSpec, when: GpuCondition, within_ns: int | None, settings: CommonOptions
) -> None:
    """Raises ConditionNotMet."""
    if not settings.quiet:
        say(f"waiting until a GPU of the processes has {when}", err=True)
    samples = kept_open(lambda: client.watch_host(spec.selector, interval_ns=SAMPLE_NS, include_without_agent=True))
    met = wait_for(samples, when, within_ns)
    if met is not None and not settings.quiet:
        say(f"GPU {met.gpu}: {when.figure} is {when.shown(met.value)}; tracing now", err=True)


def _daemon(settings: CommonOptions, no_fetch: bool) -> AbstractContextManager[Client]:
    if no_fetch:  # what it leaves in the store must outlast the command
        return Client(settings.address, timeout_s=settings.timeout_s)
    return reachable_daemon(settings, say)


@click.command("trace", cls=SectionedCommand, sections=SECTIONS, usual=USUAL)
@trace_options
@common_options
def command(**values: Any) -> int:
    """Trace running processes and download the traces.

    \b
    kinetoctl trace 1234 --duration 5s --report
    kinetoctl trace 1234 --record-shapes --with-stack=trace
    kinetoctl trace --rank 0,8-15 --iterations 20 --roundup 100
    kinetoctl trace --command train.py --activities kernel,gpu_memcpy
    kinetoctl trace --hosts @nodes --rank all --duration 5s
    kinetoctl trace --rank all --when 'sm_active<30% for 10s'

    Select the processes with at least one condition; if you give several, all must hold. Launchers and DataLoader
    workers are left out: `kinetoctl ps` with the same options lists what would be traced. A process needs no
    preparation: the daemon attaches an agent, which is removed again after a while. If no kinetod is running here,
    the command starts one for its own duration. Ctrl-C stops the capture and keeps what was recorded; a second
    Ctrl-C exits without waiting for that. With several hosts, all start at the same time, hosts that fail are
    reported, and the traces are also merged into one.

    By default it records PyTorch operators, Python stacks, CUDA calls and GPU activity. During the recording, steps
    take about 1.2 times as long if the GPU waits for launches, otherwise 1.01 times. Options that use torch's
    profiler say so; with them, steps take 1.5 to 2 times as long.
    """
    places = named_places(values)
    options = TraceOptions(**values)
    settings = current()
    log_file = None
    if options.kineto_config:
        options, log_file, notes = configured(options, asked_for(options.kineto_config, time.time_ns()))
        _tell(notes, settings)
    spec = build_spec(options, selects=not (places and all(place.selects for place in places)))
    _check_when(options, spec, several_hosts=bool(places))
    _check_report(options, settings)
    directory = None if options.no_fetch else prepare_folder(options.output_dir or Path())
    if places:
        if log_file is not None:
            _tell(
                ["the name in ACTIVITIES_LOG_FILE has no effect: with several hosts, files keep their usual names"],
                settings,
            )
        wanted = _fleet_request(options, spec, places, settings)
        fleet, folder = _trace_fleet(wanted, directory, settings, merge=not options.no_merge, reports=options.report)
        return _reported(fleet.exit_code(), [str(folder)] if folder is not None else [], options)
    for option, given in (("--require", options.require), ("--no-merge", options.no_merge)):
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
    with named_by_options(), _daemon(settings, options.no_fetch) as client:
        if options.when is not None:
            _wait(client, spec, options.when, options.when_within, settings)
        outcome = run_trace(client, request, settings, reports=options.report)
    return _reported(outcome.exit_code(), _traces(outcome), options)


@click.command("memory")
@selector_options
@click.option("--duration", type=DURATION, help="How long to record allocations before the snapshot.  [default: 10s]")
@click.option("--with-stack", is_flag=True, help="Record the Python stack of each allocation; about 2 us each.")
@click.option("--buffer-limit", type=SIZE, help="Memory limit for the snapshot in each process, for example 256MiB.")
@click.option("--no-attach", is_flag=True, help="Use only processes that already have an agent; attach to no others.")
@trace_option("keep_agent")
@trace_option("output_dir")
@trace_option("no_fetch")
@common_options
def memory(
    selection: Selection,
    duration: int | None,
    with_stack: bool,
    buffer_limit: int | None,
    no_attach: bool,
    keep_agent: int | None,
    output_dir: Path | None,
    no_fetch: bool,
) -> int:
    """Take a CUDA memory snapshot of running PyTorch processes and download it.

    \b
    kinetoctl memory --pid 1234
    kinetoctl memory --rank 0-7 --duration 30s --with-stack

    Torch records allocations and frees for --duration, then writes out what is allocated where; this pauses the
    process briefly. The file is the pickle of torch.cuda.memory._dump_snapshot: `kinetoctl web FILE` shows it and
    `kinetoctl report FILE` prints its figures; https://pytorch.org/memory_viz and `python -m torch.cuda._memory_viz`
    can open it too.
    """
    settings = current()
    spec = pb.CaptureSpec(
        selector=required(selection).to_proto(),
        duration_ns=duration or SNAPSHOT_AFTER_NS,
        activity_types=[SNAPSHOT],
        options=pb.Options(with_stack=with_stack),
        buffer_limit_bytes=buffer_limit or 0,
        recorder=RECORDERS["agent"],  # libkineto's own way leaves a thread behind that never rests
        no_attach=no_attach,
        keep_agent_ns=keep_agent,
    )
    directory = None if no_fetch else prepare_folder(output_dir or Path())
    request = TraceRequest(spec=spec, idempotency_key=uuid.uuid4().hex, directory=directory)
    with named_by_options(), _daemon(settings, no_fetch) as client:
        return run_trace(client, request, settings).exit_code()
