"""The options that every command takes, before or after its name: --address, --output, --timeout and so on.

They are stored in click's `meta`, which a group shares with its commands, so the last one given counts.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
from kineto_protos import endpoints
from kineto_protos.options import Parsed

from kinetoctl.base.value_types import ADDRESS, DURATION

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
    """The values of the common options. timeout_s: limit for each answer of the daemon, in seconds.

    wide: whether a table is to have all its columns, whatever the width of the terminal; output is then "table".
    file: where a table command writes its result instead of stdout; output is then the format of the file.
    """

    address: str
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
    _option("--quiet", "-q", is_flag=True, flag_value=True, help="Print only errors on stderr, no progress."),
    _option("--timeout", type=DURATION, help="Limit for each answer of the daemon.  [default: 30s]"),
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
    return CommonOptions(
        address=_address(meta.get(f"{_PREFIX}address")),
        output=_plain_form(output) if file is None else file.suffix.lower().removeprefix("."),
        wide=output == WIDE,
        file=file,
        color=not (meta.get(f"{_PREFIX}no_color", False) or os.environ.get(NO_COLOR_VARIABLE)),
        quiet=meta.get(f"{_PREFIX}quiet", False),
        timeout_s=meta.get(f"{_PREFIX}timeout", DEFAULT_TIMEOUT_NS) / 1e9,
    )
