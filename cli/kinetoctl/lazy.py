"""What is imported only when it is used, so that `kinetoctl run` starts at once: commands, and what a shell offers."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import click


class MissingCommand(click.UsageError):
    """A group was called without a command; its message is the group's help."""

    def __init__(self, ctx: click.Context) -> None:
        super().__init__(ctx.get_help(), ctx)


def completed(what: str) -> Callable[[click.Context, click.Parameter, str], list[Any]]:
    """What a shell offers for an option or argument, by a function of `complete`, which needs the daemon."""

    def offered(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[Any]:
        return list(getattr(importlib.import_module("kinetoctl.complete"), what)(incomplete))

    return offered


class LazyGroup(click.Group):
    """A group whose commands are named by module: each module has a click command called `command`."""

    def __init__(self, *args: Any, modules: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._modules = dict(modules or {})

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Click's hook: a call without anything is answered by the help, as an error."""
        if not args and not ctx.resilient_parsing and not self.invoke_without_command:
            raise MissingCommand(ctx)
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names in the order of the table."""
        return [*self._modules, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module. None: there is no such command."""
        module = self._modules.get(cmd_name)
        if module is None:
            return super().get_command(ctx, cmd_name)
        command: click.Command = importlib.import_module(module).command
        return command
