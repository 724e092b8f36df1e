"""`python -m kinetod.probe [ADDRESS]`: checks the health of kinetod or its helper services, for container probes.

The exit status is 0 if it reports that it is healthy within DEADLINE_S, otherwise 1 with the reason on standard error.
The daemon is queried through the standard gRPC health service on its Unix socket, so that nothing has to listen on the
network (a kubelet's own gRPC probe can neither use Unix sockets nor present a certificate). `seqpacket:/path` is an
attach helper's socket: it is asked about the probe itself, about which it reveals nothing. `counters:/path` is the
socket of kinetod-counters, which is asked to end a sampling that has not begun, so that no driver is called. A probe
takes about 0.15 s of one core, mostly to load gRPC.
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from kineto_protos.endpoints import rpc_address

DEADLINE_S = 5.0
HELPER_PREFIX = "seqpacket:"
COUNTERS_PREFIX = "counters:"


class Unwell(Exception):
    """The service is unhealthy or unreachable. The message says why."""


def ask_daemon(address: str, deadline_s: float = DEADLINE_S) -> None:
    """Checks the daemon's health. Raises Unwell."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    request = health_pb2.HealthCheckRequest()
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]  # the stubs leave methods out
            answer = check(request, timeout=deadline_s)
        except grpc.RpcError as exc:
            raise Unwell(f"{address}: {_details(exc)}") from exc
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise Unwell(f"{address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}")


def _details(error: Exception) -> str:
    details = getattr(error, "details", None)  # an RpcError of a call is a Call
    return str(details()) if callable(details) else str(error)


def ask_helper(path: Path) -> None:
    """Checks the attach helper's health. Raises Unwell."""
    from kinetod.attach_helper.helper_client import HelperService

    if problem := asyncio.run(HelperService(path, start_grace_s=0).problem()):
        raise Unwell(problem)


def ask_counters(path: Path, deadline_s: float = DEADLINE_S) -> None:
    """Checks the health of kinetod-counters. Raises Unwell."""
    from kinetod.counters.counter_client import CounterClient, CountersService

    if problem := asyncio.run(CounterClient(CountersService(path), answer_s=deadline_s).problem()):
        raise Unwell(problem)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; without an address, it probes the one that clients use."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    address = given[0] if given else rpc_address()
    try:
        if address.startswith(HELPER_PREFIX):
            ask_helper(Path(address.removeprefix(HELPER_PREFIX)))
        elif address.startswith(COUNTERS_PREFIX):
            ask_counters(Path(address.removeprefix(COUNTERS_PREFIX)))
        else:
            ask_daemon(address)
    except Unwell as exc:
        sys.stderr.write(f"{exc}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
