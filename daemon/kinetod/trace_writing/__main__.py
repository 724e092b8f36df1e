"""`kinetod-writer`: writes traces as other users; started by its socket (LISTEN_FDS), or with --socket."""

import asyncio
import logging
import os
import sys
from pathlib import Path

import click
from kineto_protos.options import Parsed
from kineto_protos.units import parse_duration_ns

from kinetod import __version__
from kinetod.base import logs
from kinetod.base.errors import StartError
from kinetod.base.policy_file import PolicyError
from kinetod.config.addresses import checked_socket_path
from kinetod.supervise.helper_service import own_socket, passed_socket, serve
from kinetod.trace_writing import writer_policy as policies
from kinetod.trace_writing.writer_server import WriterService

log = logging.getLogger(__name__)

EXIT_CANNOT_START = 1


@click.command(context_settings={"max_content_width": 100})
@click.option(
    "--socket",
    "path",
    type=Parsed("path", checked_socket_path),
    help="Create this socket and listen on it if no service manager passes one.",
)
@click.option(
    "--policy",
    type=click.Path(path_type=Path),
    default=policies.DEFAULT_FILE,
    show_default=True,
    help="Who may ask, as whom is written, and below which folders.",
)
@click.option(
    "--idle-exit",
    type=Parsed("duration", parse_duration_ns),
    default="10min",
    show_default=True,
    help="Exit after this long without a caller if a service manager passed the socket; 0: never.",
)
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info")
@click.version_option(__version__, prog_name="kinetod-writer")
def command(path: Path | None, policy: Path, idle_exit: int, log_level: str) -> int:
    """Write traces where clients of Dynolog asked for them, for a kinetod that cannot become their users.

    It takes requests of the users that its policy names, writes only below the folders and as the users that its policy
    allows, with their rights alone, and logs each use.
    """
    logs.configure(log_level)
    os.umask(0o077)
    try:
        listener = passed_socket() or (own_socket(path) if path is not None else None)
        if listener is None:
            raise StartError("no socket was passed (LISTEN_FDS); start kinetod-writer.socket, or give --socket")
        try:
            if not policies.load(policy).roots:
                log.warning("nothing is written until `roots` in %s names folders", policy)
        except PolicyError as exc:
            log.error("no caller is served until this is fixed: %s", exc)
        service = WriterService(lambda: policies.load(policy))
        greeting = f"kinetod-writer {__version__} serves"
        asyncio.run(serve(listener, service, greeting, idle_exit_s=0 if path is not None else idle_exit / 1e9))
    except StartError as exc:
        log.error("%s", exc)
        return EXIT_CANNOT_START
    return 0


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
