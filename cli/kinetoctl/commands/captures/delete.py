"""`kinetoctl captures delete`."""

import click

from kinetoctl.base.common_options import common_options, current
from kinetoctl.client.daemon_client import Client
from kinetoctl.exit_codes import ExitCode
from kinetoctl.options.capture_arguments import captures_argument
from kinetoctl.output.console import say
from kinetoctl.output.json_yaml import emit


@click.command("delete")
@captures_argument
@click.option("--keep-uploaded", is_flag=True, help="Do not delete uploaded files.")
@common_options
def command(capture_ids: tuple[str, ...], keep_uploaded: bool) -> int:
    """Delete ended captures and their files, including the uploaded ones."""
    settings = current()
    deleted = []
    with Client(settings.address, timeout_s=settings.timeout_s) as client:
        for capture_id in capture_ids:
            client.delete(capture_id, keep_uploaded=keep_uploaded)
            deleted.append(capture_id)
            if settings.output == "table":
                say(f"{capture_id} deleted")
    if settings.output != "table":
        emit({"deleted": deleted}, settings.output)
    return ExitCode.DONE
