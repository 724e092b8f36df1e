"""The options common to all helper services, and the socket that they configure."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from kineto_protos.options import Parsed
from kineto_trace.base.quantities import parse_duration_ns

from kinetod.base.errors import StartError
from kinetod.config.addresses import checked_socket_path
from kinetod.supervise.helper_service import own_socket, passed_socket

F = TypeVar("F", bound=Callable[..., Any])

socket_option = click.option(
    "--socket",
    "path",
    type=Parsed("path", checked_socket_path),
    help="Create this socket and listen on it if no service manager passes one.",
)
log_level_option = click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info")


def idle_exit_option(when: str = "if a service manager passed the socket") -> Callable[[F], F]:
    """`--idle-exit`. when: the case in which it applies."""
    return click.option(
        "--idle-exit",
        type=Parsed("duration", parse_duration_ns),
        default="10min",
        show_default=True,
        help=f"Exit after this long without a caller, {when}; 0: never.",
    )


def listening_socket(path: Path | None, unit: str, *, for_group: bool = False) -> socket.socket:
    """The socket that a service manager passed, or one of our own at `path`. Raises StartError.

    unit: systemd unit that passes one. for_group: whether this process's group may connect to our own.
    """
    listener = passed_socket() or (own_socket(path, for_group=for_group) if path is not None else None)
    if listener is None:
        raise StartError(f"no socket was passed (LISTEN_FDS); start {unit}, or give --socket")
    return listener
