"""`kinetoctl captures list`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from kinetoctl.base.common_options import CommonOptions, common_options, current
from kinetoctl.base.value_types import LABEL
from kinetoctl.client import enum_names
from kinetoctl.client.daemon_client import Client
from kinetoctl.client.fleet.broadcast import ask, errors, exit_code, values
from kinetoctl.client.fleet.host_client import HostClient
from kinetoctl.client.hosts.host_targets import Place
from kinetoctl.exit_codes import ExitCode
from kinetoctl.options.host_options import named_places, place_options
from kinetoctl.output import units
from kinetoctl.output.console import print_table, say
from kinetoctl.output.file_status import where
from kinetoctl.output.json_yaml import emit, plain

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

COLUMNS = ("ID", "STATUS", "AGE", "PID", "JOB", "SIZE", "WHERE", "LABELS", "COMMAND")


def _row(capture: "pb.Capture") -> tuple[str, ...]:
    targets = capture.targets
    stored = sum(file.size_bytes for target in targets for file in target.files)
    jobs = sorted({target.process.job_id for target in targets if target.process.job_id})
    commands = list(dict.fromkeys(" ".join(target.process.command) for target in targets))
    return (
        capture.id,
        enum_names.capture_status(capture.status),
        units.age(capture.created_ns),
        _first([str(target.pid) for target in targets]),
        _first(jobs),
        units.size(stored),
        where(capture),
        ",".join(f"{key}={capture.spec.labels[key]}" for key in sorted(capture.spec.labels)) or "-",
        _first(commands),
    )


def _first(values: Sequence[str]) -> str:
    """The first value, and how many more there are."""
    more = f" (+{len(values) - 1:,})" if len(values) > 1 else ""
    return f"{values[0]}{more}" if values else "-"


@click.command("list")
@click.option(
    "--label",
    "labels",
    type=LABEL,
    multiple=True,
    help="Only captures with this label, for example team=vision; repeatable.",
)
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=20,
    metavar="N",
    help="Number of captures to list, of each host.  [default: 20]",
)
@place_options
@common_options
def command(labels: tuple[tuple[str, str], ...], limit: int, **hosts: Any) -> int:
    """List captures, newest first; with several hosts, host by host."""
    settings = current()
    if places := named_places(hosts):
        return _of_hosts(places, dict(labels), limit, settings)
    with Client(settings.address, timeout_s=settings.timeout_s) as client:
        captures = list(client.captures(dict(labels), limit=limit))
    if settings.output == "table":
        print_table(COLUMNS, [_row(capture) for capture in captures], color=settings.color)
    else:
        emit([plain(capture) for capture in captures], settings.output)
    return ExitCode.DONE


def _of_hosts(places: Sequence[Place], labels: dict[str, str], limit: int, settings: CommonOptions) -> ExitCode:
    """Prints the captures of many hosts, and reports hosts that do not answer. Raises their error if none answers."""

    async def captures(client: HostClient, _place: Place) -> "list[pb.Capture]":
        return await client.captures(labels, limit=limit)

    answers = ask(places, captures, timeout_s=settings.timeout_s)
    for text in errors(answers):
        say(text, err=True)
    found = [(place, capture) for place, of_host in values(answers) for capture in of_host]
    if settings.output == "table":
        rows = [(place.host, *_row(capture)) for place, capture in found]
        print_table(("HOST", *COLUMNS), rows, color=settings.color)
    else:
        emit([{"address": place.address, **plain(capture)} for place, capture in found], settings.output)
    return exit_code(answers)
