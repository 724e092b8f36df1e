"""`kinetoctl counters watch`."""

import math
import sys
from typing import TYPE_CHECKING, Any

import click
from kineto_trace.base.visible_text import one_line

from kinetoctl.base.common_options import common_options, current
from kinetoctl.base.value_types import DURATION
from kinetoctl.client.daemon_client import Client
from kinetoctl.client.open_streams import kept_open
from kinetoctl.errors import Refused
from kinetoctl.exit_codes import ExitCode
from kinetoctl.output.console import print_table, say, say_text
from kinetoctl.output.json_yaml import as_json, as_yaml, emit, plain

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

COLUMNS = ("GPU", "SHOWN AS", "MEAN", "MOST", "UNIT", "SAMPLES", "LOST")
_SCALES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_SCALED_UNITS = ("B/s", "Hz", "sector/s", "B", "cycle")


@click.command("watch")
@click.argument("metrics", nargs=-1)
@click.option("--set", "set_name", metavar="SET", help="A set of `kinetoctl counters sets`.  [default: overview]")
@click.option("--gpu", "gpus", type=click.IntRange(min=0), multiple=True, help="This GPU. May be repeated.")
@click.option("--interval", type=DURATION, default="1s", show_default=True, help="Time between two lines.")
@click.option(
    "--counter-interval",
    type=DURATION,
    default=0,
    help="Time between two samples, from 10us on.  [default: 1ms, or the GPU's shortest if that is longer]",
)
@click.option("--once", is_flag=True, help="Print one line for each GPU and metric, and exit.")
@common_options
def command(
    metrics: tuple[str, ...],
    set_name: str | None,
    gpus: tuple[int, ...],
    interval: int,
    counter_interval: int,
    once: bool,
) -> int:
    """Show means of hardware counters of GPUs until Ctrl-C.

    METRICS are the vendor's names with a submetric, all to be measured in one pass, instead of a set. Without --gpu:
    all GPUs that the caller may watch and that have what is asked for. The figures tell of all processes on a GPU.
    Nobody else, such as ncu or DCGM before Hopper, can have a GPU's counters meanwhile.

    In a pipe, or with -o json or yaml, samples are printed one after the other, in JSON one per line.
    """
    from kineto_protos.v1 import profiler_pb2 as pb

    if metrics and set_name:
        raise click.UsageError("METRICS and --set exclude each other")
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
        print_table(COLUMNS, [row for gpu in means.gpus for row in _rows(gpu)], color=color)
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


def _rows(gpu: "pb.GpuCounters") -> list[tuple[str, ...]]:
    seconds = (gpu.end_ns - gpu.start_ns) / 1e9
    lost = f"{gpu.lost_ns / 1e6:.1f} ms" if gpu.lost_ns or gpu.dropped_samples else "-"
    rows: list[tuple[str, ...]] = []
    for metric, mean, most in zip(gpu.metrics, gpu.means, gpu.maxima, strict=False):
        shown = (_figure(mean, metric.unit), _figure(most, metric.unit))
        samples = f"{gpu.samples} in {seconds:.2f} s"
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
    """Tells once of each GPU that lacks what is asked for. told: the UUIDs of those that were told."""
    for gpu in means.gpus:
        if not gpu.metrics and gpu.uuid not in told:
            told.add(gpu.uuid)
            say(one_line(f"GPU {gpu.gpu} is not watched: {gpu.reason}"), err=True)


def _check(means: "pb.CounterMeans") -> None:
    """Raises Refused if a GPU is not sampled any more."""
    for gpu in means.gpus:
        if gpu.metrics and gpu.reason_code:
            raise Refused(one_line(f"GPU {gpu.gpu}: {gpu.reason}"), reason_code=one_line(gpu.reason_code))
