"""`kinetoctl captures show`."""

from typing import Any

import click

from kinetoctl.base.common_options import common_options, current
from kinetoctl.client.daemon_client import Client
from kinetoctl.client.fleet.lookup import find_fleet
from kinetoctl.exit_codes import ExitCode
from kinetoctl.options.capture_arguments import capture_argument
from kinetoctl.options.host_options import named_places, place_options
from kinetoctl.output.capture_result import show_capture
from kinetoctl.output.fleet_summary import show_fleet_result


@click.command("show")
@capture_argument
@place_options
@common_options
def command(capture_id: str, **hosts: Any) -> int:
    """Show one capture: targets, verdicts and what was recorded.

    With several hosts, ID is the one that `kinetoctl trace` printed for the whole capture.
    """
    settings = current()
    if places := named_places(hosts):
        fleet = find_fleet(places, capture_id, timeout_s=settings.timeout_s)
        show_fleet_result(fleet, None, None, settings)
        return ExitCode.DONE
    with Client(settings.address, timeout_s=settings.timeout_s) as client:
        show_capture(client.capture(capture_id), {}, settings)
    return ExitCode.DONE
