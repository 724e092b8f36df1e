"""`kinetod-attach`: the attach helper as a service, started by its socket (LISTEN_FDS) or with --socket."""

import asyncio
import contextlib
import logging
import signal
import socket
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
from kinetod.base.notify import notify, watchdog_s
from kinetod.base.service_sockets import own_socket, passed_socket
from kinetod.config.addresses import checked_socket_path

log = logging.getLogger(__name__)

EXIT_CANNOT_START = 1
ACCEPT_BUDGET = 16
_LOOK_ROUND_S = 10.0


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
        asyncio.run(_serve(listener, policy, 0 if path is not None else idle_exit / 1e9))
    except StartError as exc:
        log.error("%s", exc)
        return EXIT_CANNOT_START
    return 0


def _say_policy(path: Path) -> None:
    """Logs a mistake in the policy, which is read for every caller, when the service starts."""
    try:
        policies.load(path)
    except policies.PolicyError as exc:
        log.error("no caller is served until this is fixed: %s", exc)


async def _serve(listener: socket.socket, policy: Path, idle_exit_s: float) -> None:
    service = AttachService(lambda: policies.load(policy))
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        await service.start()
    except OSError as exc:
        raise StartError(f"no helper process can be started: {exc}") from exc
    listener.setblocking(False)
    loop.add_reader(listener, lambda: _accept(listener, service))
    notify("READY=1")
    log.info("kinetod-attach %s serves", __version__)
    try:
        await _until_done(service, stop, idle_exit_s)
    finally:
        loop.remove_reader(listener)
        notify("STOPPING=1")
        await service.stop()


def _accept(listener: socket.socket, service: AttachService) -> None:
    for _ in range(ACCEPT_BUDGET):
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as exc:
            log.error("cannot accept a caller: %s", exc.strerror)
            return
        service.accepted(sock)


async def _until_done(service: AttachService, stop: asyncio.Event, idle_exit_s: float) -> None:
    """Pings the watchdog from this loop; ends when told to, or when nobody has come for long."""
    period_s = min((watchdog_s() or _LOOK_ROUND_S) / 2, _LOOK_ROUND_S)
    while not stop.is_set():
        notify("WATCHDOG=1")
        if idle_exit_s and service.idle_s() >= idle_exit_s:
            log.info("no caller for %.0f s: exiting; the next caller starts the service again", service.idle_s())
            return
        wait_s = min(period_s, max(idle_exit_s - service.idle_s(), 0.05)) if idle_exit_s else period_s
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), wait_s)


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
