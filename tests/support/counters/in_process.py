"""kinetod-counters without a process: its service runs on the test's event loop."""

import socket

from kinetod.counters.sampler_server import SamplerService


class InProcess:
    """Connections to a service in this process, whose other ends it keeps."""

    def __init__(self, service: SamplerService) -> None:
        self.service = service
        self.made: list[socket.socket] = []

    def pids(self) -> set[int]:
        return set()

    async def connect(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self.service.connections.accepted(theirs)
        self.made.append(ours)
        return ours

    async def stop(self) -> None:
        await self.service.stop()
