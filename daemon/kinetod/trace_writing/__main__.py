"""`kinetod-writer`: writes traces as other users; started by its socket (LISTEN_FDS), or with --socket."""

import asyncio
import logging
import os
import sys
from pathlib import Path

import click

from kinetod import __version__
from kinetod.base import logs
from kinetod.base.errors import StartError
from kinetod.base.logs import exit_status
from kinetod.base.policy_file import PolicyError
from kinetod.config.service_options import idle_exit_option, listening_socket, log_level_option, socket_option
from kinetod.supervise.helper_service import serve
from kinetod.trace_writing import writer_server as policies
from kinetod.trace_writing.writer_server import WriterService

log = logging.getLogger(__name__)

EXIT_CANNOT_START = 1


@click.command(context_settings={"max_content_width": 100})
@socket_option
@click.option(
    "--policy",
    type=click.Path(path_type=Path),
    default=policies.DEFAULT_FILE,
    show_default=True,
    help="Policy file: which users may send requests, as which users files are written, and below which folders.",
)
@idle_exit_option()
@log_level_option
@click.version_option(__version__, prog_name="kinetod-writer")
def command(path: Path | None, policy: Path, idle_exit: int, log_level: str) -> int:
    """Write traces to the paths that Dynolog clients requested, for a kinetod that cannot switch to their users.

    It accepts requests only from the users that its policy names, writes only below the folders and as the users that
    the policy allows, with only those users' rights, and logs every request.
    """
    logs.configure(log_level)
    os.umask(0o077)
    try:
        listener = listening_socket(path, "kinetod-writer.socket")
        try:
            if not policies.load(policy).roots:
                log.warning("nothing will be written until `roots` in %s names folders", policy)
        except PolicyError as exc:
            log.error("no caller will be served until this is fixed: %s", exc)
        service = WriterService(lambda: policies.load(policy))
        greeting = f"kinetod-writer {__version__} serves"
        asyncio.run(serve(listener, service, greeting, idle_exit_s=0 if path is not None else idle_exit / 1e9))
    except StartError as exc:
        log.error("%s", exc)
        return EXIT_CANNOT_START
    return 0


def main() -> int:
    """Entry point; exit status 0 after a clean stop, 1 if the service cannot start, 2 for usage errors."""
    return exit_status(command)


if __name__ == "__main__":
    sys.exit(main())
