"""`kinetoctl captures verify`."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from kinetoctl.base.common_options import CommonOptions, common_options, current
from kinetoctl.client.daemon_client import Client
from kinetoctl.errors import NotFound
from kinetoctl.exit_codes import ExitCode
from kinetoctl.options.capture_arguments import some_captures_argument
from kinetoctl.output import units
from kinetoctl.output.console import print_table
from kinetoctl.output.json_yaml import emit, plain

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

COLUMNS = ("CAPTURE", "PID", "FILE", "COPY", "SIZE", "RESULT")
Checked = tuple[str, "pb.FileCheck"]


def _row(capture_id: str, check: "pb.FileCheck") -> tuple[str, ...]:
    copy = "uploaded" if check.uploaded else "local"
    name = check.format or check.name
    result = f"DAMAGED: {check.problem}" if check.problem else "OK"
    return capture_id, str(check.pid or "-"), name, copy, units.size(check.size_bytes), result


def _checks(client: Client, capture_ids: tuple[str, ...], uploaded: bool) -> Iterator[Checked]:
    ended = (each.id for each in client.captures({}, limit=sys.maxsize) if each.ended_ns)
    for capture_id in capture_ids or ended:
        try:
            for check in client.verify(capture_id, uploaded=uploaded):
                yield capture_id, check
        except NotFound:
            if capture_ids:
                raise  # else retention was faster


def _show(checked: list[Checked], settings: CommonOptions) -> None:
    if settings.output == "table":
        print_table(COLUMNS, [_row(capture_id, check) for capture_id, check in checked], color=settings.color)
    else:
        emit([{"capture_id": capture_id, **plain(check)} for capture_id, check in checked], settings.output)


@click.command("verify")
@some_captures_argument
@click.option("--uploaded", is_flag=True, help="Verify the uploaded copies of files that are on the host too.")
@common_options
def command(capture_ids: tuple[str, ...], uploaded: bool) -> int:
    """Verify the size and SHA-256 of stored files.

    Without ID, it verifies the files of all ended captures. The exit code is 5 if a file is damaged.
    """
    settings = current()
    with Client(settings.address, timeout_s=settings.timeout_s) as client:
        checked = list(_checks(client, capture_ids, uploaded))
    _show(checked, settings)
    return ExitCode.FAILED if any(check.problem for _, check in checked) else ExitCode.DONE
