"""Asks the API server, with the account that Kubernetes gives to this pod.

Theory of operation
    There are few calls per minute: HTTP/1.1 over persistent connections, each call in a thread of its own with a
    deadline. Users take turns at the threads, so a user with very many pods to review does not delay others. A socket's
    timeout covers only its next byte; so at the deadline, and on `close`, the connection is shut down, which frees the
    thread that reads it. The account is a folder with `token` and `ca.crt`, which the kubelet renews: the token is read
    for each call, the authority for each connection. Answers come from the API server, whose certificate is checked,
    but are limited in size nevertheless.
"""

import asyncio
import contextlib
import http.client
import os
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from kinetod.base.fair_slots import FairSlots
from kinetod.base.safe_text import clean

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
HOST_VARIABLE, PORT_VARIABLE = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
DEADLINE_S = 3.0
MAX_ANSWER_BYTES = 32 << 20
THREADS = 8
SPARE_THREADS = 2  # for users without a request in progress
_REFUSED = (401, 403)
T = TypeVar("T")


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
                raise TimeoutError("it was given up")

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
                raise ApiError(f"{self} is no longer asked because kinetod is stopping") from exc
            if isinstance(exc, TimeoutError):
                raise ApiError(f"{self} did not answer within {self._deadline_s:g} s") from exc
            raise ApiError(f"{self} cannot be reached: {clean(str(exc) or type(exc).__name__, 300)}") from exc
        finally:
            self._under_way.discard(exchange)
            exchange.give_up()
        what = path.partition("?")[0].rpartition("/")[2]
        if status in _REFUSED:
            raise ApiError(f"{self} refuses kinetod's account for {what} (HTTP {status}); is its ClusterRole bound?")
        if status not in (200, 201):
            raise ApiError(
                f"{self} answered HTTP {status} to {what}: {clean(said[:300].decode('utf-8', 'replace'), 300)}"
            )
        try:
            return msgspec.json.decode(said, type=answer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise ApiError(f"{self} did not answer with valid {what}: {exc}") from exc

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
                raise http.client.HTTPException(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
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
        raise ValueError(f"{HOST_VARIABLE} and {PORT_VARIABLE} do not say where the API server is: is this a pod?")
    return host, int(port)
