"""`kinetoctl version` and `kinetoctl completion`: about this program itself."""

import sys
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from kinetoctl.base.common_options import CommonOptions, common_options, current
from kinetoctl.exit_codes import COMPLETE_VARIABLE, PROGRAM, ExitCode
from kinetoctl.output.console import emit, say, say_text

DISTRIBUTION = "kinetod"
UNKNOWN = {"kinetoctl": "unknown (running from a source tree)", "kinetod": "unreachable"}


def client_version() -> str | None:
    """The version of this installation; None in a source tree, which has no metadata.

    It is part of the name of the metadata's folder: reading the metadata itself takes 20 ms.
    """
    for folder in sys.path:
        for found in Path(folder).glob(f"{DISTRIBUTION}-*.dist-info"):
            return found.name.removeprefix(f"{DISTRIBUTION}-").removesuffix(".dist-info")
    from importlib import metadata

    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return None


def _daemon_version(settings: CommonOptions) -> str | None:
    from kinetoctl.client.daemon_client import Client  # --client does without gRPC
    from kinetoctl.errors import CliError

    try:
        with Client(settings.address, timeout_s=settings.timeout_s) as client:
            return client.host().version
    except CliError as exc:
        if not settings.quiet:
            say(str(exc), err=True)
        return None


@click.command("version")
@click.option("--client", "client_only", is_flag=True, help="Do not contact the daemon.")
@common_options
def command(client_only: bool) -> int:
    """Show the versions of kinetoctl and, if it can be reached, of the daemon."""
    settings = current()
    versions: dict[str, str | None] = {"kinetoctl": client_version()}
    if not client_only:
        versions["kinetod"] = _daemon_version(settings)
    if settings.output == "table":
        for name, version in versions.items():
            say(f"{name} {version or UNKNOWN[name]}")
    else:
        emit(versions, settings.output)
    return ExitCode.DONE


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@common_options
def completion(shell: str) -> int:
    """Print the completion script for a shell.

    \b
    bash  eval "$(kinetoctl completion bash)"         in ~/.bashrc
    zsh   eval "$(kinetoctl completion zsh)"          in ~/.zshrc
    fish  kinetoctl completion fish | source          in ~/.config/fish/config.fish
    """
    maker = get_completion_class(shell)
    assert maker is not None
    root = click.get_current_context().find_root().command
    say_text(maker(root, {}, PROGRAM, COMPLETE_VARIABLE).source())
    return ExitCode.DONE
