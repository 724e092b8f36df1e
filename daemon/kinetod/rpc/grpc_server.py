"""The gRPC server: health, reflection, and its sockets behind the connection proxy (`access.connections`)."""

import os

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_protos.v1.profiler_pb2_grpc import add_ProfilerServicer_to_server

from kinetod.access.call_limits import Doorkeeper
from kinetod.access.connections.certificates import Certificates
from kinetod.access.connections.connection_proxy import PLAIN_SOCKET, TLS_SOCKET, TLS_TOKEN_SOCKET, Front, PrivateFolder
from kinetod.base.errors import StartError
from kinetod.rpc.bundled_services import Bundled
from kinetod.rpc.entrance import Entrance
from kinetod.rpc.malformed_requests import Tolerant
from kinetod.rpc.profiler_service import ProfilerService

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Profiler"].full_name
MAX_REQUEST_BYTES = 1 << 20  # the largest request that makes sense has 4096 pids and 64 labels
HANDSHAKE_MS = 10_000  # TLS and HTTP/2, from the first byte on
MAX_PENDING = 1 << 15
MAX_STREAMS = 64  # calls at a time on one connection; clients wait beyond it
# Who calls is found out when a connection is made. After this time it is made anew, so that a certificate that has
# expired, or whose authority was taken away, does not count for good.
MAX_CONNECTION_AGE_MS = 3_600_000
MAX_CONNECTION_GRACE_MS = 600_000  # for its calls; twice as long as kinetoctl leaves a stream open
_OPTIONS = (
    ("grpc.max_connection_age_ms", MAX_CONNECTION_AGE_MS),
    ("grpc.max_connection_age_grace_ms", MAX_CONNECTION_GRACE_MS),
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    # Calls that wait to be looked at, of all callers: beyond the first number gRPC cancels some at random, whoever's
    # they are (1000 by default, which one user's connections have). Connections and streams bound them.
    ("grpc.server.max_pending_requests", MAX_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_PENDING),
)


class RpcServer:
    """Serves until `stop`. Health is NOT_SERVING until `set_serving`. Clients come through the connection proxy."""

    def __init__(
        self,
        service: ProfilerService,
        front: Front,
        folder: PrivateFolder,
        certificates: Certificates | None,
        doorkeeper: Doorkeeper,
    ) -> None:
        self.serving = False
        self._stopped = False
        self._front = front
        self._folder = folder
        self._certificates = certificates
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(
            options=_OPTIONS,
            interceptors=(Entrance(doorkeeper, SERVICE_NAME), Tolerant(), Bundled(SERVICE_NAME)),
        )
        # The generated and bundled helpers carry no types.
        add_ProfilerServicer_to_server(service, self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self) -> None:
        """Starts listening. Raises StartError."""
        try:
            await self._start()
        except StartError:
            await self._server.stop(None)  # else it complains when the loop is gone
            raise

    async def _start(self) -> None:
        await self.set_serving(False)
        old_mask = os.umask(0o177)
        try:
            self._server.add_insecure_port(f"unix:{self._folder.socket_path(PLAIN_SOCKET)}")
            if self._certificates is not None:
                for name in (TLS_SOCKET, TLS_TOKEN_SOCKET):
                    credentials = self._certificates.credentials(of_clients=name == TLS_SOCKET)
                    self._server.add_secure_port(f"unix:{self._folder.socket_path(name)}", credentials)
        except RuntimeError as exc:
            raise StartError(f"gRPC cannot listen: {exc}") from exc
        finally:
            os.umask(old_mask)
        await self._server.start()
        await self._front.start()

    async def set_serving(self, serving: bool) -> None:
        """Sets what the health service reports."""
        self.serving = serving
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Accepts no more calls; those in progress get `grace_s` to finish. Only the first call counts."""
        if self._stopped:
            return
        self._stopped = True
        self._front.stop_accepting()
        await self._server.stop(grace_s)
        self._front.close()
        self._folder.close()
