"""The options that every command takes, before or after its name: --address, --output, --timeout and so on.

They are stored in click's `meta`, which a group shares with its commands, so the last one given counts.
"""

import difflib
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
from kineto_protos import endpoints
from kineto_protos.options import Parsed

from kinetoctl.base.value_types import ADDRESS, DURATION


# Imports on first use, so that `kinetoctl run` starts at once: commands, parsers and completions.
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


F = TypeVar("F", bound=Callable[..., Any])

WIDE = "wide"  # a table with all its columns
OUTPUTS = ("table", WIDE, "json", "yaml")
TABLE_OUTPUTS = (*OUTPUTS, "csv")  # of commands whose result is a table
TABLE_FILES = (".csv", ".json", ".parquet")
NO_COLOR_VARIABLE = "NO_COLOR"
DEFAULT_TIMEOUT_NS = 30_000_000_000
_PREFIX = "kinetoctl."


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonOptions:
    """The values of the common options.

    address: of the daemon; address_given: whether an option or KINETO_ADDRESS names it.
    timeout_s: limit for each daemon's answer, in seconds.
    wide: whether a table is to have all its columns, whatever the width of the terminal; output is then "table".
    file: where a table command writes its result instead of stdout; output is then the format of the file.
    """

    address: str
    address_given: bool = False
    output: str
    wide: bool = False
    file: Path | None = None
    color: bool
    quiet: bool
    timeout_s: float


def _remember(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if value:  # every value that can be given is true
        ctx.meta[f"{_PREFIX}{param.name}"] = value


def _option(*names: str, **attributes: Any) -> Callable[[F], F]:
    return click.option(*names, expose_value=False, callback=_remember, default=None, **attributes)


def _parse_output(text: str) -> str:
    """A format or a file name, for a command whose result is a table. Raises ValueError."""
    if text in TABLE_OUTPUTS or Path(text).suffix.lower() in TABLE_FILES:
        return text
    raise ValueError(f"expected {', '.join(TABLE_OUTPUTS)}, or a file ending in {', '.join(TABLE_FILES)}, got {text!r}")


_ADDRESS = _option(
    "--address", type=ADDRESS, help="Address of the daemon: unix:/path or host:port.  [env: KINETO_ADDRESS]"
)
_FORM = _option(
    "-o",
    "--output",
    type=click.Choice(OUTPUTS),
    help="Format of the result on stdout; wide: a table with more columns.  [default: table]",
)
_FORM_OR_FILE = _option(
    "-o",
    "--output",
    metavar="FORMAT|FILE",
    type=Parsed("format", _parse_output),
    help="Format on stdout: table, wide (all columns), json, yaml or csv; or a file to write, with the suffix .csv, "
    ".json or .parquet.  [default: table]",
)
_OTHERS = (
    _option("--no-color", is_flag=True, flag_value=True, help="Print without colours.  [env: NO_COLOR]"),
    _option("--quiet", "-q", is_flag=True, flag_value=True, help="Print only errors on stderr; no progress."),
    _option("--timeout", type=DURATION, help="How long to wait for each response from the daemon.  [default: 30s]"),
)


def common_options(function: F) -> F:
    """Adds the common options to a command or group."""
    return _added(function, (_ADDRESS, _FORM, *_OTHERS))


def table_options(function: F) -> F:
    """Adds the common options to a command whose result is a table: it can be CSV, and written to a file."""
    return _added(function, (_ADDRESS, _FORM_OR_FILE, *_OTHERS))


def options_without_form(function: F) -> F:
    """Adds the common options except --output to a command that has its own."""
    return _added(function, (_ADDRESS, *_OTHERS))


def _added(function: F, options: Sequence[Callable[[F], F]]) -> F:
    for option in reversed(options):
        function = option(function)
    return function


def _address(given: str | None) -> str:
    if given is not None:
        return given
    try:
        return endpoints.parse_address(endpoints.rpc_address())
    except ValueError as exc:
        raise click.UsageError(f"{endpoints.ADDRESS_VARIABLE}: {exc}") from exc


def _plain_form(output: str) -> str:
    return "table" if output == WIDE else output


def current() -> CommonOptions:
    """The common options of the running command."""
    meta = click.get_current_context().meta
    output = meta.get(f"{_PREFIX}output", "table")
    file = None if output in TABLE_OUTPUTS else Path(output)
    address = meta.get(f"{_PREFIX}address")
    return CommonOptions(
        address=_address(address),
        address_given=bool(address or os.environ.get(endpoints.ADDRESS_VARIABLE)),
        output=_plain_form(output) if file is None else file.suffix.lower().removeprefix("."),
        wide=output == WIDE,
        file=file,
        color=not (meta.get(f"{_PREFIX}no_color", False) or os.environ.get(NO_COLOR_VARIABLE)),
        quiet=meta.get(f"{_PREFIX}quiet", False),
        timeout_s=meta.get(f"{_PREFIX}timeout", DEFAULT_TIMEOUT_NS) / 1e9,
    )
