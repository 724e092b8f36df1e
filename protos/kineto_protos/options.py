"""Click types for the command lines of the daemon and the CLI."""

from collections.abc import Callable
from typing import Any

import click


class Parsed(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4 only
    """A click type made from a function that raises ValueError with the full explanation."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Click's hook: returns the parsed value, or raises BadParameter with the parser's message."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as exc:
            return self.fail(str(exc), param, ctx)
