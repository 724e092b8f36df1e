"""`kinetoctl counters`: hardware counters of whole GPUs."""

import math
import sys
from typing import TYPE_CHECKING, Any

import click
from kineto_trace.base.quantities import format_duration
from kineto_trace.base.visible_text import one_line

from kinetoctl.base.common_options import LazyGroup, common_options, current
from kinetoctl.base.value_types import DURATION
from kinetoctl.client.daemon_client import Client, kept_open
from kinetoctl.errors import Refused
from kinetoctl.exit_codes import ExitCode
from kinetoctl.output.console import as_json, as_yaml, emit, plain, print_table, say, say_text

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

GPU_COLUMNS = ("GPU", "NAME", "CHIP", "COUNTERS", "UUID", "WHY NOT")
SET_COLUMNS = ("GPU", "SET", "SHOWN AS", "UNIT", "METRIC, OR WHY NOT")
MEAN_COLUMNS = ("GPU", "SHOWN AS", "MEAN", "MOST", "UNIT", "SAMPLES", "LOST")
_SCALES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_SCALED_UNITS = ("B/s", "Hz", "sector/s", "B", "cycle")


@click.group("counters", cls=LazyGroup)
@common_options
def command() -> None:
    """Sample the hardware counters of whole GPUs, without touching a process."""


@command.command("list")
@click.option("--metrics", "base_metrics", is_flag=True, help="Print the names of all metrics that each GPU has.")
@common_options
def list_gpus(base_metrics: bool) -> int:
    """List the GPUs of the daemon's host whose counters can be sampled, and why the others cannot.

    To use a name that --metrics prints, append a submetric, as in dram__throughput.avg.pct_of_peak_sustained_elapsed
    or pcie__read_bytes.sum.per_second.
    """
    settings = current()
    with Client(settings.address, timeout_s=settings.timeout_s) as client:
        found = client.counters(base_metrics=base_metrics)
    if settings.output != "table":
        emit(plain(found), settings.output)
        return ExitCode.DONE
    if base_metrics:
        for gpu in found.gpus:
            for name in sorted(gpu.base_metrics):
                say(name if len(found.gpus) == 1 else f"{gpu.gpu.index}  {name}")
        return ExitCode.DONE
    print_table(GPU_COLUMNS, [_gpu_row(gpu) for gpu in found.gpus], color=settings.color)
    if found.backend:
        by = zip(found.backend.split(", "), found.library_version.split(", "), strict=False)
        say(f"Sampled by {', '.join(f'{name} ({version})' for name, version in by)}.", err=True)
    return ExitCode.DONE


def _gpu_row(gpu: "pb.CounterGpu") -> tuple[str, ...]:
    state = gpu.reason_code or "yes"
    return (str(gpu.gpu.index), gpu.gpu.name, gpu.chip or "-", state, gpu.gpu.uuid, gpu.reason or "-")


@command.command("sets")
@common_options
def sets() -> int:
    """Show the sets of metrics, and which metrics of each set are sampled on each GPU.

    A set is sampled in one pass. Metrics that a GPU lacks, or that no longer fit into its pass, are left out; the
    reason is shown.
    """
    settings = current()
    with Client(settings.address, timeout_s=settings.timeout_s) as client:
        gpus = list(client.counters().gpus)
    if settings.output != "table":
        emit([plain(gpu) for gpu in gpus], settings.output)
        return ExitCode.DONE
    print_table(SET_COLUMNS, [row for gpu in gpus for row in _set_rows(gpu)], color=settings.color)
    for gpu in gpus:
        if gpu.reason:
            say(f"GPU {gpu.gpu.index} cannot be sampled: {gpu.reason}", err=True)
    return ExitCode.DONE


def _set_rows(gpu: "pb.CounterGpu") -> "list[tuple[str, ...]]":
    rows: list[tuple[str, ...]] = []
    for group in gpu.sets:
        number = str(gpu.gpu.index)
        rows += [(number, group.name, each.label, each.unit or "-", each.name) for each in group.metrics]
        rows += [(number, group.name, "-", "-", f"{each.name}: {each.why}") for each in group.left_out]
        if group.problem:
            rows.append((number, group.name, "-", "-", group.problem))
    return rows


@command.command("watch")
@click.argument("metrics", nargs=-1)
@click.option(
    "--set",
    "set_name",
    metavar="SET",
    help="Set of metrics; `kinetoctl counters sets` lists them.  [default: overview]",
)
@click.option("--gpu", "gpus", type=click.IntRange(min=0), multiple=True, help="Only this GPU; repeatable.")
@click.option("--interval", type=DURATION, default="1s", show_default=True, help="Time between lines.")
@click.option(
    "--counter-interval",
    type=DURATION,
    default=0,
    help="Time between two samples, at least 10us.  [default: 1ms, or the GPU's shortest if that is longer]",
)
@click.option("--once", is_flag=True, help="Print one line for each GPU and metric, and exit.")
@common_options
def watch(
    metrics: tuple[str, ...],
    set_name: str | None,
    gpus: tuple[int, ...],
    interval: int,
    counter_interval: int,
    once: bool,
) -> int:
    """Show average values of GPU hardware counters until Ctrl-C.

    METRICS are the vendor's names with a submetric; they replace the set and must all fit into one pass. Without --gpu,
    it watches all GPUs that you are allowed to watch and that have these counters. The figures cover all
    processes on a GPU. While it runs, nobody else can use a GPU's counters: neither ncu nor, before Hopper, DCGM.

    In a pipe, or with -o json or yaml, samples are printed one after the other (one per line in JSON).
    """
    from kineto_protos.v1 import profiler_pb2 as pb

    if metrics and set_name:
        raise click.UsageError("METRICS and --set cannot be combined")
    settings = current()
    request = pb.WatchCountersRequest(
        gpus=gpus, set=set_name or "", metrics=metrics, interval_ns=counter_interval, period_ns=interval
    )
    with Client(settings.address, timeout_s=settings.timeout_s) as client:
        told: set[str] = set()
        for means in kept_open(lambda: client.watch_counters(request)):
            _show(means, settings.output, color=settings.color, once=once)
            _tell_unwatched(means, told)
            _check(means)
            if once:
                break
    return ExitCode.DONE


def _show(means: "pb.CounterMeans", output: str, *, color: bool, once: bool) -> None:
    if output == "table":
        print_table(MEAN_COLUMNS, [row for gpu in means.gpus for row in _mean_rows(gpu)], color=color)
        for gpu in means.gpus:
            for each in gpu.left_out if once else ():
                say(f"GPU {gpu.gpu}: {each.name} is left out: {each.why}", err=True)
    elif once:
        emit(_document(means), output)
    elif output == "json":
        say_text(as_json(_document(means)))
    else:
        say_text(f"---\n{as_yaml(_document(means))}", nl=False)
    sys.stdout.flush()


def _document(means: "pb.CounterMeans") -> dict[str, Any]:
    document = plain(means)
    for gpu in document["gpus"]:
        for name in ("means", "maxima"):  # JSON has no NaN
            gpu[name] = [value if isinstance(value, float) and math.isfinite(value) else None for value in gpu[name]]
    return document


def _mean_rows(gpu: "pb.GpuCounters") -> list[tuple[str, ...]]:
    lost = format_duration(gpu.lost_ns) if gpu.lost_ns or gpu.dropped_samples else "-"
    rows: list[tuple[str, ...]] = []
    for metric, mean, most in zip(gpu.metrics, gpu.means, gpu.maxima, strict=False):
        shown = (_figure(mean, metric.unit), _figure(most, metric.unit))
        samples = f"{gpu.samples} in {format_duration(gpu.end_ns - gpu.start_ns)}"
        rows.append((str(gpu.gpu), metric.label, *shown, metric.unit or "-", samples, lost))
    return rows


def _figure(value: float, unit: str) -> str:
    if not math.isfinite(value):
        return "-"
    if unit in _SCALED_UNITS:
        for scale, letter in _SCALES:
            if abs(value) >= scale:
                return f"{value / scale:.1f} {letter}"
    return f"{value:.1f}"


def _tell_unwatched(means: "pb.CounterMeans", told: set[str]) -> None:
    """Warns once per GPU without the requested counters. told: the UUIDs of the GPUs already warned about."""
    for gpu in means.gpus:
        if not gpu.metrics and gpu.uuid not in told:
            told.add(gpu.uuid)
            say(one_line(f"GPU {gpu.gpu} is not watched: {gpu.reason}"), err=True)


def _check(means: "pb.CounterMeans") -> None:
    """Raises Refused if a GPU is not sampled any more."""
    for gpu in means.gpus:
        if gpu.metrics and gpu.reason_code:
            raise Refused(one_line(f"GPU {gpu.gpu}: {gpu.reason}"), reason_code=one_line(gpu.reason_code))
