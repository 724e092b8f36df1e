"""Turns a connection into a Caller: user and group names come from the system, roles from the settings."""

import asyncio
import contextlib
import grp
import os
import pwd
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from kinetod.access.peers import Peer
from kinetod.access.token_users import KubernetesUsers
from kinetod.base.errors import NotIdentified, NotPermitted, Reason
from kinetod.base.safe_text import clean
from kinetod.config.settings import Config, Settings
from kinetod.permissions.role_grants import Grant, LocalRules, certificate_names, local_roles
from kinetod.permissions.role_policy import Action, Caller, Role, Via, sees_all
from kinetod.processes.batch_jobs import PROC, jobs_of

KEEP_NAMES_S = 60.0
KEEP_JOBS_S = 2.0
MAX_KEPT = 4096
_PROCESS_ACTIONS = (Action.SEE_PROCESS, Action.TRACE)
Auth = Mapping[str, Iterable[bytes]]
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Names:
    """A user's names from the system's databases, and how long they are valid."""

    uid: int | None
    user: str
    group_ids: Mapping[str, int | None]
    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a connection alone says about a caller. key: what limits are counted by."""

    key: str
    who: str
    admin: bool = False
    via: Via | str = ""
    uid: int | None = None
    address: str = ""


class Callers:
    """Identifies callers. `peer_of` knows the connections (see `connection_proxy`)."""

    def __init__(
        self,
        settings: Settings,
        peer_of: Callable[[str], Peer | None],
        kubernetes: KubernetesUsers | None = None,
        *,
        own_uid: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        proc: Path = PROC,
    ) -> None:
        self._settings = settings
        self._peer_of = peer_of
        self._kubernetes = kubernetes
        self._own_uid = os.geteuid() if own_uid is None else own_uid
        self._clock = clock
        self._proc = proc
        self._names: dict[int | str, _Names] = {}
        self._asking: dict[Hashable, asyncio.Task[Any]] = {}
        self._jobs: dict[int, tuple[float, frozenset[str]]] = {}
        settings.subscribe(lambda _config: self._names.clear())

    async def introduce(self, connection: str, auth: Auth) -> str:
        """The user named by a token, found before anything is counted; "" if no token identifies the caller."""
        peer = self._peer_of(connection)
        if peer is None or peer.via is not Via.KUBERNETES or self._kubernetes is None:
            return ""
        return await self._kubernetes.introduce(connection, auth)

    def standing(self, connection: str, auth: Auth) -> Standing:
        """Identifies the peer without asking a database; user names are the last known ones."""
        peer = self._peer_of(connection)
        if peer is None:
            return Standing(key="nobody", who="a connection that the daemon does not know")
        config = self._settings.current
        if peer.uid is not None:
            rules, names = local_rules(config), self._names.get(peer.uid)
            admin = peer.uid in (0, self._own_uid)
            if names is not None and not admin:
                gid_of = names.group_ids.get
                roles = local_roles(
                    rules, uid=peer.uid, user=names.user, gids=peer.gids, own_uid=self._own_uid, gid_of=gid_of
                )
                admin = Role.ADMIN in roles
            who = f"{names.user} (uid {peer.uid})" if names is not None else f"uid {peer.uid}"
            return Standing(key=peer.key, who=who, admin=admin, via=peer.via, uid=peer.uid, address=peer.address)
        if peer.via is Via.KUBERNETES and self._kubernetes is not None and (user := self._kubernetes.known(auth)):
            who = f"the Kubernetes user {user}"
            return Standing(key=f"kubernetes {user}", who=who, via=peer.via, address=peer.address)
        name = next((each for each in certificate_names(auth) if each in config.certificates), None)
        if name is None or peer.via is not Via.TLS:
            return Standing(key=peer.key, who=f"the address {peer.address}", via=peer.via, address=peer.address)
        return Standing(
            key=f"certificate {name}",
            who=f"the certificate {clean(name, 300)}",
            admin=Role.ADMIN in config.certificates[name].roles,
            via=peer.via,
            address=peer.address,
        )

    async def caller(
        self, connection: str, auth: Auth, action: Action | None, pods: frozenset[str] = frozenset()
    ) -> Caller:
        """The caller on the connection that gRPC calls by this name. pods: those that the request names.

        Raises NotIdentified, NotPermitted.
        """
        peer = self._peer_of(connection)
        if peer is None:
            raise NotIdentified(
                Reason.NOT_IDENTIFIED,
                "the daemon does not know this connection; connect to one of the addresses of `kinetod --listen`",
            )
        if peer.via is Via.KUBERNETES:
            assert self._kubernetes is not None  # else there is no such door
            return await self._kubernetes.caller(peer, auth, pods if action in _PROCESS_ACTIONS else None)
        caller = await (self._remote(peer, auth) if peer.via is Via.TLS else self._local(peer))
        if not caller.roles:
            raise NotPermitted(
                Reason.NO_ROLE,
                f"{caller} has no role on this host; an administrator can give one: access.local_roles, "
                "access.admin_groups and similar keys of kinetod's configuration",
            )
        needs_jobs = action in _PROCESS_ACTIONS and Role.JOBS in caller.roles and not sees_all(caller, action)
        if needs_jobs and caller.uid is not None:
            return replace(caller, jobs=await self._jobs_of(caller.uid))
        return caller

    async def _local(self, peer: Peer) -> Caller:
        assert peer.uid is not None
        rules = local_rules(self._settings.current)
        names = await self._looked_up(peer.uid, rules.groups)
        roles = local_roles(
            rules,
            uid=peer.uid,
            user=names.user,
            gids=peer.gids,
            own_uid=self._own_uid,
            gid_of=names.group_ids.get,
        )
        return Caller(uid=peer.uid, user=names.user, roles=roles, via=peer.via, pid=peer.pid, address=peer.address)

    async def _remote(self, peer: Peer, auth: Auth) -> Caller:
        found = certificate_names(auth)
        certificates: Mapping[str, Grant] = self._settings.current.certificates
        name = next((each for each in found if each in certificates), None)
        if name is None:
            shown = clean(", ".join(found) or "no name", 300)
            raise NotPermitted(
                Reason.UNKNOWN_CERTIFICATE,
                f"the certificate with {shown} is valid but stands for nobody here; an administrator can add it "
                "under access.certificates in kinetod's configuration",
            )
        grant = certificates[name]
        if not grant.user:
            return Caller(
                uid=None, user="", roles=grant.roles, via=peer.via, name=clean(name, 300), address=peer.address
            )
        names = await self._looked_up(grant.user, frozenset())
        if names.uid is None:
            raise NotPermitted(
                Reason.UNKNOWN_CERTIFICATE,
                f"access.certificates maps {clean(name, 300)} to {grant.user}, but this host has no such user",
            )
        return Caller(
            uid=names.uid,
            user=names.user,
            roles=grant.roles,
            via=peer.via,
            name=clean(name, 300),
            address=peer.address,
        )

    async def _looked_up(self, user: int | str, groups: frozenset[str]) -> _Names:
        names = self._names.get(user)
        if names is None or names.until < self._clock() or not groups <= names.group_ids.keys():
            if len(self._names) >= MAX_KEPT:
                self._names.clear()
            until = self._clock() + KEEP_NAMES_S
            names = self._names[user] = await self._once(("names", user, groups), _look_up, user, groups, until)
        return names

    async def _once(self, key: Hashable, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a blocking look-up in a thread, shared by all who ask for the same, so that nobody takes all threads."""
        if (task := self._asking.get(key)) is None:
            task = self._asking[key] = asyncio.create_task(asyncio.to_thread(function, *args, **kwargs))
            task.add_done_callback(lambda _: self._asking.pop(key))
        return cast("T", await asyncio.shield(task))

    async def _jobs_of(self, uid: int) -> frozenset[str]:
        kept = self._jobs.get(uid)
        if kept is None or kept[0] < self._clock():
            if len(self._jobs) >= MAX_KEPT:
                self._jobs.clear()
            found = await self._once(("jobs", uid), jobs_of, uid, self._proc)
            kept = self._jobs[uid] = (self._clock() + KEEP_JOBS_S, found)
        return kept[1]


def local_rules(config: Config) -> LocalRules:
    """The settings about users of this host."""
    return LocalRules(
        everybody=frozenset(config.local_roles),
        admin_users=frozenset(config.admin_users),
        admin_groups=frozenset(config.admin_groups),
        viewer_users=frozenset(config.viewer_users),
        viewer_groups=frozenset(config.viewer_groups),
    )


def _look_up(user: int | str, groups: frozenset[str], until: float) -> _Names:
    """Looks up the user. Blocks: the databases may be on the network."""
    uid, name = (user, str(user)) if isinstance(user, int) else (None, user)
    with contextlib.suppress(KeyError, OSError):
        entry = pwd.getpwuid(user) if isinstance(user, int) else pwd.getpwnam(user)
        uid, name = entry.pw_uid, entry.pw_name
    return _Names(uid, clean(name, 64), {group: _gid(group) for group in groups}, until)


def _gid(group: str) -> int | None:
    with contextlib.suppress(KeyError, OSError):
        return grp.getgrnam(group).gr_gid
    return None
