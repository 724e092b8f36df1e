"""Connections to daemons: Unix sockets and loopback without TLS, anything else with TLS.

The daemon identifies the caller by the socket or by the client's certificate, or, on Kubernetes, by a token that goes
with each call: to addresses that were passed to `show_token`, and, if KINETO_TOKEN_FILE is set, to all addresses except
Unix sockets. The owner of a Unix socket is checked before every call, because a daemon may have restarted.
"""

import contextlib
import os
import pwd
import re
import socket
import stat
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import grpc
from kineto_protos import endpoints, unix_peer
from kineto_protos.endpoints import SYSTEM_PARENT, vouched_for

from kinetoctl import errors
from kinetoctl.errors import UntrustedSocket

C = TypeVar("C")

Options = Sequence[tuple[str, int | str]]
Token = Callable[[], str]
_UNIX = "unix:"
_SCHEMES = ("dns:///", "ipv4:", "ipv6:")
_tokens: dict[str, Token] = {}
CA, CERTIFICATE, KEY = endpoints.TLS_VARIABLES
_START = "start kinetod there, or check the host and port"
_CONNECT_LIMIT_S = 1.0  # of a daemon whose queue is full
_ROOT = 0


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


class _Problem(NamedTuple):
    """A pattern in gRPC's text, what it means, and what to do."""

    pattern: str
    meaning: str
    remedy: str


# In this order: a text can have several. "Socket closed" comes last, since it has many causes.
_PROBLEMS = (
    _Problem(
        r"resolving|DNS resolution|Domain name not found|name or service not known",
        "unknown host name",
        "check the name",
    ),
    _Problem(r"Connection refused", "nothing is listening there (connection refused)", _START),
    _Problem(r"No route to host|unreachable", "there is no route to this host", "check the network and the name"),
    _Problem(
        r"Hostname Verification",
        "the server's certificate is for another name",
        "use the name in the certificate",
    ),
    _Problem(
        r"CERTIFICATE_VERIFY_FAILED",
        f"the server's certificate is not signed by an authority in {CA}",
        f"set {CA} to the certificate file of the authority that signed it",
    ),
    _Problem(
        r"WRONG_VERSION_NUMBER|PACKET_LENGTH_TOO_LONG",
        "the server does not speak TLS, but certificates are configured here",
        f"unset {CA}, {CERTIFICATE} and {KEY}, or use kinetod's TLS port",
    ),
    _Problem(
        r"http1\.x server|Failed parsing HTTP/2",
        "a server other than kinetod answers there",
        "check the port",
    ),
    _Problem(r"timed? ?out|Timeout|Deadline", "it did not answer", "check the host, the port and firewalls"),
)
_CLOSED = r"Socket closed|Connection reset|Broken pipe|EOF|GOAWAY"


def explanation(details: str, *, tls: bool) -> str:
    """gRPC's text in plain words. tls: whether certificates were used. A text that is not known stays as it is."""
    for problem in _PROBLEMS:
        if re.search(problem.pattern, details, re.IGNORECASE):
            return f"{problem.meaning}; {problem.remedy}"
    if re.search(_CLOSED, details, re.IGNORECASE):
        if tls:
            return f"it closed the connection; it might not accept the certificate in {CERTIFICATE}"
        return f"it closed the connection; if it expects TLS, set {CA}, {CERTIFICATE} and {KEY} to PEM files"
    return details


# Checks who owns the Unix socket at an address before anything is sent to it.
#
# Anybody can create a folder in /tmp and a socket in it. Therefore kinetoctl only connects to a daemon of root, of
# its own user, or of a user to whom root has given the socket's folder in /run. The agent has the same rule
# (`kineto_agent.control.link`).
#
# gRPC connects on its own, repeatedly, and does not reveal the peer, so what is checked here must stay true. The
# folder is opened, and its owner and mode are read from the open folder. gRPC gets a path through the folder's
# descriptor: whatever happens to the original path, only the folder's owner and root can put a socket there. One
# connection is then made and closed, so that the kernel names the peer. This is skipped if the caller owns both
# folder and socket, as with tunnels: nobody else can have made them.
#
# A restarted daemon may have made a new folder; `is_there` says whether the path still leads to this one.
class SocketFolder:
    """The folder of a daemon's socket, held open. Making one blocks briefly."""

    def __init__(self, path: str, *, uid: int | None = None, run: Path = SYSTEM_PARENT) -> None:
        """uid: that of the caller; run: a folder in which only root makes folders. Raises UntrustedSocket, OSError."""
        self._given = Path(path)
        self._path = self._given.resolve()
        self._uid = os.geteuid() if uid is None else uid
        self._run = run
        self._fd = os.open(self._path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._check()
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def address(self) -> str:
        """The gRPC address of the socket, by way of the open folder."""
        return f"unix:{self._within}"

    @property
    def _within(self) -> str:
        return f"/proc/self/fd/{self._fd}/{self._path.name}"

    def is_there(self) -> bool:
        """Whether the path still leads to this folder."""
        try:
            found = self._given.resolve().parent.stat()
        except OSError:
            return False
        return os.path.samestat(found, os.fstat(self._fd))

    def close(self) -> None:
        """Close the folder; its address is invalid afterwards."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _check(self) -> None:
        folder = os.fstat(self._fd)
        if not self._is_known(folder.st_uid):
            raise self._untrusted(f"{self._path.parent} belongs to {_name(folder.st_uid)}, not to root or you")
        if folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise self._untrusted(f"users other than its owner can create sockets in {self._path.parent}")
        found = os.stat(self._path.name, dir_fd=self._fd, follow_symlinks=False)
        if folder.st_uid == found.st_uid == self._uid:
            return
        peer = self._peer()
        if peer is not None and not self._is_known(peer):
            raise self._untrusted(f"{_name(peer)} is listening there, not root or you")

    def _is_known(self, uid: int) -> bool:
        return uid in (_ROOT, self._uid) or vouched_for(self._path, uid, self._run)

    def _peer(self) -> int | None:
        """The user who listens, or None if nobody answers."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, contextlib.suppress(OSError):
            connection.settimeout(_CONNECT_LIMIT_S)
            connection.connect(self._within)
            return unix_peer.credentials(connection)[1]
        return None

    def _untrusted(self, why: str) -> UntrustedSocket:
        return UntrustedSocket(f"nothing was sent to unix:{self._path}: {why}")


def _name(uid: int) -> str:
    with contextlib.suppress(KeyError):
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    return f"uid {uid}"
