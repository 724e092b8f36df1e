"""The gRPC server: addresses, health, reflection."""

import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_protos.v1.profiler_pb2_grpc import add_ProfilerServicer_to_server

from kinetod.config import ListenAddress
from kinetod.errors import StartError
from kinetod.link import remove_stale_socket
from kinetod.rpc.service import ProfilerService

log = logging.getLogger(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Profiler"].full_name
MAX_CONCURRENT_CALLS = 1024
_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a second daemon on the same port is an error, not a load balancer
    ("grpc.max_receive_message_length", 4 << 20),
)


class RpcServer:
    """Serves until `stop`. Not serving is the health until `set_serving`."""

    def __init__(self, service: ProfilerService, listen: Sequence[ListenAddress]) -> None:
        self.serving = False
        self._listen = listen
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS)
        # The generated and bundled helpers carry no types.
        add_ProfilerServicer_to_server(service, self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self) -> None:
        """Listens. Raises StartError."""
        await self.set_serving(False)
        for address in self._listen:
            self._add(address)
        await self._server.start()

    def _add(self, address: ListenAddress) -> None:
        if address.path is not None:
            remove_stale_socket(address.path)
        old_mask = os.umask(0o177)  # only this user; root's daemon takes calls of root only
        try:
            port = self._server.add_insecure_port(str(address))
        except RuntimeError as exc:
            raise StartError(f"cannot listen on {address}: {exc}; is it in use?") from exc
        finally:
            os.umask(old_mask)
        if address.path is None:
            log.warning("every user of this host can trace processes through %s (port %d)", address, port)

    async def set_serving(self, serving: bool) -> None:
        """What the health service says."""
        self.serving = serving
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Takes no more calls; those under way get `grace_s`."""
        await self._server.stop(grace_s)
        for path in self._paths():
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def _paths(self) -> list[Path]:
        return [address.path for address in self._listen if address.path is not None]
