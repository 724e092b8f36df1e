"""Turns a connection into a Caller: user and group names come from the system, roles from the settings.

Theory of operation
    A web front end calls for the users of its pages. It names the user in gRPC metadata: USER_KEY once, with the name
    of a user of this host, or CERTIFICATE_KEY for each name in the certificate that the user has shown, in the order in
    which they count. Only those in `access.web_proxies` may do that; from others it is refused, not ignored, so that a
    caller who meant to act for somebody else is not answered as itself. The user has the roles that a connection of the
    same user would have, but no more than `access.web_proxy_roles`, and is never root or the daemon's own user.
"""

import asyncio
import contextlib
import grp
import os
import pwd
import re
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from kineto_protos.call_values import CERTIFICATE_KEY, CERTIFICATE_NAME, MAX_NAMES, USER_KEY, USER_NAME

from kinetod.access.peers import Peer, unmapped
from kinetod.access.token_users import KubernetesUsers
from kinetod.base.errors import NotIdentified, NotPermitted, Reason
from kinetod.base.safe_text import clean
from kinetod.config.settings import Config, Settings
from kinetod.permissions.role_grants import Grant, LocalRules, certificate_names, local_roles
from kinetod.permissions.role_policy import PROCESS_ACTIONS, Action, Caller, Role, Via, sees_all
from kinetod.processes.identity import PROC
from kinetod.processes.process_info import jobs_of

KEYS = (USER_KEY, CERTIFICATE_KEY)
_USER_NAME, _CERTIFICATE_NAME = re.compile(USER_NAME), re.compile(CERTIFICATE_NAME)
_DOORS = (Via.UNIX, Via.TLS)  # listeners that identify the front end, not only the user of the host
KEEP_NAMES_S = 60.0
KEEP_JOBS_S = 2.0
MAX_KEPT = 4096
MAX_CERTIFICATE_CHARS = 300  # of a name that is shown
Auth = Mapping[str, Iterable[bytes]]
P = ParamSpec("P")
K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Behalf:
    """The user a call is made for: a user of this host, or the one whom these certificate names stand for."""

    user: str = ""
    certificates: tuple[str, ...] = ()

    @property
    def audited(self) -> dict[str, Any]:
        """The facts for the audit log."""
        return {"asked_user": self.user, "asked_certificate": ", ".join(self.certificates)}


def is_asked(auth: Mapping[str, Iterable[bytes]]) -> bool:
    """Whether a call claims to be made for somebody else."""
    return any(True for key in KEYS for _ in auth.get(key, ()))


def behalf(auth: Mapping[str, Iterable[bytes]]) -> Behalf | None:
    """The user that the call claims to act for. None if that is inconsistent: two users, or an invalid name."""
    users, names = (tuple(value.decode("ascii", "replace") for value in auth.get(key, ())) for key in KEYS)
    if len(users) == 1 and not names and _USER_NAME.fullmatch(users[0]):
        return Behalf(user=users[0])
    if names and not users and len(names) <= MAX_NAMES and all(map(_CERTIFICATE_NAME.fullmatch, names)):
        return Behalf(certificates=names)
    return None


def is_web_proxy(via: Via, name: str, web_proxies: Iterable[str]) -> bool:
    """Whether a caller of this name, a user's or a certificate's, may speak for others."""
    return via in _DOORS and name in web_proxies


def refused(caller: Caller, asked: Behalf | None, why: str) -> NotPermitted:
    """The refusal of a call for somebody else."""
    error = NotPermitted(Reason.NOT_DELEGATED, f"{caller} is not allowed to call on behalf of {_shown(asked)}: {why}")
    error.audited = asked.audited if asked is not None else {}
    return error


def _shown(asked: Behalf | None) -> str:
    if asked is None:
        return "somebody else"
    return asked.user or f"the certificate {clean(', '.join(asked.certificates), 300)}"


@dataclass(frozen=True, slots=True)
class _Names:
    """A user's names from the system's databases, and their expiry. gids: only for a user looked up by name."""

    uid: int | None
    user: str
    gids: frozenset[int]
    group_ids: Mapping[str, int | None]
    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerStatus:
    """Facts about a caller that the connection alone shows. key: identifies the caller for limits."""

    key: str
    who: str
    admin: bool = False
    via: Via | str = ""
    uid: int | None = None
    address: str = ""
    proxy: Caller | None = None


class Callers:
    """Identifies callers. `peer_of` knows the connections (see `connection_proxy`)."""

    def __init__(
        self,
        settings: Settings,
        peer_of: Callable[[str], Peer | None],
        kubernetes: KubernetesUsers | None = None,
        *,
        own_uid: int,
        clock: Callable[[], float] = time.monotonic,
        proc: Path = PROC,
    ) -> None:
        self._settings = settings
        self._peer_of = peer_of
        self._kubernetes = kubernetes
        self._own_uid = own_uid
        self._clock = clock
        self._proc = proc
        self._names: dict[int | str, _Names] = {}
        self._asking: dict[Hashable, asyncio.Task[Any]] = {}
        self._jobs: dict[int, tuple[float, frozenset[str]]] = {}
        settings.subscribe(lambda _config: self._names.clear())

    async def introduce(self, connection: str, auth: Auth) -> str:
        """The user named by a token, found before anything is counted; "" if no token identifies the caller.

        Raises Exhausted, and NotPermitted if the API server cannot be asked.
        """
        peer = self._peer_of(connection)
        if peer is None:
            return ""
        if (asked := behalf(auth)) is not None:
            await self._introduce_page_user(peer, auth, asked)
        if peer.via is not Via.KUBERNETES or self._kubernetes is None:
            return ""
        return await self._kubernetes.introduce(connection, auth)

    def standing(self, connection: str, auth: Auth) -> CallerStatus:
        """Identifies the peer without asking a database; user names are the last known ones."""
        peer = self._peer_of(connection)
        if peer is None:
            return CallerStatus(key="nobody", who="an unidentified connection")
        config = self._settings.current
        if (page_user := self._page_standing(peer, auth)) is not None:
            return page_user
        if peer.uid is not None:
            admin, names = peer.uid in (0, self._own_uid), self._names.get(peer.uid)
            if names is not None:
                admin = Role.ADMIN in self._roles(peer.uid, names, peer.gids)
            who = f"{names.user} (uid {peer.uid})" if names is not None else f"uid {peer.uid}"
            return CallerStatus(key=peer.key, who=who, admin=admin, via=peer.via, uid=peer.uid, address=peer.address)
        if peer.via is Via.KUBERNETES and self._kubernetes is not None and (user := self._kubernetes.known(auth)):
            who = f"the Kubernetes user {user}"
            return CallerStatus(key=f"kubernetes {user}", who=who, via=peer.via, address=peer.address)
        name = next((each for each in certificate_names(auth) if each in config.certificates), None)
        if name is None or peer.via is not Via.TLS:
            return CallerStatus(key=peer.key, who=f"the address {peer.address}", via=peer.via, address=peer.address)
        return CallerStatus(
            key=f"certificate {name}",
            who=f"the certificate {clean(name, MAX_CERTIFICATE_CHARS)}",
            admin=Role.ADMIN in config.certificates[name].roles,
            via=peer.via,
            address=peer.address,
        )

    async def caller(
        self, connection: str, auth: Auth, action: Action | None, pods: frozenset[str] = frozenset()
    ) -> Caller:
        """The caller on the connection with this name in gRPC. pods: those named by the request.

        Raises NotIdentified, NotPermitted.
        """
        peer = self._peer_of(connection)
        if peer is None:
            raise NotIdentified(
                Reason.NOT_IDENTIFIED,
                "the daemon cannot identify this connection; connect to one of the addresses of `kinetod --listen`",
            )
        caller = await self._itself(peer, auth, action, pods)
        if is_asked(auth):
            caller = await self._for_page_user(caller, auth)
        if caller.refusal is not None or peer.via is Via.KUBERNETES:
            return caller
        if not caller.roles:
            raise NotPermitted(
                Reason.NO_ROLE,
                f"{caller} has no role on this host; an administrator can grant one with access.local_roles, "
                "access.admin_groups and similar keys of kinetod's configuration",
            )
        needs_jobs = action in PROCESS_ACTIONS and Role.JOBS in caller.roles and not sees_all(caller, action)
        if needs_jobs and caller.uid is not None:
            return replace(caller, jobs=await self._jobs_of(caller.uid))
        return caller

    async def _itself(self, peer: Peer, auth: Auth, action: Action | None, pods: frozenset[str]) -> Caller:
        """The caller if the peer calls for itself."""
        if peer.via is Via.KUBERNETES:
            assert self._kubernetes is not None  # otherwise there is no such listener
            return await self._kubernetes.caller(peer, auth, pods if action in PROCESS_ACTIONS else None)
        if peer.via is Via.DYNOLOG and peer.uid is None:
            return await self._from_other_host(peer)
        return await (self._remote(peer, auth) if peer.via is Via.TLS else self._local(peer))

    async def _for_page_user(self, proxy: Caller, auth: Auth) -> Caller:
        """The end user that a web proxy calls for, or the caller marked as refused."""
        asked = behalf(auth)
        try:
            if not is_web_proxy(proxy.via, proxy.name or proxy.user, self._settings.current.web_proxies):
                raise refused(proxy, asked, "access.web_proxies does not name this caller")
            if asked is None:
                raise refused(proxy, asked, "the call's metadata does not name exactly one user")
            return await (self._page_user if asked.user else self._page_certificate)(proxy, asked)
        except NotPermitted as exc:
            return replace(proxy, refusal=exc)

    async def _page_user(self, proxy: Caller, asked: Behalf) -> Caller:
        names = await self._looked_up(asked.user)
        uid = self._checked(names.uid, proxy, asked)
        roles = self._roles(uid, names, names.gids)
        return self._through(proxy, Caller(uid=uid, user=names.user, roles=roles, via=proxy.via))

    async def _page_certificate(self, proxy: Caller, asked: Behalf) -> Caller:
        certificates: Mapping[str, Grant] = self._settings.current.certificates
        name = next((each for each in asked.certificates if each in certificates), None)
        if name is None:
            raise refused(proxy, asked, "none of these names is in access.certificates")
        grant, uid, user = certificates[name], None, ""
        if grant.user:
            names = await self._looked_up(grant.user)
            uid, user = self._checked(names.uid, proxy, asked), names.user
        return self._through(proxy, Caller(uid=uid, user=user, roles=grant.roles, via=proxy.via, name=name))

    def _checked(self, uid: int | None, proxy: Caller, asked: Behalf) -> int:
        """The uid of a user who may be called for. Raises NotPermitted."""
        if uid is None or self._is_reserved(uid):
            raise refused(
                proxy, asked, "this host has no such user, or it is root, the daemon's own user or an unmapped user"
            )
        return uid

    def _is_reserved(self, uid: int) -> bool:
        """Whether nobody may act for this user."""
        return uid in (0, self._own_uid, unmapped())

    def _roles(self, uid: int, names: _Names, gids: frozenset[int]) -> frozenset[Role]:
        rules, gid_of = local_rules(self._settings.current), names.group_ids.get
        return local_roles(rules, uid=uid, user=names.user, gids=gids, own_uid=self._own_uid, gid_of=gid_of)

    def _through(self, proxy: Caller, caller: Caller) -> Caller:
        """The caller with the roles that users may have through a web front end."""
        most = frozenset(self._settings.current.web_proxy_roles)
        return replace(caller, roles=caller.roles & most, address=proxy.address, proxy=proxy)

    async def _introduce_page_user(self, peer: Peer, auth: Auth, asked: Behalf) -> None:
        """Looks up what `_page_standing` needs."""
        if peer.uid is not None:
            await self._looked_up(peer.uid)
        if asked.user and self._proxy_standing(peer, auth) is not None:
            await self._looked_up(asked.user)

    def _proxy_standing(self, peer: Peer, auth: Auth) -> Caller | None:
        """The web front end on a connection, as far as known without asking a database; None for others."""
        web_proxies = self._settings.current.web_proxies
        if peer.uid is not None:
            names = self._names.get(peer.uid)
            user, name = (names.user if names is not None else ""), ""
        else:
            user, name = "", self._known_name(auth) or ""
        if not is_web_proxy(peer.via, name or user, web_proxies):
            return None
        return Caller(uid=peer.uid, user=user, roles=frozenset(), via=peer.via, pid=peer.pid, name=name)

    def _page_standing(self, peer: Peer, auth: Auth) -> CallerStatus | None:
        """The end user that a web proxy calls for, who is charged for the call; None for all other calls."""
        if (asked := behalf(auth)) is None or (proxy := self._proxy_standing(peer, auth)) is None:
            return None
        certificates = self._settings.current.certificates
        name = next((each for each in asked.certificates if each in certificates), None)
        if name is not None:
            key, who, uid = f"certificate {name}", f"the certificate {clean(name, MAX_CERTIFICATE_CHARS)}", None
        else:
            names = self._names.get(asked.user)
            if names is None or names.uid is None:
                return None
            key, who, uid = f"uid {names.uid}", f"{names.user} (uid {names.uid})", names.uid
        return CallerStatus(key=key, who=who, via=peer.via, uid=uid, address=peer.address, proxy=proxy)

    def _known_name(self, auth: Auth) -> str | None:
        """The first name of a certificate that stands for somebody, or for a web front end."""
        config = self._settings.current
        stands = (each for each in certificate_names(auth) if each in config.certificates or each in config.web_proxies)
        return next(stands, "")

    async def _local(self, peer: Peer) -> Caller:
        assert peer.uid is not None
        names = await self._looked_up(peer.uid)
        roles = self._roles(peer.uid, names, peer.gids)
        return Caller(uid=peer.uid, user=names.user, roles=roles, via=peer.via, pid=peer.pid, address=peer.address)

    async def _from_other_host(self, peer: Peer) -> Caller:
        """The user that unauthenticated Dynolog clients on other hosts act as. Raises NotPermitted."""
        user = self._settings.current.dynolog_remote_user
        if not user:
            raise NotPermitted(
                Reason.NOT_IDENTIFIED,
                f"the client at {peer.address} cannot be identified, because Dynolog's protocol has no "
                "authentication; send the request on the host itself, use kinetoctl with a certificate, or ask an "
                "administrator to set dynolog.remote_user",
            )
        names = await self._looked_up(user)
        if names.uid is None or self._is_reserved(names.uid):
            raise NotPermitted(
                Reason.NOT_IDENTIFIED,
                f"dynolog.remote_user is {user!r:.80}, which is not a user of this host, or is root or the daemon's "
                "own user; set it to another user",
            )
        roles = self._roles(names.uid, names, names.gids)
        return Caller(uid=names.uid, user=names.user, roles=roles, via=peer.via, address=peer.address)

    async def _remote(self, peer: Peer, auth: Auth) -> Caller:
        certificates: Mapping[str, Grant] = self._settings.current.certificates
        name = self._known_name(auth)
        if not name:
            shown = clean(", ".join(certificate_names(auth)) or "no name", MAX_CERTIFICATE_CHARS)
            raise NotPermitted(
                Reason.UNKNOWN_CERTIFICATE,
                f"the certificate with {shown} is valid, but is not mapped to any user or role here; an administrator "
                "can add it under access.certificates in kinetod's configuration",
            )
        grant, uid, user = certificates.get(name, Grant(roles=frozenset())), None, ""
        shown = clean(name, MAX_CERTIFICATE_CHARS)
        if grant.user:
            names = await self._looked_up(grant.user)
            if names.uid is None:
                raise NotPermitted(
                    Reason.UNKNOWN_CERTIFICATE,
                    f"access.certificates maps {shown} to {grant.user}, but this host has no such user",
                )
            uid, user = names.uid, names.user
        return Caller(uid=uid, user=user, roles=grant.roles, via=peer.via, name=shown, address=peer.address)

    async def _looked_up(self, user: int | str) -> _Names:
        names, groups = self._names.get(user), local_rules(self._settings.current).groups
        if names is None or names.until < self._clock() or not groups <= names.group_ids.keys():
            until = self._clock() + KEEP_NAMES_S
            names = await self._once(("names", user, groups), _look_up, user, groups, until)
            _keep(self._names, user, names)
        return names

    async def _once(self, key: Hashable, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a blocking look-up in a thread, shared by all callers with the same key, so that nobody uses up the
        threads.
        """
        if (task := self._asking.get(key)) is None:
            task = self._asking[key] = asyncio.create_task(asyncio.to_thread(function, *args, **kwargs))
            task.add_done_callback(lambda _: self._asking.pop(key))
        return cast("T", await asyncio.shield(task))

    async def _jobs_of(self, uid: int) -> frozenset[str]:
        kept = self._jobs.get(uid)
        if kept is None or kept[0] < self._clock():
            found = await self._once(("jobs", uid), jobs_of, uid, self._proc)
            kept = (self._clock() + KEEP_JOBS_S, found)
            _keep(self._jobs, uid, kept)
        return kept[1]


def _keep(known: dict[K, T], key: K, value: T) -> None:
    if len(known) >= MAX_KEPT:
        known.clear()
    known[key] = value


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
    gids = frozenset[int]()
    with contextlib.suppress(KeyError, OSError):
        entry = pwd.getpwuid(user) if isinstance(user, int) else pwd.getpwnam(user)
        uid, name = entry.pw_uid, entry.pw_name
        if isinstance(user, str):
            gids = frozenset(os.getgrouplist(name, entry.pw_gid))
    return _Names(uid, clean(name, 64), gids, {group: _gid(group) for group in groups}, until)


def _gid(group: str) -> int | None:
    with contextlib.suppress(KeyError, OSError):
        return grp.getgrnam(group).gr_gid
    return None
