"""`kinetoctl captures show`."""

import click

from kinetoctl.captureid import capture_argument
from kinetoctl.client import Client
from kinetoctl.exit_codes import ExitCode
from kinetoctl.output.results import show_capture
from kinetoctl.settings import common_options, current


@click.command("show")
@capture_argument
@common_options
def command(capture_id: str) -> int:
    """Show one capture: its targets, their verdicts and what was recorded."""
    settings = current()
    with Client(settings.address, timeout_s=settings.timeout_s) as client:
        show_capture(client.capture(capture_id), {}, settings)
    return ExitCode.DONE
