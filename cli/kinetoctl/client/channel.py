"""Connections to daemons: Unix sockets and loopback without TLS, anything else with TLS.

The daemon identifies the caller by the socket or by the client's certificate, or, on Kubernetes, by a token that goes
with each call: to addresses that were passed to `show_token`, and, if KINETO_TOKEN_FILE is set, to all addresses except
Unix sockets. `socket_folder` checks the owner of a Unix socket before every call, because a daemon may have restarted.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc
from kineto_protos import endpoints

from kinetoctl import errors
from kinetoctl.client.network_errors import CA, CERTIFICATE, explanation
from kinetoctl.client.socket_folder import SocketFolder

C = TypeVar("C")

Options = Sequence[tuple[str, int | str]]
Token = Callable[[], str]
_UNIX = "unix:"
_SCHEMES = ("dns:///", "ipv4:", "ipv6:")
_tokens: dict[str, Token] = {}


class DaemonConnection(Generic[C]):
    """The connection to a daemon: a channel and, for a Unix socket, the folder of the socket.

    A Unix socket is checked at the first call; other channels are opened at once. Thread-safe.
    """

    def __init__(self, address: str, open_one: Callable[[str, str], C]) -> None:
        """open_one: opens a channel, given the address and the target that gRPC connects to. Raises UsageProblem."""
        self.address = address
        self._open_one = open_one
        self._lock = threading.Lock()
        self.channels: list[C] = []  # the last one is in use; calls may still be running on earlier ones
        self._folders: list[SocketFolder] = []
        if not address.startswith(_UNIX):
            self.channels.append(open_one(address, address))

    def channel(self) -> C:
        """The channel for the next call. Raises UntrustedSocket, Unreachable, Denied."""
        if not self.address.startswith(_UNIX):
            return self.channels[-1]
        with self._lock:
            if not self._folders or not self._folders[-1].is_there():
                try:
                    folder = SocketFolder(self.address.removeprefix(_UNIX))
                except OSError as exc:
                    raise unreachable(self.address, exc.strerror or str(exc)) from exc
                self._folders.append(folder)
                self.channels.append(self._open_one(self.address, folder.address))
            return self.channels[-1]

    def close_folders(self) -> None:
        """Closes the folders; the channels are closed by whoever made them."""
        for folder in self._folders:
            folder.close()


class StubCalls:
    """The methods of a stub, each called on the current channel. Raises what `DaemonConnection.channel` raises.

    metadata: goes with each call.
    """

    def __init__(
        self,
        connection: "DaemonConnection[Any]",
        make_stub: Callable[[Any], Any],
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        self._metadata = tuple(metadata) or None
        self._connection = connection
        self._make_stub = make_stub
        self._last: tuple[Any, Any] = (None, None)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda request, timeout: getattr(self._stub(), name)(request, timeout=timeout, metadata=self._metadata)

    def _stub(self) -> Any:
        channel = self._connection.channel()
        if self._last[0] is not channel:
            self._last = channel, self._make_stub(channel)
        return self._last[1]


def unreachable(address: str, details: str) -> errors.CliError:
    """The error for an address where nothing answers, as precise as the file system allows."""
    if address.startswith(_UNIX):
        path = Path("/" + address[5:].lstrip("/")) if address.startswith("unix:/") else Path(address[5:])
        try:
            if not path.exists():
                return errors.Unreachable(f"no daemon at {address}: there is no such socket")
        except PermissionError:
            return errors.Denied(f"no access to the daemon at {address}: you cannot read {path.parent}")
        if not os.access(path, os.W_OK):
            return errors.Denied(f"no access to the daemon at {address}: you cannot write to the socket")
        return errors.Unreachable(f"no daemon at {address}: the socket exists, but nothing answers ({details})")
    tls = bool(os.environ.get(CA)) or not _is_loopback(address)
    return errors.Unreachable(f"no daemon at {address}: {explanation(details, tls=tls)}")


def show_token(address: str, token: Token) -> None:
    """Makes channels that are opened to this address later send a bearer token, which is fetched for each call."""
    _tokens[address] = token


def open_connection(
    address: str, options: Options, environ: Mapping[str, str] = os.environ
) -> DaemonConnection[grpc.Channel]:
    """The way to the daemon at this address, which is not connected yet. Raises UsageProblem."""

    def open_one(address: str, target: str) -> grpc.Channel:
        more, credentials = _security(address, options, environ)
        if credentials is None:
            return grpc.insecure_channel(target, options=more)
        return grpc.secure_channel(target, credentials, options=more)

    return DaemonConnection(address, open_one)


def open_async_connection(
    address: str, options: Options, environ: Mapping[str, str] = os.environ
) -> DaemonConnection[grpc.aio.Channel]:
    """Like open_connection, for the running event loop. Raises UsageProblem."""

    def open_one(address: str, target: str) -> grpc.aio.Channel:
        more, credentials = _security(address, options, environ)
        if credentials is None:
            return grpc.aio.insecure_channel(target, options=more)
        return grpc.aio.secure_channel(target, credentials, options=more)

    return DaemonConnection(address, open_one)


def _security(
    address: str, options: Options, environ: Mapping[str, str]
) -> tuple[Options, grpc.ChannelCredentials | None]:
    """The channel options and credentials that this address needs. Raises UsageProblem."""
    files = {name: environ.get(name, "") for name in endpoints.TLS_VARIABLES}
    token = _token(address, environ)
    if address.startswith(_UNIX):
        return options, _with_token(grpc.local_channel_credentials(grpc.LocalConnectionType.UDS), token)
    if not any(files.values()) and _is_loopback(address):
        return options, _with_token(grpc.local_channel_credentials(grpc.LocalConnectionType.LOCAL_TCP), token)
    if token is not None and files[CA] and not files[CERTIFICATE]:
        return _named(options, environ), _with_token(grpc.ssl_channel_credentials(_content(CA, files[CA])), token)
    if missing := [name for name, path in files.items() if not path]:
        raise errors.UsageProblem(
            f"a connection to {address} requires certificates: set {', '.join(missing)} to PEM files, "
            "or forward the daemon's Unix socket with ssh -L"
        )
    authority, certificate, key = (_content(name, path) for name, path in files.items())
    return _named(options, environ), grpc.ssl_channel_credentials(authority, key, certificate)


def _named(options: Options, environ: Mapping[str, str]) -> Options:
    """The options, with the name in the server's certificate if it differs from the address."""
    server_name = environ.get(endpoints.TLS_NAME_VARIABLE)
    return (*options, ("grpc.ssl_target_name_override", server_name)) if server_name else options


def _token(address: str, environ: Mapping[str, str]) -> Token | None:
    path = "" if address.startswith(_UNIX) else environ.get(endpoints.TOKEN_VARIABLE, "")
    return _tokens.get(address) or (
        (lambda: _content(endpoints.TOKEN_VARIABLE, path).decode().strip()) if path else None
    )


class _Bearer(grpc.AuthMetadataPlugin):
    """Sends a token with each call. gRPC allows that on secure and on local connections only."""

    def __init__(self, token: Token) -> None:
        self._token = token

    def __call__(self, _context: grpc.AuthMetadataContext, answer: grpc.AuthMetadataPluginCallback) -> None:
        try:
            metadata = (("authorization", f"Bearer {self._token()}"),)
        except errors.CliError as exc:
            answer((), exc)
        else:
            answer(metadata, None)


def _with_token(channel: grpc.ChannelCredentials, token: Token | None) -> grpc.ChannelCredentials | None:
    """The credentials with the token, or None if there is no token and none are needed."""
    if token is None:
        return None
    return grpc.composite_channel_credentials(channel, grpc.metadata_call_credentials(_Bearer(token)))


def _content(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as exc:
        raise errors.UsageProblem(f"{name}: {path} cannot be read: {exc.strerror}") from exc


def _is_loopback(address: str) -> bool:
    for scheme in _SCHEMES:
        address = address.removeprefix(scheme)
    host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    return endpoints.is_loopback(host)
