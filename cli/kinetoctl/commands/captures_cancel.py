"""`kinetoctl captures cancel`."""

import click

from kinetoctl.captureid import captures_argument
from kinetoctl.client import Client
from kinetoctl.exit_codes import ExitCode
from kinetoctl.output import names
from kinetoctl.output.console import say
from kinetoctl.output.documents import emit, plain
from kinetoctl.settings import common_options, current


@click.command("cancel")
@captures_argument
@click.option("--keep-partial", is_flag=True, help="Store what was recorded so far.")
@common_options
def command(capture_ids: tuple[str, ...], keep_partial: bool) -> int:
    """Stop running captures in all their processes."""
    settings = current()
    with Client(settings.address, timeout_s=settings.timeout_s) as client:
        captures = [client.cancel(capture_id, keep_partial=keep_partial) for capture_id in capture_ids]
    if settings.output == "table":
        for capture in captures:
            say(f"{capture.id} {names.capture_status(capture.status)}")
    else:
        emit([plain(capture) for capture in captures], settings.output)
    return ExitCode.DONE
