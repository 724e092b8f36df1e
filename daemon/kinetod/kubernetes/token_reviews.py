"""Finds a token's user and their permissions through the API server's TokenReview and SubjectAccessReview.

Answers of the API server, yes or no, are kept for KEEP_S. Only a hash of each token is kept.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import msgspec

from kinetod.base.fair_slots import fair_share_key
from kinetod.base.safe_text import clean
from kinetod.kubernetes.api_server import ApiServer

MAX_KEPT = 10_000
_TOKENS = "/apis/authentication.k8s.io/v1/tokenreviews"
_ACCESS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
KEEP_S = 5.0
LEAST_S = 0.5  # between two queries, even if a requested pod does not exist
_METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_MAX_CHARS = 253


@dataclass(frozen=True, slots=True)
class User:
    """A user as known to the API server; extra in its JSON form."""

    name: str
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: str = "{}"


class _UserInfo(msgspec.Struct, frozen=True):
    username: str = ""
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: dict[str, tuple[str, ...]] = {}


class _TokenStatus(msgspec.Struct, frozen=True):
    authenticated: bool = False
    user: _UserInfo = _UserInfo()
    audiences: tuple[str, ...] = ()


class _TokenReview(msgspec.Struct, frozen=True):
    status: _TokenStatus = _TokenStatus()


class _AccessStatus(msgspec.Struct, frozen=True):
    allowed: bool = False
    denied: bool = False


class _AccessReview(msgspec.Struct, frozen=True):
    status: _AccessStatus = _AccessStatus()


class Reviews:
    """Queries the API server and caches the answers briefly."""

    def __init__(self, api: ApiServer, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._clock = clock
        self._kept: dict[Hashable, tuple[float, Any]] = {}

    def known_user(self, token: str, audiences: Sequence[str] = ()) -> User | None:
        """The remembered user of a token; None if there is none."""
        kept = self._known(_key(token, audiences))
        return kept[0] if kept is not None else None

    async def user(self, token: str, audiences: Sequence[str] = ()) -> User | None:
        """The user of a token; None if it is invalid or not for these audiences. Raises ApiError."""
        key = _key(token, audiences)
        if (kept := self._known(key)) is not None:
            return kept[0]  # type: ignore[no-any-return]  # what was put in below
        spec = {"token": token, **({"audiences": list(audiences)} if audiences else {})}
        review = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec}
        said = (await self._api.create(_TOKENS, review, _TokenReview)).status
        meant = not audiences or bool(set(audiences) & set(said.audiences))
        user = None
        if said.authenticated and said.user.username and meant:
            extra = msgspec.json.encode(said.user.extra, order="deterministic").decode()
            user = User(said.user.username, said.user.uid, said.user.groups, extra)
        self._keep(key, user)
        return user

    async def may_exec(self, user: User, namespace: str, pod: str) -> bool:
        """Whether the user may create pods/exec on this pod. Raises ApiError."""
        key = (user, namespace, pod)
        if (kept := self._known(key)) is not None:
            return bool(kept[0])
        attributes = {"namespace": namespace, "verb": "create", "version": "v1", "resource": "pods"}
        spec = {
            "resourceAttributes": {**attributes, "subresource": "exec", "name": pod},
            "user": user.name,
            "groups": list(user.groups),
            "uid": user.uid,
            "extra": msgspec.json.decode(user.extra),
        }
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
        said = (await self._api.create(_ACCESS, review, _AccessReview)).status
        allowed = said.allowed and not said.denied
        self._keep(key, allowed)
        return allowed

    def _known(self, key: Hashable) -> tuple[Any] | None:
        until, answer = self._kept.get(key, (float("-inf"), None))
        return (answer,) if self._clock() < until else None

    def _keep(self, key: Hashable, answer: Any) -> None:
        if len(self._kept) >= MAX_KEPT:
            self._kept.clear()
        self._kept[key] = (self._clock() + KEEP_S, answer)


def _key(token: str, audiences: Sequence[str]) -> Hashable:
    return (hashlib.sha256(token.encode()).digest(), tuple(audiences))


# The pods of this node according to the API server: namespace and name by UID. Only metadata is requested, and from the
# API server's cache: a UID never gets another name.
class _Metadata(msgspec.Struct, frozen=True):
    uid: str
    namespace: str
    name: str


class _Pod(msgspec.Struct, frozen=True):
    metadata: _Metadata


class _Pods(msgspec.Struct, frozen=True):
    items: tuple[_Pod, ...] = ()


Pods = Mapping[str, tuple[str, str]]


class NodePods:
    """Queries the pods of one node."""

    def __init__(self, api: ApiServer, node: str, clock: Callable[[], float] = time.monotonic) -> None:
        selector = quote(f"spec.nodeName={node}", safe="")
        self._path = f"/api/v1/pods?fieldSelector={selector}&resourceVersion=0"
        self._api = api
        self._clock = clock
        self._asking = asyncio.Lock()
        self._asked = float("-inf")
        self._pods: Pods = {}

    async def current(self, wanted: Iterable[str] = ()) -> Pods:
        """(namespace, name) by UID, at most KEEP_S old; asks again if a wanted one is unknown. Raises ApiError."""
        async with self._asking:
            age = self._clock() - self._asked
            if age >= KEEP_S or (age >= LEAST_S and not self._pods.keys() >= set(wanted)):
                found = await self._ask()
                self._pods = {
                    each.metadata.uid: (
                        clean(each.metadata.namespace, _MAX_CHARS),
                        clean(each.metadata.name, _MAX_CHARS),
                    )
                    for each in found.items
                }
                self._asked = self._clock()
            return self._pods

    async def _ask(self) -> _Pods:
        """Sends one query for all waiting callers, so it uses nobody's turn."""
        whose = fair_share_key.set("")
        try:
            return await self._api.get(self._path, _Pods, accept=_METADATA_ONLY)
        finally:
            fair_share_key.reset(whose)
