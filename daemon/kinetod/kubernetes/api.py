"""The API server, asked with the account that Kubernetes gives to this pod.

Theory of operation
    Few calls a minute: HTTP/1.1 over connections that are kept, each call in a thread of its own with a deadline. The
    account is a folder with `token` and `ca.crt`, which the kubelet renews: the token is read for each call, the
    authority for each connection. Answers are of the API server, whose certificate is checked, and are bounded all the
    same.
"""

import asyncio
import http.client
import ssl
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from kinetod.text import clean

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
HOST_VARIABLE, PORT_VARIABLE = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
DEADLINE_S = 3.0
MAX_ANSWER_BYTES = 32 << 20
THREADS = 8
_REFUSED = (401, 403)
T = TypeVar("T")


class ApiError(Exception):
    """The API server did not answer, or refuses us. The text says why, and what to do."""


class ApiServer:
    """Asks the API server at `address`. Thread-safe; `close` at the end."""

    def __init__(self, address: tuple[str, int], account: Path = ACCOUNT, *, deadline_s: float = DEADLINE_S) -> None:
        self._address = address
        self._account = account
        self._deadline_s = deadline_s
        self._threads = ThreadPoolExecutor(THREADS, "kubernetes")
        self._idle: list[http.client.HTTPSConnection] = []
        self._closed = False

    def close(self) -> None:
        """Blocking: waits for calls under way, which end within the deadline."""
        self._closed = True
        self._threads.shutdown(cancel_futures=True)
        while self._idle:
            self._idle.pop().close()

    async def get(self, path: str, answer: type[T], *, accept: str = "application/json") -> T:
        """What lies there. Raises ApiError."""
        return await self._ask("GET", path, None, answer, {"Accept": accept})

    async def create(self, path: str, resource: Mapping[str, object], answer: type[T]) -> T:
        """The resource as the API server has completed it. Raises ApiError."""
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        return await self._ask("POST", path, msgspec.json.encode(resource), answer, headers)

    async def _ask(self, method: str, path: str, body: bytes | None, answer: type[T], headers: dict[str, str]) -> T:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._deadline_s):
                status, said = await loop.run_in_executor(self._threads, self._call, method, path, body, headers)
        except TimeoutError as exc:
            raise ApiError(f"{self} does not answer within {self._deadline_s:g} s") from exc
        except (OSError, http.client.HTTPException) as exc:
            raise ApiError(f"{self} cannot be asked: {clean(str(exc) or type(exc).__name__, 300)}") from exc
        what = path.partition("?")[0].rpartition("/")[2]
        if status in _REFUSED:
            raise ApiError(f"{self} refuses kinetod's account for {what} (HTTP {status}); is its ClusterRole bound?")
        if status not in (200, 201):
            raise ApiError(
                f"{self} answers HTTP {status} to {what}: {clean(said[:300].decode('utf-8', 'replace'), 300)}"
            )
        try:
            return msgspec.json.decode(said, type=answer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise ApiError(f"{self} answers something else than {what}: {exc}") from exc

    def _call(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        """Blocking. A kept connection may have been closed meanwhile: then a new one is made. Raises OSError."""
        headers["Authorization"] = f"Bearer {(self._account / 'token').read_text(encoding='ascii').strip()}"
        while self._idle:
            connection = self._idle.pop()
            try:
                return self._exchange(connection, method, path, body, headers)
            except TimeoutError:
                raise
            except (OSError, http.client.HTTPException):
                continue
        context = ssl.create_default_context(cafile=str(self._account / "ca.crt"))
        host, port = self._address
        new = http.client.HTTPSConnection(host, port, timeout=self._deadline_s, context=context)
        return self._exchange(new, method, path, body, headers)

    def _exchange(
        self,
        connection: http.client.HTTPSConnection,
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
    ) -> tuple[int, bytes]:
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            said = response.read(MAX_ANSWER_BYTES + 1)
            if len(said) > MAX_ANSWER_BYTES:
                raise http.client.HTTPException(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
        except BaseException:
            connection.close()
            raise
        if self._closed:
            connection.close()
        else:
            self._idle.append(connection)
        return response.status, said

    def __str__(self) -> str:
        host, port = self._address
        return f"the API server ({host}:{port})"


def address_in(environ: Mapping[str, str]) -> tuple[str, int]:
    """Where Kubernetes says to a pod that it is. Raises ValueError."""
    host, port = environ.get(HOST_VARIABLE, ""), environ.get(PORT_VARIABLE, "")
    if not host or not (port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ValueError(f"{HOST_VARIABLE} and {PORT_VARIABLE} do not say where the API server is: is this a pod?")
    return host, int(port)
