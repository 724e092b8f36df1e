"""Imports on first use, so that `kinetoctl run` starts at once: commands, parsers and completions."""

import difflib
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import click
from kineto_protos.options import Parsed


class MissingCommand(click.UsageError):
    """A group was called without a command; its message is the group's help."""

    def __init__(self, ctx: click.Context) -> None:
        super().__init__(ctx.get_help(), ctx)


def completed(what: str) -> Callable[[click.Context, click.Parameter, str], list[Any]]:
    """Shell completion by the named function of `options.completers`, which asks the daemon."""

    def offered(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[Any]:
        return list(getattr(importlib.import_module("kinetoctl.options.completers"), what)(incomplete))

    return offered


def parsed(name: str, where: str) -> Parsed:
    """A click type whose parser is imported on first use. where: "module:function"."""
    module, _, function = where.partition(":")

    def parse(text: str) -> Any:
        return getattr(importlib.import_module(module), function)(text)

    return Parsed(name, parse)


class LazyGroup(click.Group):
    """A group whose commands are imported on first use.

    modules: where each command is in kinetoctl.commands: "module", for its `command`, or "module:function".
    summaries: the first sentence of each command's help, so that the help of the group imports no command.
    """

    def __init__(
        self,
        *args: Any,
        modules: Mapping[str, str] | None = None,
        summaries: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._modules = dict(modules or {})
        self._summaries = dict(summaries or {})

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Click's hook: without arguments, the help is shown as an error."""
        if not args and not ctx.resilient_parsing and not self.invoke_without_command:
            raise MissingCommand(ctx)
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names in the order of the table, then in that of their declaration."""
        return [*self._modules, *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module. Returns None if there is no such command."""
        where = self._modules.get(cmd_name)
        if where is None:
            return super().get_command(ctx, cmd_name)
        module, _, function = where.partition(":")
        command: click.Command = getattr(importlib.import_module(f"kinetoctl.commands.{module}"), function or "command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Click's hook: a mistyped command is answered with those that are like it."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as exc:
            like = difflib.get_close_matches(args[0], self.list_commands(ctx), 3) if args else []
            if not like:
                raise
            raise click.UsageError(f"{exc.message} Did you mean {' or '.join(like)}?", ctx) from exc

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Click's hook: the list of commands in the help."""
        names = self.list_commands(ctx)
        if self._summaries.keys() != set(names):
            super().format_commands(ctx, formatter)
            return
        room = formatter.width - 6 - max(map(len, names))  # as click counts
        rows = [(name, click.Command(name, help=self._summaries[name]).get_short_help_str(room)) for name in names]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
