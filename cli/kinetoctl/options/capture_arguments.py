"""The argument that names captures, with completion."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def _complete(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[Any]:
    from kinetoctl.options.completers import capture_ids  # only when a shell asks: it needs the daemon

    return capture_ids(incomplete)


def capture_argument(function: F) -> F:
    """Adds the argument ID."""
    return click.argument("capture_id", metavar="ID", shell_complete=_complete)(function)


def some_captures_argument(function: F) -> F:
    """Adds the argument [ID]..., possibly none."""
    return click.argument("capture_ids", metavar="[ID]...", nargs=-1, shell_complete=_complete)(function)


def captures_argument(function: F) -> F:
    """Adds the argument ID..., at least one."""
    return click.argument("capture_ids", metavar="ID...", nargs=-1, required=True, shell_complete=_complete)(function)
