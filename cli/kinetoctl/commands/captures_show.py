"""`kinetoctl captures show`."""

from typing import Any

import click

from kinetoctl.captureid import capture_argument
from kinetoctl.client import Client
from kinetoctl.exit_codes import ExitCode
from kinetoctl.fleet.find import find_fleet
from kinetoctl.fleet.options import named_places, place_options
from kinetoctl.output.fleet_summary import show_fleet_result
from kinetoctl.output.results import show_capture
from kinetoctl.settings import common_options, current


@click.command("show")
@capture_argument
@place_options
@common_options
def command(capture_id: str, **hosts: Any) -> int:
    """Show one capture: its targets, their verdicts and what was recorded.

    With hosts: all of a capture of many hosts, by the id that `kinetoctl trace` gave it.
    """
    settings = current()
    if places := named_places(hosts):
        fleet = find_fleet(places, capture_id, timeout_s=settings.timeout_s)
        show_fleet_result(fleet, None, None, settings)
        return ExitCode.DONE
    with Client(settings.address, timeout_s=settings.timeout_s) as client:
        show_capture(client.capture(capture_id), {}, settings)
    return ExitCode.DONE
