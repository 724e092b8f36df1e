"""`kinetoctl plugin`."""

import click

from kinetoctl.base.common_options import common_options
from kinetoctl.base.lazy_import import LazyGroup

COMMANDS = {
    "new": "kinetoctl.commands.plugin.new",
    "check": "kinetoctl.commands.plugin.check",
    "list": "kinetoctl.commands.plugin.list",
}


@click.group("plugin", cls=LazyGroup, modules=COMMANDS)
@common_options
def command() -> None:
    """Write, check and list plug-ins for accelerators."""
