"""The options that every command takes, before or after its name: --address, --output, --timeout and so on.

They are stored in click's `meta`, which a group shares with its commands, so the last one given counts.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click
from kineto_protos import endpoints

from kinetoctl.parsing import ADDRESS, DURATION, parse_address

F = TypeVar("F", bound=Callable[..., Any])

OUTPUTS = ("table", "json", "yaml")
NO_COLOR_VARIABLE = "NO_COLOR"
DEFAULT_TIMEOUT_NS = 30_000_000_000
_PREFIX = "kinetoctl."


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the common options say. timeout_s: seconds to wait for one answer of the daemon."""

    address: str
    output: str
    color: bool
    quiet: bool
    timeout_s: float


def _remember(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if value:  # every value that can be given is true
        ctx.meta[f"{_PREFIX}{param.name}"] = value


def _option(*names: str, **attributes: Any) -> Callable[[F], F]:
    return click.option(*names, expose_value=False, callback=_remember, default=None, **attributes)


_COMMON = (
    _option(
        "--address", type=ADDRESS, help="Where the daemon listens: unix:/path or host:port.  [env: KINETO_ADDRESS]"
    ),
    _option("-o", "--output", type=click.Choice(OUTPUTS), help="Form of the result on stdout.  [default: table]"),
    _option("--no-color", is_flag=True, flag_value=True, help="No colours.  [env: NO_COLOR]"),
    _option("--quiet", "-q", is_flag=True, flag_value=True, help="No progress on stderr, only errors."),
    _option("--timeout", type=DURATION, help="How long to wait for an answer of the daemon.  [default: 30s]"),
)


def common_options(function: F) -> F:
    """Adds the common options to a command or group."""
    for option in reversed(_COMMON):
        function = option(function)
    return function


def _address(given: str | None) -> str:
    if given is not None:
        return given
    try:
        return parse_address(endpoints.rpc_address())
    except ValueError as exc:
        raise click.UsageError(f"{endpoints.ADDRESS_VARIABLE}: {exc}") from exc


def current() -> Settings:
    """The settings of the running command."""
    meta = click.get_current_context().meta
    return Settings(
        address=_address(meta.get(f"{_PREFIX}address")),
        output=meta.get(f"{_PREFIX}output", "table"),
        color=not (meta.get(f"{_PREFIX}no_color", False) or os.environ.get(NO_COLOR_VARIABLE)),
        quiet=meta.get(f"{_PREFIX}quiet", False),
        timeout_s=meta.get(f"{_PREFIX}timeout", DEFAULT_TIMEOUT_NS) / 1e9,
    )
