"""`kinetoctl counters list`."""

from typing import TYPE_CHECKING

import click

from kinetoctl.base.common_options import common_options, current
from kinetoctl.client.daemon_client import Client
from kinetoctl.exit_codes import ExitCode
from kinetoctl.output.console import print_table, say
from kinetoctl.output.json_yaml import emit, plain

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

COLUMNS = ("GPU", "NAME", "CHIP", "COUNTERS", "UUID", "WHY NOT")


@click.command("list")
@click.option("--metrics", "base_metrics", is_flag=True, help="Print the names of all metrics that each GPU has.")
@common_options
def command(base_metrics: bool) -> int:
    """List the GPUs of the daemon's host whose counters can be sampled, and why others cannot.

    A name of --metrics is completed by a submetric, such as dram__throughput.avg.pct_of_peak_sustained_elapsed or
    pcie__read_bytes.sum.per_second.
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
    print_table(COLUMNS, [_row(gpu) for gpu in found.gpus], color=settings.color)
    if found.backend:
        by = zip(found.backend.split(", "), found.library_version.split(", "), strict=False)
        say(f"By {', '.join(f'{name} ({version})' for name, version in by)}.", err=True)
    return ExitCode.DONE


def _row(gpu: "pb.CounterGpu") -> tuple[str, ...]:
    state = gpu.reason_code or "yes"
    return (str(gpu.gpu.index), gpu.gpu.name, gpu.chip or "-", state, gpu.gpu.uuid, gpu.reason or "-")
