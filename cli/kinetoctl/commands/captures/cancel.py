"""`kinetoctl captures cancel`."""

import click

from kinetoctl.base.common_options import common_options, current
from kinetoctl.client import enum_names
from kinetoctl.client.daemon_client import Client
from kinetoctl.exit_codes import ExitCode
from kinetoctl.options.capture_arguments import captures_argument
from kinetoctl.output.console import say
from kinetoctl.output.json_yaml import emit, plain


@click.command("cancel")
@captures_argument
@click.option("--keep-partial", is_flag=True, help="Store what has been recorded so far.")
@common_options
def command(capture_ids: tuple[str, ...], keep_partial: bool) -> int:
    """Stop running captures in all their processes."""
    settings = current()
    with Client(settings.address, timeout_s=settings.timeout_s) as client:
        captures = [client.cancel(capture_id, keep_partial=keep_partial) for capture_id in capture_ids]
    if settings.output == "table":
        for capture in captures:
            say(f"{capture.id} {enum_names.capture_status(capture.status)}")
    else:
        emit([plain(capture) for capture in captures], settings.output)
    return ExitCode.DONE
