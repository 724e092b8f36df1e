"""Asks the API server, with the account that Kubernetes gives to this pod: also for a token's user and permissions.

Theory of operation
    There are few calls per minute: HTTP/1.1 over persistent connections, each call in a thread of its own with a
    deadline. Users take turns at the threads, so a user with very many pods to review does not delay others. A socket's
    timeout covers only its next byte; so at the deadline, and on `close`, the connection is shut down, which frees the
    thread that reads it. The account is a folder with `token` and `ca.crt`, which the kubelet renews: the token is read
    for each call, the authority for each connection. Answers come from the API server, whose certificate is checked,
    but are limited in size nevertheless.

    A token's user is found by a TokenReview, permissions by a SubjectAccessReview. These answers, yes or no, are kept
    for KEEP_S. Only a hash of each token is kept.
"""

import asyncio
import contextlib
import hashlib
import http.client
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from kinetod.base.fair_slots import FairSlots, fair_share_key
from kinetod.base.safe_text import clean

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
HOST_VARIABLE, PORT_VARIABLE = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
DEADLINE_S = 3.0
MAX_ANSWER_BYTES = 32 << 20
THREADS = 8
SPARE_THREADS = 2  # for users without a request in progress
_REFUSED = (401, 403)
T = TypeVar("T")
MAX_KEPT = 10_000
_TOKENS = "/apis/authentication.k8s.io/v1/tokenreviews"
_ACCESS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
KEEP_S = 5.0
LEAST_S = 0.5  # between two queries, even if a requested pod does not exist
_METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_MAX_CHARS = 253


class ApiError(Exception):
    """The API server did not answer or refused the request. The message says why and what to do."""


class Exchange:
    """One call, which other threads can abort."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._over = False

    @contextlib.contextmanager
    def over(self, sock: socket.socket) -> Iterator[None]:
        """Sets the connection of the call. Raises TimeoutError if the call has been aborted."""
        with socket.socket(fileno=os.dup(sock.fileno())) as own:  # nobody else can close this number
            try:
                self._use(own)
                yield
            finally:
                self._use(None)

    def _use(self, sock: socket.socket | None) -> None:
        with self._lock:
            self._sock = sock
            if self._over:
                raise TimeoutError("the call was abandoned")

    def give_up(self) -> None:
        """Aborts the call; a blocked reader or writer returns at once."""
        with self._lock:
            self._over = True
            if self._sock is not None:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)


class ApiServer:
    """Client of the API server at `address`. Thread-safe; call `close` at the end."""

    def __init__(self, address: tuple[str, int], account: Path = ACCOUNT, *, deadline_s: float = DEADLINE_S) -> None:
        self._address = address
        self._account = account
        self._deadline_s = deadline_s
        self._threads = ThreadPoolExecutor(THREADS, "kubernetes")
        self._turns = FairSlots(THREADS - SPARE_THREADS, spare=SPARE_THREADS)
        self._idle: list[http.client.HTTPSConnection] = []
        self._under_way: set[Exchange] = set()
        self._closed = False

    def close(self) -> None:
        """Aborts calls in progress. Blocks; a call that is connecting may take the deadline, and again for TLS."""
        self._closed = True
        for exchange in tuple(self._under_way):
            exchange.give_up()
        self._threads.shutdown(cancel_futures=True)
        while self._idle:
            self._idle.pop().close()

    async def get(self, path: str, answer: type[T], *, accept: str = "application/json") -> T:
        """Reads a resource. Raises ApiError."""
        return await self._ask("GET", path, None, answer, {"Accept": accept})

    async def create(self, path: str, resource: Mapping[str, object], answer: type[T]) -> T:
        """Creates a resource and returns it as completed by the API server. Raises ApiError."""
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        return await self._ask("POST", path, msgspec.json.encode(resource), answer, headers)

    async def _ask(self, method: str, path: str, body: bytes | None, answer: type[T], headers: dict[str, str]) -> T:
        loop = asyncio.get_running_loop()
        exchange = Exchange()
        self._under_way.add(exchange)
        try:
            async with asyncio.timeout(self._deadline_s):
                async with self._turns.turn():
                    status, said = await loop.run_in_executor(
                        self._threads, self._call, exchange, method, path, body, headers
                    )
        except (OSError, http.client.HTTPException) as exc:
            if self._closed:
                raise ApiError(f"{self} is no longer queried because kinetod is stopping") from exc
            if isinstance(exc, TimeoutError):
                raise ApiError(f"{self} did not answer within {self._deadline_s:g} s") from exc
            raise ApiError(f"{self} cannot be reached: {clean(str(exc) or type(exc).__name__, 300)}") from exc
        finally:
            self._under_way.discard(exchange)
            exchange.give_up()
        what = path.partition("?")[0].rpartition("/")[2]
        if status in _REFUSED:
            raise ApiError(
                f"{self} denied kinetod's account access to {what} (HTTP {status}); is its ClusterRole bound?"
            )
        if status not in (200, 201):
            raise ApiError(
                f"{self} answered HTTP {status} to {what}: {clean(said[:300].decode('utf-8', 'replace'), 300)}"
            )
        try:
            return msgspec.json.decode(said, type=answer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise ApiError(f"{self} sent an invalid answer to {what}: {exc}") from exc

    def _call(
        self, exchange: Exchange, method: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        """Makes a call; opens a new connection if the kept one was closed. Blocks. Raises OSError."""
        headers["Authorization"] = f"Bearer {(self._account / 'token').read_text(encoding='ascii').strip()}"
        while self._idle:
            connection = self._idle.pop()
            try:
                return self._answer(exchange, connection, method, path, body, headers)
            except TimeoutError:
                raise
            except (OSError, http.client.HTTPException):
                continue
        context = ssl.create_default_context(cafile=str(self._account / "ca.crt"))
        host, port = self._address
        new = http.client.HTTPSConnection(host, port, timeout=self._deadline_s, context=context)
        new.connect()
        return self._answer(exchange, new, method, path, body, headers)

    def _answer(
        self,
        exchange: Exchange,
        connection: http.client.HTTPSConnection,
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
    ) -> tuple[int, bytes]:
        """Reads the answer; keeps the connection if it succeeds."""
        with contextlib.ExitStack() as stack:
            stack.callback(connection.close)
            with exchange.over(connection.sock):
                connection.request(method, path, body, headers)
                response = connection.getresponse()
                said = response.read(MAX_ANSWER_BYTES + 1)
            if len(said) > MAX_ANSWER_BYTES:
                raise http.client.HTTPException(f"its answer has more than {MAX_ANSWER_BYTES} bytes")
            if not self._closed and connection.sock is not None:  # otherwise the server has asked to close it
                stack.pop_all()
                self._idle.append(connection)
        return response.status, said

    def __str__(self) -> str:
        host, port = self._address
        return f"the API server ({host}:{port})"


def address_in(environ: Mapping[str, str]) -> tuple[str, int]:
    """The address that Kubernetes gives to a pod. Raises ValueError."""
    host, port = environ.get(HOST_VARIABLE, ""), environ.get(PORT_VARIABLE, "")
    if not host or not (port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ValueError(
            f"{HOST_VARIABLE} and {PORT_VARIABLE} do not give the address of the API server: is this a pod?"
        )
    return host, int(port)


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
