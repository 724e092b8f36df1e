"""Builds the parts of access control."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

from kinetod.access.audit_log import AuditLog
from kinetod.access.call_gate import Gate, ThingOf
from kinetod.access.call_limits import Doorkeeper
from kinetod.access.callers import Callers
from kinetod.access.connections.certificates import Certificates, TlsFiles
from kinetod.access.connections.connection_proxy import Door, Front, PrivateFolder
from kinetod.access.peers import Peer
from kinetod.access.token_users import KubernetesUsers
from kinetod.base.errors import KinetodError, Reason
from kinetod.config.addresses import ListenAddress
from kinetod.config.settings import Config, Settings, serves_everybody
from kinetod.permissions.caller_limits import RequestRate, Shares

log = logging.getLogger(__name__)

MAX_CALLS = 4096  # under way for all callers together; each takes some 20 KiB


@dataclass(frozen=True, slots=True)
class AccessParts:
    """The parts of access control that others use."""

    audit: AuditLog
    folder: PrivateFolder
    front: Front
    certificates: Certificates | None
    callers: Callers
    rate: RequestRate
    calls: Shares
    doorkeeper: Doorkeeper

    def gate(self, thing_of: ThingOf, no_such: Callable[[str], KinetodError]) -> Gate:
        """The gate for calls. thing_of: looks up a capture by id; no_such: the error for one that does not exist."""
        return Gate(self.callers, self.rate, self.audit, self.doorkeeper, thing_of=thing_of, no_such=no_such)


async def make_access(
    settings: Settings, stack: contextlib.AsyncExitStack, kubernetes: KubernetesUsers | None = None
) -> AccessParts:
    """Builds access control; nobody can connect yet. kubernetes: identifies callers by tokens. Raises StartError."""
    config = settings.current
    audit = await asyncio.to_thread(AuditLog, config.audit_file)
    stack.push_async_callback(asyncio.to_thread, audit.close)
    settings.subscribe(lambda _config: audit.reopen())
    files = _tls_files(config)
    certificates = await asyncio.to_thread(Certificates, files) if files is not None else None
    everybody, own_uid = serves_everybody(config), os.geteuid()

    def lets_in(peer: Peer) -> bool:
        return everybody or peer.uid in (0, own_uid)

    folder = PrivateFolder(config.agent_socket.with_name(config.agent_socket.name + ".grpc"))
    front = Front(
        _doors(config),
        folder,
        socket_mode=0o666 if everybody else 0o600,
        lets_in=lets_in,
        max_per_peer=lambda: settings.current.max_connections,
        requests_per_second=lambda: settings.current.requests_per_second,
        is_admin=lambda peer: peer.uid in (0, own_uid),
    )
    stack.callback(front.close)
    callers = Callers(settings, front.peer, kubernetes)
    rate = RequestRate(lambda: settings.current.requests_per_second)
    calls = Shares(
        Reason.TOO_MANY_CALLS,
        "calls",
        "access.max_calls_per_user",
        own=lambda: settings.current.max_calls_per_user,
        in_all=lambda: MAX_CALLS,
    )
    doorkeeper = Doorkeeper(callers, calls, rate, audit, hold=front.hold, vouch=front.vouch)
    stack.callback(doorkeeper.close)
    return AccessParts(
        audit=audit,
        folder=folder,
        front=front,
        certificates=certificates,
        callers=callers,
        rate=rate,
        calls=calls,
        doorkeeper=doorkeeper,
    )


def _doors(config: Config) -> list[Door]:
    doors = [Door(address=address, tls=_needs_tls(config, address)) for address in config.listen]
    if config.kubernetes:
        address = config.kubernetes_listen
        doors.append(Door(address=address, tls=not address.is_loopback, tokens=True))
    return doors


def _needs_tls(config: Config, address: ListenAddress) -> bool:
    without = address.path is not None or (address.is_loopback and config.loopback_without_tls)
    return config.has_tls and not without


def _tls_files(config: Config) -> TlsFiles | None:
    if config.tls_certificate is None or config.tls_key is None or config.tls_client_ca is None:
        return None
    return TlsFiles(certificate=config.tls_certificate, key=config.tls_key, client_ca=config.tls_client_ca)
