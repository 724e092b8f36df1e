"""`kinetoctl captures pin`."""

import click

from kinetoctl.captureid import captures_argument
from kinetoctl.pinning import pin_all
from kinetoctl.settings import common_options


@click.command("pin")
@captures_argument
@common_options
def command(capture_ids: tuple[str, ...]) -> int:
    """Keep captures: neither retention nor `captures delete` removes them until they are unpinned."""
    return pin_all(capture_ids, pinned=True)
