"""`kinetoctl migrate`."""

import click

from kinetoctl.base.common_options import common_options
from kinetoctl.base.lazy_import import LazyGroup

COMMANDS = {"dynolog": "kinetoctl.commands.migrate.dynolog"}


@click.group("migrate", cls=LazyGroup, modules=COMMANDS)
@common_options
def command() -> None:
    """Write kinetod's configuration from that of another profiler's daemon."""
