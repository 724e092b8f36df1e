"""`kinetod-attach`: the attach helper as a service, started by its socket (LISTEN_FDS) or with --socket."""

import asyncio
import logging
import sys
from pathlib import Path

import click

from kinetod import __version__
from kinetod.attach_helper import allow_list as policies
from kinetod.attach_helper.helper_server import AttachService
from kinetod.base import logs
from kinetod.base.errors import StartError
from kinetod.base.logs import exit_status
from kinetod.base.policy_file import PolicyError
from kinetod.config.service_options import idle_exit_option, listening_socket, log_level_option, socket_option
from kinetod.supervise.helper_service import serve

log = logging.getLogger(__name__)

EXIT_CANNOT_START = 1


@click.command(context_settings={"max_content_width": 100})
@socket_option
@click.option("--for-group", is_flag=True, help="Also let the group of this process connect to the socket.")
@click.option(
    "--policy",
    type=click.Path(path_type=Path),
    default=policies.DEFAULT_FILE,
    show_default=True,
    help="Policy file: who may use the service, and whose processes it may attach to.",
)
@idle_exit_option()
@log_level_option
@click.version_option(__version__, prog_name="kinetod-attach")
def command(path: Path | None, for_group: bool, policy: Path, idle_exit: int, log_level: str) -> int:
    """Attach kinetod's agent to processes on behalf of a kinetod that lacks the rights to do so.

    This is the only part of an installation with rights over other users' processes. It accepts requests from the users
    named in its policy, touches only processes that the policy allows, and logs each use.
    """
    logs.configure(log_level)
    try:
        listener = listening_socket(path, "kinetod-attach.socket", for_group=for_group)
        _say_policy(policy)
        service = AttachService(lambda: policies.load(policy))
        greeting = f"kinetod-attach {__version__} serves"
        asyncio.run(serve(listener, service, greeting, idle_exit_s=0 if path is not None else idle_exit / 1e9))
    except StartError as exc:
        log.error("%s", exc)
        return EXIT_CANNOT_START
    return 0


def _say_policy(path: Path) -> None:
    """Logs a mistake in the policy at start-up; the policy is read again for every caller."""
    try:
        policies.load(path)
    except PolicyError as exc:
        log.error("no caller is served until this is fixed: %s", exc)


def main() -> int:
    """Entry point; exit status 0 after a clean stop, 1 if the service cannot start, 2 for usage errors."""
    return exit_status(command)


if __name__ == "__main__":
    sys.exit(main())
