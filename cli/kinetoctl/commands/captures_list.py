"""`kinetoctl captures list`."""

import click
from kineto_protos.v1 import profiler_pb2 as pb

from kinetoctl.client import Client
from kinetoctl.exit_codes import ExitCode
from kinetoctl.output import names, units
from kinetoctl.output.console import print_table
from kinetoctl.output.documents import emit, plain
from kinetoctl.output.kept import where
from kinetoctl.parsing import LABEL
from kinetoctl.settings import common_options, current

COLUMNS = ("ID", "STATUS", "CREATED", "TARGETS", "SIZE", "WHERE", "LABELS")


def _row(capture: pb.Capture) -> tuple[str, ...]:
    stored = sum(file.size_bytes for target in capture.targets for file in target.files)
    return (
        capture.id,
        names.capture_status(capture.status),
        units.moment(capture.created_ns),
        str(len(capture.targets)),
        units.size(stored),
        where(capture),
        ",".join(f"{key}={capture.spec.labels[key]}" for key in sorted(capture.spec.labels)),
    )


@click.command("list")
@click.option("--label", "labels", type=LABEL, multiple=True, help="Only captures with this label, like team=vision.")
@click.option("--limit", type=click.IntRange(1), default=20, help="How many.  [default: 20]")
@common_options
def command(labels: tuple[tuple[str, str], ...], limit: int) -> int:
    """List captures, newest first."""
    settings = current()
    with Client(settings.address, timeout_s=settings.timeout_s) as client:
        captures = list(client.captures(dict(labels), limit=limit))
    if settings.output == "table":
        print_table(COLUMNS, [_row(capture) for capture in captures], color=settings.color)
    else:
        emit([plain(capture) for capture in captures], settings.output)
    return ExitCode.DONE
