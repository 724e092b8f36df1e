"""Where browsers connect: TCP with client certificates, or a Unix socket for a proxy in front.

Theory of operation
    Each connection is a thread. There are at most MAX_CONNECTIONS at a door, MAX_OF_ADDRESS from one address and
    MAX_OF_USER of one certificate. What is not let in is closed before a byte of it is read: at a Unix socket that is
    everybody but the configured proxies, by SO_PEERCRED. The handshake of TLS happens in the connection's own thread
    and, like a request, within its time, so that a client that says nothing holds up nobody. There is no TCP without
    TLS, on loopback neither.
"""

import contextlib
import logging
import os
import socket
import socketserver
import ssl
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol

from kineto_protos import unix_peer

from kinetoctl.errors import Refused
from kinetoctl.web.http.connection_deadlines import ConnectionDeadlines
from kinetoctl.web.http.web_messages import WebError
from kinetoctl.web.http.web_server import IDLE_S, REQUEST_S, SEND_S
from kinetoctl.web.shared.http_connection import Headers, HttpConnection, Identify, SharedSite
from kinetoctl.web.shared.page_user import UnknownUser, of_header, of_tls

MAX_CONNECTIONS, MAX_OF_ADDRESS, MAX_OF_USER = 512, 256, 32
BACKLOG = 128
_LOOK_S = 0.25
_RELOAD_S = 1.0
# As at the daemon's own door: TLS 1.2 with forward secrecy and authenticated encryption only, and TLS 1.3.
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
_log = logging.getLogger(__name__)


class WebEntrance(Protocol):
    """Who may come in, and who they are."""

    most_of_one: int

    def key(self, sock: socket.socket, address: Any) -> str | None:
        """Whose connection it is, as far as that is known at once; None to close it."""

    def begun(self, sock: socket.socket, deadlines: ConnectionDeadlines) -> tuple[socket.socket, Identify, str]:
        """The connection ready for HTTP, who asks, and whose connection it is now. Raises OSError, UnknownUser."""


class WebDoor(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Serves one listening socket."""

    daemon_threads = True
    block_on_close = False

    def __init__(
        self,
        listening: socket.socket,
        entrance: WebEntrance,
        site: SharedSite,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        socketserver.BaseServer.__init__(self, listening.getsockname(), socketserver.BaseRequestHandler)
        self.socket = listening
        self.deadlines = ConnectionDeadlines(clock)
        self._entrance = entrance
        self._site = site
        self._lock = threading.Lock()
        self._keys: dict[socket.socket, str] = {}
        self._of_key = Counter[str]()
        self._of_user = Counter[str]()

    def serve(self) -> None:
        """Serves until `shutdown`."""
        self.serve_forever(poll_interval=_LOOK_S)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether this connection is served at all."""
        key = self._entrance.key(request, client_address)
        with self._lock:
            if key is None or len(self._keys) >= MAX_CONNECTIONS or self._of_key[key] >= self._entrance.most_of_one:
                return False
            self._keys[request] = key
            self._of_key[key] += 1
        request.settimeout(SEND_S)
        self.deadlines.expect(request, REQUEST_S)
        return True

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Serves a connection, in its thread."""
        with contextlib.ExitStack() as stack:
            try:
                sock, identify, user = self._entrance.begun(request, self.deadlines)
            except UnknownUser:
                return
            stack.callback(self.deadlines.forget, sock)
            stack.enter_context(sock)
            if stack.enter_context(self._counted(user)):
                HttpConnection(sock, self._site, self.deadlines, identify).serve()

    @contextlib.contextmanager
    def _counted(self, user: str) -> Any:
        """Counts a connection of a user; False if there are too many."""
        with self._lock:
            self._of_user[user] += 1
            fits = not user or self._of_user[user] <= MAX_OF_USER
        try:
            yield fits
        finally:
            with self._lock:
                self._of_user -= Counter([user])

    def service_actions(self) -> None:
        """Ends the connections that are late. Runs a few times a second."""
        self.deadlines.cut_late()

    def shutdown_request(self, request: Any) -> None:
        """Forgets a connection that has ended."""
        self.deadlines.forget(request)
        with self._lock:
            if (key := self._keys.pop(request, None)) is not None:
                self._of_key -= Counter([key])
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints nothing: a client that disconnects is no news, and other errors were answered with a page."""

    def server_close(self) -> None:
        """Closes the listening socket and every connection."""
        super().server_close()
        self.deadlines.cut_all()


@dataclass(frozen=True, slots=True, kw_only=True)
class WebTlsFiles:
    """PEM files: the server's certificate with its chain, its key, and the authorities of clients."""

    certificate: Path
    key: Path
    client_ca: Path


class TlsEntrance:
    """Lets in who has a certificate of the authorities. The files are read again when they change."""

    most_of_one = MAX_OF_ADDRESS

    def __init__(self, files: WebTlsFiles, user_header: str) -> None:
        """user_header: the one in which a proxy names users, which nobody may send here. Raises Refused."""
        self._files = files
        self._header = user_header.lower()
        self._lock = threading.Lock()
        self._stamp, self._looked_s = self._stamps(), time.monotonic()
        try:
            self._context = _context(files)
        except (OSError, ValueError) as exc:
            raise Refused(f"the certificates cannot be used: {exc}") from exc

    def key(self, _sock: socket.socket, address: Any) -> str | None:
        """The address."""
        return str(address[0])

    def begun(self, sock: socket.socket, deadlines: ConnectionDeadlines) -> tuple[socket.socket, Identify, str]:
        """Shakes hands. Raises OSError, UnknownUser."""
        deadlines.forget(sock)  # wrapping takes its descriptor away
        # Otherwise the second part of an answer waits for the browser's receipt of the first, 40 ms on Linux.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        secure = self._current().wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        try:
            deadlines.expect(secure, REQUEST_S)
            secure.do_handshake()
            user = of_tls(secure)
        except BaseException:
            deadlines.forget(secure)
            secure.close()
            raise

        def identify(headers: Headers) -> Any:
            if any(name.lower() == self._header for name, _ in headers):
                raise WebError(
                    HTTPStatus.BAD_REQUEST, f"{self._header} is for a proxy; the certificate says who you are"
                )
            return user

        return secure, identify, str(user.certificates)

    def _current(self) -> ssl.SSLContext:
        """The certificates as they are now; those of before where they do not fit together."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked_s >= _RELOAD_S:
                self._looked_s, stamp = now, self._stamps()
                if stamp != self._stamp:
                    self._reload(stamp)
            return self._context

    def _reload(self, stamp: tuple[Any, ...]) -> None:
        try:
            self._context, self._stamp = _context(self._files), stamp
        except (OSError, ValueError) as exc:
            _log.error("the new certificates cannot be used, the old ones stay in use: %s", exc)

    def _stamps(self) -> tuple[Any, ...]:
        return tuple(map(_stamp, (self._files.certificate, self._files.key, self._files.client_ca)))


class ProxyEntrance:
    """Lets in the configured proxies by the kernel's word, and believes whom they name."""

    most_of_one = MAX_CONNECTIONS

    def __init__(self, uids: Collection[int], user_header: str) -> None:
        self._uids = frozenset(uids)
        self._header = user_header.lower()

    def key(self, sock: socket.socket, _address: Any) -> str | None:
        """The uid of a proxy."""
        try:
            _, uid, _ = unix_peer.credentials(sock)
        except OSError:
            return None
        if uid not in self._uids:
            _log.warning("a connection of uid %d was closed: it is none of the proxies", uid)
            return None
        return f"uid {uid}"

    def begun(self, sock: socket.socket, deadlines: ConnectionDeadlines) -> tuple[socket.socket, Identify, str]:
        """The connection as it is."""
        deadlines.expect(sock, IDLE_S)

        def identify(headers: Headers) -> Any:
            return of_header([value for name, value in headers if name.lower() == self._header])

        return sock, identify, ""


def listening_tcp(host: str, port: int) -> socket.socket:
    """A listening socket. Raises Refused."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as exc:
        raise Refused(f"{host}:{port} cannot be listened at: {exc.strerror or exc}") from exc


def listening_unix(path: Path) -> socket.socket:
    """A listening socket at this path, in place of one that an earlier server of the same user left. Raises Refused.

    Everybody may connect: who is served is the entrance's to say.
    """
    sock = socket.socket(socket.AF_UNIX)
    try:
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            if stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid():
                path.unlink()
        sock.bind(str(path))
        path.chmod(0o666)
        sock.listen(BACKLOG)
    except OSError as exc:
        sock.close()
        raise Refused(f"{path} cannot be listened at: {exc.strerror or exc}") from exc
    return sock


def _context(files: WebTlsFiles) -> ssl.SSLContext:
    """Raises OSError, ValueError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(files.certificate, files.key)
    context.load_verify_locations(cafile=files.client_ca)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _stamp(path: Path) -> Any:
    with contextlib.suppress(OSError):
        status = path.stat()
        return status.st_ino, status.st_size, status.st_mtime_ns
    return None
