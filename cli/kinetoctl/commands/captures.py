"""`kinetoctl captures`: the group of everything about stored and running captures."""

import click

from kinetoctl.lazy import LazyGroup
from kinetoctl.settings import common_options

COMMANDS = {
    "list": "kinetoctl.commands.captures_list",
    "show": "kinetoctl.commands.captures_show",
    "fetch": "kinetoctl.commands.captures_fetch",
    "cancel": "kinetoctl.commands.captures_cancel",
    "pin": "kinetoctl.commands.captures_pin",
    "unpin": "kinetoctl.commands.captures_unpin",
    "verify": "kinetoctl.commands.captures_verify",
    "delete": "kinetoctl.commands.captures_delete",
}


@click.group("captures", cls=LazyGroup, modules=COMMANDS)
@common_options
def command() -> None:
    """List, show, fetch, cancel, keep, verify and delete captures."""
