"""`kinetod-attach`: the attach helper as a service, started by its socket (LISTEN_FDS) or with --socket."""

import asyncio
import logging
import sys
from pathlib import Path

import click
from kineto_protos.options import Parsed
from kineto_protos.units import parse_duration_ns

from kinetod import __version__
from kinetod.attach_helper import allow_list as policies
from kinetod.attach_helper.helper_server import AttachService
from kinetod.base import logs
from kinetod.base.errors import StartError
from kinetod.base.policy_file import PolicyError
from kinetod.config.addresses import checked_socket_path
from kinetod.supervise.helper_service import own_socket, passed_socket, serve

log = logging.getLogger(__name__)

EXIT_CANNOT_START = 1


@click.command(context_settings={"max_content_width": 100})
@click.option(
    "--socket",
    "path",
    type=Parsed("path", checked_socket_path),
    help="Create this socket and listen on it if no service manager passes one.",
)
@click.option("--for-group", is_flag=True, help="Also let this process's group connect to that socket.")
@click.option(
    "--policy",
    type=click.Path(path_type=Path),
    default=policies.DEFAULT_FILE,
    show_default=True,
    help="Who may ask, and whose processes may be entered.",
)
@click.option(
    "--idle-exit",
    type=Parsed("duration", parse_duration_ns),
    default="10min",
    show_default=True,
    help="Exit after this long without a caller if a service manager passed the socket; 0: never.",
)
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info")
@click.version_option(__version__, prog_name="kinetod-attach")
def command(path: Path | None, for_group: bool, policy: Path, idle_exit: int, log_level: str) -> int:
    """Bring kinetod's agent into processes, for a kinetod that has no rights to.

    This is the only part of an installation with rights over other users' processes. It takes requests of the users
    that its policy names, touches the processes that its policy allows, and logs each use.
    """
    logs.configure(log_level)
    try:
        listener = passed_socket() or (own_socket(path, for_group=for_group) if path is not None else None)
        if listener is None:
            raise StartError("no socket was passed (LISTEN_FDS); start kinetod-attach.socket, or give --socket")
        _say_policy(policy)
        service = AttachService(lambda: policies.load(policy))
        greeting = f"kinetod-attach {__version__} serves"
        asyncio.run(serve(listener, service, greeting, idle_exit_s=0 if path is not None else idle_exit / 1e9))
    except StartError as exc:
        log.error("%s", exc)
        return EXIT_CANNOT_START
    return 0


def _say_policy(path: Path) -> None:
    """Logs a mistake in the policy, which is read for every caller, when the service starts."""
    try:
        policies.load(path)
    except PolicyError as exc:
        log.error("no caller is served until this is fixed: %s", exc)


def main() -> int:
    """Entry point; exit status 0 after a clean stop, 1 if the service cannot start, 2 for usage errors."""
    try:
        return int(command.main(standalone_mode=False) or 0)
    except click.ClickException as exc:
        exc.show()
        return exc.exit_code
    except click.Abort:
        return 130


if __name__ == "__main__":
    sys.exit(main())
