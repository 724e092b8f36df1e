"""`kinetoctl captures unpin`."""

import click

from kinetoctl.captureid import captures_argument
from kinetoctl.pinning import pin_all
from kinetoctl.settings import common_options


@click.command("unpin")
@captures_argument
@common_options
def command(capture_ids: tuple[str, ...]) -> int:
    """Give captures back to retention."""
    return pin_all(capture_ids, pinned=False)
