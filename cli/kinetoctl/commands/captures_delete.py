"""`kinetoctl captures delete`."""

import click

from kinetoctl.captureid import captures_argument
from kinetoctl.client import Client
from kinetoctl.exit_codes import ExitCode
from kinetoctl.output.documents import emit
from kinetoctl.settings import common_options, current


@click.command("delete")
@captures_argument
@common_options
def command(capture_ids: tuple[str, ...]) -> int:
    """Remove ended captures and their files from the daemon's store."""
    settings = current()
    deleted = []
    with Client(settings.address, timeout_s=settings.timeout_s) as client:
        for capture_id in capture_ids:
            client.delete(capture_id)
            deleted.append(capture_id)
            if settings.output == "table":
                click.echo(f"{capture_id} deleted")
    if settings.output != "table":
        emit({"deleted": deleted}, settings.output)
    return ExitCode.DONE
