"""`kinetoctl counters`."""

import click

from kinetoctl.base.common_options import common_options
from kinetoctl.base.lazy_import import LazyGroup

COMMANDS = {
    "list": "kinetoctl.commands.counters.list",
    "sets": "kinetoctl.commands.counters.sets",
    "watch": "kinetoctl.commands.counters.watch",
}


@click.group("counters", cls=LazyGroup, modules=COMMANDS)
@common_options
def command() -> None:
    """Sample the hardware counters of whole GPUs, without touching a process."""
