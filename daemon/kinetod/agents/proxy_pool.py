"""The daemon's processes that act as agents of processes without Python: one `kinetod.agents.proxy_agent` for each."""

import asyncio
import logging
import socket
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Sequence
from pathlib import Path

from kinetod.attach.attach_types import AttachCode, AttachError
from kinetod.processes.identity import BOOT_TIME_NS, ProcessKey
from kinetod.supervise import child

log = logging.getLogger(__name__)

COMMAND = child.python("kinetod.agents.proxy_agent")
EXIT_S = 5.0


class Proxies:
    """The running proxies. Each ends by itself when its link is closed or its process is gone."""

    def __init__(self, *, command: Sequence[str] = COMMAND, helper_socket: Path | None = None) -> None:
        """helper_socket: of the attach helper service, where the daemon itself may not inspect processes."""
        self._command = command
        self._helper_socket = helper_socket
        self._running: dict[asyncio.Task[None], Process] = {}

    def pids(self) -> set[int]:
        """The pids of the running proxies."""
        return {process.pid for process in self._running.values()}

    async def start(self, key: ProcessKey, channel: socket.socket) -> socket.socket:
        """Starts one for a process whose collector is at the other end of `channel`; returns our end of its link.

        Takes ownership of the channel. Raises AttachError.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        with theirs, channel:
            fds, pid = (theirs.fileno(), channel.fileno()), key.pid
            helper = (self._helper_socket, key.start_time_ns, BOOT_TIME_NS) if self._helper_socket else ()
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    *map(str, (pid, *fds, *helper)),
                    stdin=DEVNULL,
                    stdout=DEVNULL,
                    pass_fds=fds,
                    start_new_session=True,  # only the daemon handles a Ctrl-C in its terminal
                )
            except OSError as exc:
                ours.close()
                raise AttachError(
                    AttachCode.FAILED, f"the daemon cannot start a proxy for process {pid}: {exc.strerror}"
                ) from exc
            except BaseException:
                ours.close()
                raise
        watch = asyncio.create_task(self._watch(pid, process), name=f"proxy of {pid}")
        self._running[watch] = process
        watch.add_done_callback(self._running.pop)
        return ours

    async def _watch(self, pid: int, process: Process) -> None:
        status = await process.wait()
        if status:
            log.warning("the proxy of process %d ended with status %d", pid, status)

    async def stop(self) -> None:
        """Waits until they have ended and kills the rest; their links are closed already."""
        running = dict(self._running)
        await asyncio.gather(*(child.end(process, patience_s=EXIT_S) for process in running.values()))
        await asyncio.gather(*running)  # they log how they ended
