"""`kinetod-counters`: samples hardware counters of GPUs for kinetod, as a service or as the daemon's child."""

import asyncio
import contextlib
import logging
import os
import pwd
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

import click

from kinetod import __version__
from kinetod.base import logs
from kinetod.base.errors import StartError
from kinetod.base.logs import exit_status
from kinetod.base.unix_sockets import receive
from kinetod.config.service_options import idle_exit_option, listening_socket, log_level_option, socket_option
from kinetod.counters.backend_group import AUTO, CHOICES, make_backend
from kinetod.counters.sampler_server import SamplerService
from kinetod.supervise.helper_service import serve

log = logging.getLogger(__name__)

EXIT_CANNOT_START = 1
_LOOK_ROUND_S = 0.5


@click.command(context_settings={"max_content_width": 100})
@socket_option
@click.option(
    "--parent",
    is_flag=True,
    help="Receive connections through standard input, which is a socket from the daemon; exit when it is closed.",
)
@click.option(
    "--caller",
    "callers",
    multiple=True,
    metavar="USER",
    help="User who is allowed to connect, by name or number, besides root and the service's own user. Repeatable.",
)
@click.option(
    "--backend",
    type=click.Choice(CHOICES),
    default=AUTO,
    show_default=True,
    help="How to sample. auto: cupti, amdgpu and level-zero, for the GPUs that this host has. cupti: NVIDIA GPUs, "
    "with libcupti. cupti-python: NVIDIA GPUs, with NVIDIA's Python package (pip install cupti-python). amdgpu: AMD "
    "GPUs, with the kernel driver. level-zero: Intel GPUs, with Level Zero's tools API.",
)
@click.option(
    "--library",
    type=click.Path(path_type=Path),
    help="Library for the backend (with auto: for cupti). Default for cupti: the one in the wheel nvidia-cuda-cupti, "
    "otherwise the host's.",
)
@click.option(
    "--library-of",
    type=click.IntRange(min=1),
    multiple=True,
    metavar="PID",
    help="If no libcupti is installed, use the one of process PID, provided that only root and the service's own user "
    "could have changed it.",
)
@idle_exit_option("with --parent, or if a service manager passed the socket")
@log_level_option
@click.version_option(__version__, prog_name="kinetod-counters")
def command(
    path: Path | None,
    parent: bool,
    callers: tuple[str, ...],
    backend: str,
    library: Path | None,
    library_of: tuple[int, ...],
    idle_exit: int,
    log_level: str,
) -> int:
    """Sample hardware counters of whole GPUs for kinetod.

    It needs no permissions for any process and creates no CUDA context. It holds the counters of a GPU only while
    they are being sampled, and killing it at any time releases them.
    """
    logs.configure(log_level)
    try:
        service = SamplerService(
            make_backend(backend, "" if library is None else str(library), library_of),
            may_ask=_uids(callers).__contains__,
        )
        if parent:
            asyncio.run(_serve_parent(service, idle_exit / 1e9))
            _exit_at_once(0)
        listener = listening_socket(path, "kinetod-counters.socket", for_group=True)
        greeting = f"kinetod-counters {__version__} serves"
        asyncio.run(serve(listener, service, greeting, idle_exit_s=0 if path is not None else idle_exit / 1e9))
        _exit_at_once(0)
    except StartError as exc:
        log.error("%s", exc)
        return EXIT_CANNOT_START


def _uids(callers: tuple[str, ...]) -> set[int]:
    """Returns the user ids of these names. Raises StartError."""
    uids = {0, os.geteuid()}
    for caller in callers:
        try:
            uids.add(int(caller) if caller.isascii() and caller.isdecimal() else pwd.getpwnam(caller).pw_uid)
        except KeyError:
            raise StartError(f"--caller: there is no user {caller!r}") from None
    return uids


async def _serve_parent(service: SamplerService, idle_exit_s: float) -> None:
    """Serves the connections that arrive over standard input, until it ends or no request has come for long."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    control = socket.socket(fileno=os.dup(0))
    control.setblocking(False)
    await service.start()
    service.connections.begin()
    taking = asyncio.create_task(_take_connections(control, service))
    taking.add_done_callback(lambda _: stop.set())
    while not stop.is_set() and not (idle_exit_s and service.connections.idle_s() >= idle_exit_s):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _LOOK_ROUND_S)
    taking.cancel()
    with contextlib.suppress(asyncio.CancelledError, OSError):
        await taking
    control.close()
    await service.stop()


async def _take_connections(control: socket.socket, service: SamplerService) -> None:
    while True:
        packet, descriptors = await receive(control, 16)
        if not packet:
            return
        for descriptor in descriptors:
            service.connections.accepted(socket.socket(fileno=descriptor))


def _exit_at_once(status: int) -> NoReturn:
    """Skips the destructors of the vendor's libraries, which threads may still be running in."""
    logging.shutdown()
    os._exit(status)


def main() -> int:
    """Entry point; exit status 0 after a clean stop, 1 if the service cannot start, 2 for usage errors."""
    return exit_status(command)


if __name__ == "__main__":
    sys.exit(main())
