"""Builds the parts of access control, and those that talk to Kubernetes; if the settings enable them, also the servers
for Dynolog's clients and for libkineto's polls.
"""

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
from kinetod.attach.attach_types import Finding, Status
from kinetod.attach_helper.helper_client import HelperService, HelperTraceFolders
from kinetod.base.errors import KinetodError, Reason, StartError
from kinetod.base.fair_slots import FairSlots
from kinetod.base.logs import Tally, in_terminal
from kinetod.captures.kineto_target.kineto_recorder import KinetoRecorder
from kinetod.captures.manager import CaptureManager, no_such_capture
from kinetod.config.addresses import ListenAddress
from kinetod.config.settings import Config, Settings, serves_everybody, socket_mode
from kinetod.dynolog_door.door_server import ClientLimits, DynologServer
from kinetod.dynolog_door.door_service import DynologService, ProcessMatcher
from kinetod.dynolog_door.log_files import LogFiles
from kinetod.kineto_files.direct_folders import DirectTraceFolders
from kinetod.kineto_ipc.network_namespaces import NamespaceOpener, OwnRights
from kinetod.kineto_ipc.poll_door import PollDoor
from kinetod.kineto_ipc.poller_registry import PollingProcesses
from kinetod.kubernetes.api_server import ApiServer, NodePods, Reviews, address_in
from kinetod.kubernetes.pod_names import KubeletClient, KubeletGpuHolders, PodNames
from kinetod.permissions.caller_limits import RequestRate, Shares
from kinetod.permissions.role_policy import Action, Caller, sees_all
from kinetod.selection.process_registry import Registry
from kinetod.store.capture_store import Store

log = logging.getLogger(__name__)

STANDING_PERIOD_S, STANDING_LINES = 60.0, 20
MAX_CALLS = 4096  # in progress for all callers together; each takes about 20 KiB
CHECK_NAME = "dynolog_door"


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
    to_file = str(config.state_dir) in given or in_terminal()  # a terminal may belong to who uses kinetoctl, too
    state_dir = config.state_dir if to_file else None
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


@dataclass(frozen=True, slots=True)
class DynologDoor:
    """The server and the files that its clients requested. everybody: whether all users may be served."""

    files: LogFiles
    server: DynologServer | None = None
    service: DynologService | None = None
    everybody: bool = False

    def capture_ended(self, capture: pb.Capture) -> None:
        """Writes the files of a capture that has ended."""
        self.files.capture_ended(capture)

    async def start(self, captures: CaptureManager) -> None:
        """Starts the server, and writes files that the previous daemon had promised."""
        for capture_id in await asyncio.to_thread(self.files.load):
            try:
                capture = await captures.get(capture_id)
            except KinetodError:
                self.files.drop(capture_id)
            else:
                if capture.status != pb.CAPTURE_STATUS_RUNNING:
                    self.files.capture_ended(capture)
        if self.server is not None and self.service is not None:
            await self.server.start(self.service.answer)

    async def findings(self, caller: Caller) -> list[Finding]:
        """Findings of `kinetoctl doctor` about the server. The process that has the port is named only to callers who
        may see all processes.
        """
        if self.server is None:
            return []
        return [await self._served(self.server, caller), *await self.files.findings(everybody=self.everybody)]

    async def _served(self, server: DynologServer, caller: Caller) -> Finding:
        if not server.problem:
            return Finding(CHECK_NAME, Status.OK, f"`dyno` is served at {', '.join(server.listening_at)}")
        holder = await server.holder()
        if not sees_all(caller, Action.SEE_PROCESS):
            holder = holder and "another process"
        taken = f"{server.address} is in use by {holder}" if holder else f"cannot listen on {server.address}"
        advice = "stop the other process (systemctl stop dynolog), or set dynolog.rpc to another address"
        return Finding(CHECK_NAME, Status.PROBLEM, f"`dyno` is not served: {taken}", advice)


def make_dynolog_door(
    settings: Settings,
    access: AccessParts,
    registry: Registry,
    store: Store,
    captures: CaptureManager,
    stack: contextlib.AsyncExitStack,
    *,
    looks: FairSlots,
    healthy: Callable[[], bool],
    polling: PollingProcesses | None = None,
) -> DynologDoor:
    """Builds the server; nobody can connect yet. polling: processes whose libkineto polls, if this daemon answers;
    looks: slots for inspecting processes.
    """
    config = settings.current
    files = LogFiles(settings, access.audit, store.target_dir)
    stack.push_async_callback(files.stop)
    if config.dynolog_rpc is None:
        return DynologDoor(files)
    everybody, own_uid = serves_everybody(config), os.geteuid()

    def is_admin(peer: Peer) -> bool:
        return peer.uid in (0, own_uid)

    server = DynologServer(
        config.dynolog_rpc,
        ClientLimits(is_admin),
        socket_mode=socket_mode(config),
        lets_in=lambda peer: everybody or peer.uid is None or is_admin(peer),
    )
    callers = Callers(settings, server.peer, own_uid=own_uid)
    call_tracker = CallTracker(callers, access.calls, access.rate, access.audit, hold=server.hold)
    stack.callback(call_tracker.close)
    gate = Authorizer(
        callers, access.rate, access.audit, call_tracker, resource_of=captures.resource, no_such=no_such_capture
    )
    service = DynologService(
        settings, gate, call_tracker, captures, ProcessMatcher(registry, polling), files, looks, healthy=healthy
    )
    stack.push_async_callback(server.stop)
    return DynologDoor(files, server, service, everybody)


async def start_poll_door(
    config: Config, helper: NamespaceOpener | None, stack: contextlib.AsyncExitStack
) -> PollDoor | None:
    """Starts the server for polls, closed with the stack; None if dynolog.ipc is off. helper: the attach helper, if
    any.
    """
    if not config.dynolog_ipc:
        return None
    opener = helper or (OwnRights() if os.geteuid() == 0 else None)
    door = PollDoor(config.dynolog_socket_dirs, namespaces=opener if config.dynolog_containers else None)
    stack.push_async_callback(door.stop)
    await door.start()
    return door


def make_recorder(
    door: PollDoor | None, helper: HelperService | None, stack: contextlib.AsyncExitStack
) -> KinetoRecorder | None:
    """Creates the common state of captures by libkineto, stopped with the stack; None if no process polls."""
    if door is None:
        return None
    recorder = KinetoRecorder(door.processes, HelperTraceFolders(helper) if helper else DirectTraceFolders())
    stack.push_async_callback(recorder.stop)
    return recorder
