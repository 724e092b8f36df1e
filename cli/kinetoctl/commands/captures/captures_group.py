"""`kinetoctl captures`: the group of everything about stored and running captures."""

import click

from kinetoctl.base.common_options import common_options
from kinetoctl.base.lazy_import import LazyGroup

COMMANDS = {
    "list": "kinetoctl.commands.captures.list",
    "show": "kinetoctl.commands.captures.show",
    "fetch": "kinetoctl.commands.captures.fetch",
    "cancel": "kinetoctl.commands.captures.cancel",
    "pin": "kinetoctl.commands.captures.pin",
    "unpin": "kinetoctl.commands.captures.unpin",
    "verify": "kinetoctl.commands.captures.verify",
    "delete": "kinetoctl.commands.captures.delete",
}


@click.group("captures", cls=LazyGroup, modules=COMMANDS)
@common_options
def command() -> None:
    """List, show, fetch, cancel, pin, verify and delete captures."""
