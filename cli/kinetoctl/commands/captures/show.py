"""`kinetoctl captures show`."""

import contextlib
from typing import TYPE_CHECKING, Any

import click

from kinetoctl.base.common_options import CommonOptions, common_options, current
from kinetoctl.client.daemon_client import Client
from kinetoctl.client.fleet.lookup import find_fleet
from kinetoctl.client.retry import Patience
from kinetoctl.client.tracing import follow
from kinetoctl.exit_codes import ExitCode
from kinetoctl.options.capture_arguments import capture_argument
from kinetoctl.options.host_options import named_places, place_options
from kinetoctl.output.capture_progress import show_progress
from kinetoctl.output.capture_result import show_capture
from kinetoctl.output.fleet_summary import show_fleet_result

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb


def _follow(client: Client, capture: "pb.Capture", settings: CommonOptions) -> None:
    """Brings the capture up to date until it has ended, and shows its progress. Ctrl-C ends only the watching."""
    with (
        contextlib.suppress(KeyboardInterrupt),
        show_progress(quiet=settings.quiet, color=settings.color) as progress,
    ):
        progress.update(capture)
        for _change in follow(client, capture, Patience(settings.timeout_s)):
            progress.update(capture)


@click.command("show")
@capture_argument
@click.option("--watch", "-w", "watches", is_flag=True, help="Follow the capture until it has ended, then show it.")
@place_options
@common_options
def command(capture_id: str, watches: bool, **hosts: Any) -> int:
    """Show one capture: targets, verdicts and what was recorded.

    With several hosts, ID is the one that `kinetoctl trace` printed for the whole capture.
    """
    settings = current()
    if places := named_places(hosts):
        if watches:
            raise click.UsageError("--watch follows the capture of one host: name it with --address")
        fleet = find_fleet(places, capture_id, timeout_s=settings.timeout_s)
        show_fleet_result(fleet, None, None, settings)
        return ExitCode.DONE
    with Client(settings.address, timeout_s=settings.timeout_s) as client:
        capture = client.capture(capture_id)
        if watches:
            _follow(client, capture, settings)
        show_capture(capture, {}, settings)
    return ExitCode.DONE
