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
import re
import socket
import socketserver
import ssl
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol

import h11
from kineto_protos import unix_peer
from kineto_protos.call_values import CERTIFICATE_KEY, CERTIFICATE_NAME, MAX_NAMES, USER_KEY, USER_NAME

from kinetoctl.errors import Refused
from kinetoctl.web.http.request_handler import (
    IDLE_S,
    MAX_TARGET_BYTES,
    REQUEST_S,
    SEND_S,
    ConnectionDeadlines,
    DeadlineServer,
    content_length,
    failure,
    headers_of,
    web_request,
)
from kinetoctl.web.http.web_messages import WebAnswer, WebError, WebRequest, check_request, opened

_USER_NAME, _CERTIFICATE_NAME = re.compile(USER_NAME), re.compile(CERTIFICATE_NAME)
_ALTERNATIVES_OID = b"\x06\x03\x55\x1d\x11"  # subjectAltName, 2.5.29.17, as DER has it


class UnknownUser(Exception):
    """The connection names nobody; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageUser:
    """One of both: a user's name, or the names of a certificate in the order in which they count."""

    user: str = ""
    certificates: tuple[str, ...] = ()

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What tells the daemon for whom a call is made."""
        return ((USER_KEY, self.user),) if self.user else tuple((CERTIFICATE_KEY, name) for name in self.certificates)

    def __str__(self) -> str:
        return self.user or self.certificates[0]


def of_header(values: Sequence[str]) -> PageUser:
    """The user whom a proxy names in all headers of that name. Raises UnknownUser."""
    if len(values) != 1:
        raise UnknownUser(f"the proxy must name the user in exactly one header; there are {len(values)}")
    if not _USER_NAME.fullmatch(values[0]):
        raise UnknownUser("the proxy sent an invalid user name")
    return PageUser(user=values[0])


def of_certificate(certificate: Mapping[str, Any], der: bytes) -> PageUser:
    """The user of a verified certificate, as `SSLSocket.getpeercert` has it in both forms. Raises UnknownUser.

    The common name counts only without alternative names of any kind, as for the daemon's own clients.
    """
    found: Sequence[tuple[str, str]] = certificate.get("subjectAltName", ())
    names = [f"{kind}:{value}" for wanted in ("URI", "DNS") for kind, value in found if kind == wanted]
    if _ALTERNATIVES_OID not in der:
        names = [f"CN:{value}" for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    if not names or len(names) > MAX_NAMES or not all(map(_CERTIFICATE_NAME.fullmatch, names)):
        raise UnknownUser("the certificate has no usable name (URI or DNS, or CN if it has no alternative names)")
    return PageUser(certificates=tuple(names))


def of_tls(connection: ssl.SSLSocket) -> PageUser:
    """The user at the other end. Raises UnknownUser."""
    certificate, der = connection.getpeercert(), connection.getpeercert(binary_form=True)
    if not certificate or not der:
        raise UnknownUser("the client presented no certificate")
    return of_certificate(certificate, der)


MAX_CONNECTIONS, MAX_OF_ADDRESS, MAX_OF_USER = 512, 256, 32
BACKLOG = 128
_RELOAD_S = 1.0
_TELL_S, _MAX_TOLD = 60.0, 64  # users who are refused are named in the log
# As at the daemon's own door: TLS 1.2 with forward secrecy and authenticated encryption only, and TLS 1.3.
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
MAX_HEAD_BYTES = MAX_TARGET_BYTES + (16 << 10)  # of the first line and all headers
_READ_BYTES = 64 << 10
_SEND_BYTES = 256 << 10  # a client must take so much within the connection's timeout

Headers = Sequence[tuple[str, str]]
Identify = Callable[[Headers], PageUser]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSite:
    """What a door answers: the origin that browsers see, the policy of its answers, and where these come from."""

    origin: str
    policy: str
    application: Callable[[WebRequest, PageUser], WebAnswer]


class HttpConnection:
    """Serves the requests of one connection, one after the other. identify: who asks. Raises OSError."""

    def __init__(
        self, sock: socket.socket, site: SharedSite, deadlines: ConnectionDeadlines, identify: Identify
    ) -> None:
        self._sock = sock
        self._site = site
        self._deadlines = deadlines
        self._identify = identify
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)

    def serve(self) -> None:
        """Serves until the connection ends."""
        while self._began():
            head = self._answer_one()
            if head is None or self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
                return
            self._http.start_next_cycle()

    def _began(self) -> bool:
        """Waits for the first byte of a request."""
        self._deadlines.expect(self._sock, IDLE_S)
        if self._http.trailing_data[0]:
            return True
        data = self._sock.recv(_READ_BYTES)
        self._http.receive_data(data)
        self._deadlines.expect(self._sock, REQUEST_S)
        return bool(data)

    def _answer_one(self) -> h11.Request | None:
        """Reads a request and answers it. None if none came."""
        head: h11.Request | None = None
        try:
            event = self._event()
            if not isinstance(event, h11.Request):
                return None
            head = event
            answer = self._answer(head)
        except h11.RemoteProtocolError as exc:
            answer = failure(WebError(HTTPStatus(exc.error_status_hint), "this is not an HTTP/1.1 request"))
        self._send(answer, content=head is None or head.method != b"HEAD")
        return head

    def _answer(self, head: h11.Request) -> WebAnswer:
        """Raises h11.RemoteProtocolError, OSError."""
        try:
            request, headers = self._received(head)
            self._deadlines.expect(self._sock, None)
            user = self._identify(headers)
            check_request(request, self._site.origin)
            return self._site.application(request, user)
        except WebError as exc:
            return failure(exc)
        except UnknownUser as exc:
            return failure(WebError(HTTPStatus.FORBIDDEN, str(exc)))
        except (OSError, h11.RemoteProtocolError):
            raise
        except Exception:  # noqa: BLE001 - of a page: it must not take the connection down without an answer
            _log.exception("the page %s failed", head.target.partition(b"?")[0].decode("ascii", "replace"))
            return failure(WebError(HTTPStatus.INTERNAL_SERVER_ERROR, "this page failed; see the log"))

    def _received(self, head: h11.Request) -> tuple[WebRequest, Headers]:
        """The request, whose content has been read. Raises WebError."""
        method, target = head.method.decode("ascii", "replace"), head.target.decode("latin-1")
        headers = [(name.decode("ascii", "replace"), value.decode("latin-1")) for name, value in head.headers]
        length = content_length(method, target, headers)
        content = bytearray()
        while isinstance(event := self._event(), h11.Data):
            content += event.data
        if not isinstance(event, h11.EndOfMessage) or len(content) != length:
            raise WebError(HTTPStatus.BAD_REQUEST, "the form is incomplete")
        return web_request(method, target, headers, bytes(content)), headers

    def _event(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            if self._http.they_are_waiting_for_100_continue:
                self._write(h11.InformationalResponse(status_code=100, headers=[]))
            self._http.receive_data(self._sock.recv(_READ_BYTES))
        return event

    def _send(self, answer: WebAnswer, *, content: bool) -> None:
        file, length = opened(answer)
        with file:
            headers = headers_of(answer, self._site.policy, length)
            if self._http.their_state is not h11.DONE:  # what was refused may stay unread
                headers.append(("Connection", "close"))
            reason = answer.status.phrase.encode()
            self._write(h11.Response(status_code=answer.status, headers=headers, reason=reason))
            while content and (part := file.read(_SEND_BYTES)):
                self._write(h11.Data(data=part))
            self._write(h11.EndOfMessage())

    def _write(self, event: h11.Event) -> None:
        if data := self._http.send(event):
            self._sock.sendall(data)


class WebEntrance(Protocol):
    """Who may come in, and who they are."""

    most_of_one: int

    def key(self, sock: socket.socket, address: Any) -> str | None:
        """Whose connection it is, as far as that is known at once; None to close it."""

    def begun(self, sock: socket.socket, deadlines: ConnectionDeadlines) -> tuple[socket.socket, Identify, str]:
        """The connection ready for HTTP, who asks, and whose connection it is now. Raises OSError, UnknownUser."""


class WebDoor(DeadlineServer):
    """Serves one listening socket."""

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

    def shutdown_request(self, request: Any) -> None:
        """Forgets a connection that has ended."""
        with self._lock:
            if (key := self._keys.pop(request, None)) is not None:
                self._of_key -= Counter([key])
        super().shutdown_request(request)


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
        self._rejected: tuple[Any, ...] = ()
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
                    HTTPStatus.BAD_REQUEST,
                    f"only proxies are allowed to send {self._header}; your certificate identifies you",
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
        except (OSError, ValueError) as exc:  # they are looked at again: they may be half-way
            if stamp != self._rejected:
                _log.error("the new certificates cannot be used; the old ones stay in use: %s", exc)
            self._rejected = stamp

    def _stamps(self) -> tuple[Any, ...]:
        return tuple(map(_stamp, (self._files.certificate, self._files.key, self._files.client_ca)))


class ProxyEntrance:
    """Lets in the configured proxies by the kernel's word, and believes whom they name."""

    most_of_one = MAX_CONNECTIONS

    def __init__(self, uids: Collection[int], user_header: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._uids = frozenset(uids)
        self._header = user_header.lower()
        self._clock = clock
        self._told: dict[int, float] = {}  # when each uid was refused in the log

    def key(self, sock: socket.socket, _address: Any) -> str | None:
        """The uid of a proxy."""
        try:
            _, uid, _ = unix_peer.credentials(sock)
        except OSError:
            return None
        if uid not in self._uids:
            self._tell(uid)
            return None
        return f"uid {uid}"

    def _tell(self, uid: int) -> None:
        """Logs a refused user once a minute, however many connections there are."""
        now = self._clock()
        self._told = {each: at for each, at in self._told.items() if now - at < _TELL_S}
        if uid not in self._told and len(self._told) < _MAX_TOLD:
            self._told[uid] = now
            _log.warning("closed a connection from uid %d, which is not one of the proxies", uid)

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
        raise Refused(f"cannot listen on {host}:{port}: {exc.strerror or exc}") from exc


def listening_unix(path: Path) -> socket.socket:
    """A listening socket at this path, in place of one that an earlier server of the same user left. Raises Refused.

    Everybody may connect: who is served is the entrance's to say.
    """
    sock = socket.socket(socket.AF_UNIX)
    unix_peer.refuse_descriptors(sock)
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
        raise Refused(f"cannot listen on {path}: {exc.strerror or exc}") from exc
    return sock


def _context(files: WebTlsFiles) -> ssl.SSLContext:
    """Raises OSError, ValueError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(files.certificate, files.key, password=_no_password)
    context.load_verify_locations(cafile=files.client_ca)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _no_password() -> str:
    raise ValueError("the key is protected by a passphrase; store it without one, readable only by the server")


def _stamp(path: Path) -> Any:
    with contextlib.suppress(OSError):
        status = path.stat()
        return status.st_ino, status.st_size, status.st_mtime_ns
    return None
