"""`kinetoctl counters sets`."""

from typing import TYPE_CHECKING

import click

from kinetoctl.base.common_options import common_options, current
from kinetoctl.client.daemon_client import Client
from kinetoctl.exit_codes import ExitCode
from kinetoctl.output.console import print_table, say
from kinetoctl.output.json_yaml import emit, plain

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

COLUMNS = ("GPU", "SET", "SHOWN AS", "UNIT", "METRIC, OR WHY NOT")


@click.command("sets")
@common_options
def command() -> int:
    """Show the sets of metrics, and what of each is sampled on each GPU.

    A set is sampled in one pass. Metrics that a GPU does not have, or not in one pass with those before them, are left
    out there, with the reason.
    """
    settings = current()
    with Client(settings.address, timeout_s=settings.timeout_s) as client:
        gpus = list(client.counters().gpus)
    if settings.output != "table":
        emit([plain(gpu) for gpu in gpus], settings.output)
        return ExitCode.DONE
    print_table(COLUMNS, [row for gpu in gpus for row in _rows(gpu)], color=settings.color)
    for gpu in gpus:
        if gpu.reason:
            say(f"GPU {gpu.gpu.index} cannot be sampled: {gpu.reason}", err=True)
    return ExitCode.DONE


def _rows(gpu: "pb.CounterGpu") -> "list[tuple[str, ...]]":
    rows: list[tuple[str, ...]] = []
    for group in gpu.sets:
        number = str(gpu.gpu.index)
        rows += [(number, group.name, each.label, each.unit or "-", each.name) for each in group.metrics]
        rows += [(number, group.name, "-", "-", f"{each.name}: {each.why}") for each in group.left_out]
        if group.problem:
            rows.append((number, group.name, "-", "-", group.problem))
    return rows
