"""`kinetod`: the command line of the daemon."""

import gc
import os
import sys
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from kineto_protos.options import Parsed

from kinetod import __version__
from kinetod.base import logs
from kinetod.base.errors import StartError
from kinetod.base.logs import exit_status
from kinetod.config.config_sources import ConfigError, LoadedConfig, Origin, default_file, effective
from kinetod.config.settings import KEYS
from kinetod.config.value_kinds import CONFIG_VARIABLE, CREDENTIALS_VARIABLE, ListOf, SettingSpec

SERVICE_CREDENTIALS = "/run/credentials/kinetod.service"
EXIT_CANNOT_START = 1
EXIT_CONFIG = 2  # for an invalid configuration or command line
F = TypeVar("F", bound=Callable[..., Any])


def _parameter(key: SettingSpec) -> str:
    return key.option.removeprefix("--").replace("-", "_")


def _settings(command: F) -> F:
    """Adds the options of all settings."""
    return reduce(lambda wrapped, key: _option(key)(wrapped), reversed([key for key in KEYS if key.option]), command)


def _option(key: SettingSpec) -> Callable[[F], F]:
    """The click option of a setting. Its variable is only mentioned here; `config_sources` reads them all at once."""
    help_text = f"{key.meaning[0].upper()}{key.meaning[1:]}."
    if key.off_switch:
        return click.option(key.option, is_flag=True, help=f"{help_text}  [env var: {key.variable}]")
    many = isinstance(key.kind, ListOf)
    kind = key.kind.item if isinstance(key.kind, ListOf) else key.kind
    default = key.default_words or key.kind.show(key.default_value()).strip('"')
    return click.option(
        key.option,
        type=Parsed(kind.name, kind.parse),
        multiple=many,
        metavar=kind.name.upper(),
        help=f"{help_text}{' Repeatable.' if many else ''}  [env var: {key.variable}; default: {default}]",
    )


@click.command(context_settings={"max_content_width": 100})
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help=f"The configuration file.  [env var: {CONFIG_VARIABLE}; default: /etc/kinetod/config.toml for root, else "
    "~/.config/kinetod/config.toml, if it exists]",
)
@click.option(
    "--check-config",
    is_flag=True,
    help="Print every setting and its source, then exit with 0, or with 2 if the configuration has errors.",
)
@click.option("--print-default-config", is_flag=True, help="Print a configuration file with every key and exit.")
@_settings
@click.version_option(__version__, prog_name="kinetod")
@click.pass_context
def command(
    context: click.Context, /, config: Path | None, *, check_config: bool, print_default_config: bool, **options: Any
) -> int:
    """Trace running processes on demand.

    Agents in training processes connect to the agent socket, clients such as kinetoctl to the listening
    address. Without options, everything is kept in this user's own folders; a daemon that runs as root
    serves the processes of all users. Options override environment variables, which override the
    configuration file. On SIGHUP, the daemon rereads the file.
    """
    if print_default_config:
        click.echo(default_file(), nl=False)
        return 0
    origin = Origin(named_file=config and config.absolute(), options=_given(context, options))
    if check_config:
        _see_credentials_of_the_service()
        return _show(origin.load())
    loaded = origin.load()
    logs.configure(loaded.config.log_level)
    gc.disable()  # nothing of a module is garbage, and looking for some takes a tenth of the start
    from kinetod.app import run  # gRPC and protobuf are not needed for --help and usage errors

    gc.enable()
    return run(loaded, origin)


def _given(context: click.Context, options: dict[str, Any]) -> dict[str, Any]:
    """The settings given on the command line, by key name."""
    given = {}
    for key in KEYS:
        name = _parameter(key)
        if key.option and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            given[key.name] = not options[name] if key.off_switch else options[name]
    return given


def _see_credentials_of_the_service() -> None:
    """Makes `credential:NAME` checkable from a shell while the service runs."""
    if CREDENTIALS_VARIABLE not in os.environ and os.access(SERVICE_CREDENTIALS, os.X_OK):
        os.environ[CREDENTIALS_VARIABLE] = SERVICE_CREDENTIALS


def _show(loaded: LoadedConfig) -> int:
    for line in effective(loaded):
        click.echo(line)
    for warning in loaded.warnings:
        click.echo(f"kinetod: {warning}", err=True)
    return 0


def main() -> int:
    """Entry point; exit status 0 after a clean stop, 1 if the daemon cannot start, 2 for usage and configuration."""
    try:
        return exit_status(command)
    except ConfigError as exc:
        for problem in exc.problems:
            _complain(str(problem))
        return EXIT_CONFIG
    except StartError as exc:
        _complain(str(exc))
        return EXIT_CANNOT_START


def _complain(text: str) -> None:
    click.echo(f"{logs.ERROR_PREFIX if logs.to_journal() else ''}kinetod: {text}", err=True)


if __name__ == "__main__":
    sys.exit(main())
