"""Builds the parts of access control, and those that talk to Kubernetes."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kineto_protos.v1 import profiler_pb2 as pb

from kinetod.access.audit_log import AuditLog
from kinetod.access.call_gate import Authorizer, CallTracker, ResourceOf
from kinetod.access.callers import Callers
from kinetod.access.connections.certificates import Certificates, TlsFiles
from kinetod.access.connections.connection_proxy import ConnectionProxy, Listener, PrivateFolder
from kinetod.access.peers import Peer
from kinetod.access.token_users import KubernetesUsers
from kinetod.agents.agent_hub import ConnectedAgent
from kinetod.attach_helper.helper_client import HelperService
from kinetod.base.errors import KinetodError, Reason, StartError
from kinetod.base.logs import Tally
from kinetod.config.addresses import ListenAddress
from kinetod.config.settings import Config, Settings, serves_everybody, socket_mode
from kinetod.kubernetes.api_server import ApiServer, address_in
from kinetod.kubernetes.pod_names import KubeletClient, KubeletGpuHolders, PodNames
from kinetod.kubernetes.token_reviews import NodePods, Reviews
from kinetod.permissions.caller_limits import RequestRate, Shares

log = logging.getLogger(__name__)

STANDING_PERIOD_S, STANDING_LINES = 60.0, 20
MAX_CALLS = 4096  # in progress for all callers together; each takes about 20 KiB


@dataclass(frozen=True, slots=True)
class AccessParts:
    """The parts of access control that other subsystems use."""

    audit: AuditLog
    folder: PrivateFolder
    front: ConnectionProxy
    certificates: Certificates | None
    callers: Callers
    rate: RequestRate
    calls: Shares
    call_tracker: CallTracker
    standing: Tally

    def gate(self, resource_of: ResourceOf, no_such: Callable[[str], KinetodError]) -> Authorizer:
        """Creates the gate for calls. resource_of: looks up a capture by id; no_such: the error for one that does not
        exist.
        """
        return Authorizer(
            self.callers, self.rate, self.audit, self.call_tracker, resource_of=resource_of, no_such=no_such
        )

    def tell_standing(self, agent: ConnectedAgent, call: pb.StandingCall, how: str) -> None:
        """Notes in the audit log that a call of ours is stuck in a program, and how that has ended.

        Agents are not trusted, so each user gets at most STANDING_LINES a minute; the others are counted.
        """
        key, uid = agent.key, agent.identity.uid
        facts = {"capture": call.capture_id, "target_pid": key.pid, "target_uid": uid, "vendor_call": call.call}
        self.standing.note((uid, how), {"decision": how, **facts, "since_ns": call.since_ns})


async def make_access(
    settings: Settings, stack: contextlib.AsyncExitStack, kubernetes: KubernetesUsers | None = None
) -> AccessParts:
    """Builds access control; nobody can connect yet. kubernetes: identifies callers by tokens. Raises StartError."""
    config = settings.current
    # in a shell started by another service it is that service's
    given = os.environ.get("STATE_DIRECTORY", "").split(":")
    state_dir = config.state_dir if str(config.state_dir) in given else None
    audit = await asyncio.to_thread(AuditLog, config.audit_file, state_dir=state_dir)
    stack.push_async_callback(asyncio.to_thread, audit.close)
    settings.subscribe(lambda _config: audit.reopen())
    files = _tls_files(config)
    certificates = await asyncio.to_thread(Certificates, files) if files is not None else None
    everybody, own_uid = serves_everybody(config), os.geteuid()

    def lets_in(peer: Peer) -> bool:
        return everybody or peer.uid in (0, own_uid)

    folder = PrivateFolder(config.agent_socket.with_name(config.agent_socket.name + ".grpc"))
    front = ConnectionProxy(
        _doors(config),
        folder,
        socket_mode=socket_mode(config),
        lets_in=lets_in,
        max_per_peer=lambda: settings.current.max_connections,
        requests_per_second=lambda: settings.current.requests_per_second,
        is_admin=lambda peer: peer.uid in (0, own_uid),
    )
    stack.callback(front.close)
    callers = Callers(settings, front.peer, kubernetes, own_uid=own_uid)
    rate = RequestRate(lambda: settings.current.requests_per_second)
    calls = Shares(
        Reason.TOO_MANY_CALLS,
        "calls",
        "access.max_calls_per_user",
        own=lambda: settings.current.max_calls_per_user,
        in_all=lambda: MAX_CALLS,
    )
    call_tracker = CallTracker(callers, calls, rate, audit, hold=front.hold, vouch=front.vouch)
    stack.callback(call_tracker.close)

    def write_standing(line: Mapping[str, Any]) -> None:
        facts = dict(line)
        audit.write("(standing call)", facts.pop("decision"), None, **facts)
        capture, call, pid = (line.get(name) for name in ("capture", "vendor_call", "target_pid"))
        more = f" ({line['count']} more)" if "count" in line else ""
        log.warning("%s (capture %s), in %s of process %s%s", line["decision"], capture, call, pid, more)

    standing = Tally(write_standing, period_s=STANDING_PERIOD_S, burst=STANDING_LINES)
    stack.callback(standing.flush)
    return AccessParts(
        audit=audit,
        folder=folder,
        front=front,
        certificates=certificates,
        callers=callers,
        rate=rate,
        calls=calls,
        call_tracker=call_tracker,
        standing=standing,
    )


def _doors(config: Config) -> list[Listener]:
    listeners = [Listener(address=address, tls=_needs_tls(config, address)) for address in config.listen]
    if config.kubernetes:
        address = config.kubernetes_listen
        listeners.append(Listener(address=address, tls=not address.is_loopback, tokens=True))
    return listeners


def _needs_tls(config: Config, address: ListenAddress) -> bool:
    without = address.path is not None or (address.is_loopback and config.loopback_without_tls)
    return config.has_tls and not without


def _tls_files(config: Config) -> TlsFiles | None:
    if config.tls_certificate is None or config.tls_key is None or config.tls_client_ca is None:
        return None
    return TlsFiles(certificate=config.tls_certificate, key=config.tls_key, client_ca=config.tls_client_ca)


@dataclass(frozen=True, slots=True)
class Kubernetes:
    """The Kubernetes parts that other subsystems use; None if not configured."""

    holders: KubeletGpuHolders | None = None
    users: KubernetesUsers | None = None
    names: PodNames | None = None


def make_kubernetes(
    settings: Settings,
    helper: HelperService | None,
    number_of: Callable[[str], Awaitable[int]],
    stack: contextlib.AsyncExitStack,
    environ: Mapping[str, str] = os.environ,
) -> Kubernetes:
    """Builds the parts, without sending requests yet. number_of: the number of a Kubernetes user. Raises StartError."""
    config = settings.current
    holders = pods = users = None
    if config.pod_resources:
        connect = helper.kubelet if helper is not None else None
        holders = KubeletGpuHolders(KubeletClient(config.kubelet_socket, connect=connect).gpus)
    if config.kubernetes:
        api = _api(config, environ)
        stack.push_async_callback(asyncio.to_thread, api.close)
        pods = NodePods(api, config.node_name)
        users = KubernetesUsers(
            Reviews(api),
            pods,
            number_of=number_of,
            audiences=lambda: settings.current.kubernetes_audiences,
        )
    if holders is None and pods is None:
        return Kubernetes()
    return Kubernetes(holders, users, PodNames(holders, pods.current if pods is not None else None))


def _api(config: Config, environ: Mapping[str, str]) -> ApiServer:
    try:
        return ApiServer(address_in(environ), config.account_dir)
    except ValueError as exc:
        raise StartError(f"access.kubernetes: {exc}") from exc
