"""`kinetoctl captures pin`."""

import click

from kinetoctl.base.common_options import common_options
from kinetoctl.commands.captures.pinning import pin_all
from kinetoctl.options.capture_arguments import captures_argument


@click.command("pin")
@captures_argument
@common_options
def command(capture_ids: tuple[str, ...]) -> int:
    """Protect captures from retention and `captures delete`."""
    return pin_all(capture_ids, pinned=True)
