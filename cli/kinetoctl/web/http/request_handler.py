"""The listening socket, and one connection: from bytes to `WebRequest`, and from `WebAnswer` to bytes.

Sizes are limited before anything is read into memory, and every error becomes a short page without details of ours.
"""

import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from shutil import copyfileobj
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from kinetoctl.base.socket_owner import Address, is_own
from kinetoctl.web.http.web_messages import (
    HEADERS,
    HOST,
    SAFE_METHODS,
    TEXT,
    WebAnswer,
    WebError,
    WebRequest,
    check_request,
    is_at,
    opened,
)

# The listening socket: loopback only, this user's programs only, and no client can hold more than its share.
#
# Python's own HTTP server parses requests; it is meant for no more than this, and what it lacks is here. Each
# connection is a thread, and there are at most MAX_CONNECTIONS: further ones are closed at once. A connection belongs
# to a program of this user or of root, or it is closed before a byte of it is read, so that no other user of the host
# can use up the connections or present a stolen cookie. A request must be complete within REQUEST_S from its first
# byte, however slowly it drips, and a connection may be idle for IDLE_S: the thread of the listening socket closes
# those that are late. Of an answer, a client must take something within SEND_S.
MAX_CONNECTIONS = 64  # a browser has six to a server
REQUEST_S, IDLE_S, SEND_S = 10.0, 30.0, 30.0
_LOOK_S = 0.25

Owner = Callable[[Address, Address], bool]


class DeadlineServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Serves each connection in a thread of its own, and ends those that are late."""

    daemon_threads = True
    block_on_close = False
    deadlines: "ConnectionDeadlines"

    def serve(self) -> None:
        """Serves until `shutdown`."""
        self.serve_forever(poll_interval=_LOOK_S)

    def service_actions(self) -> None:
        """Ends the connections that are late. Runs a few times a second."""
        self.deadlines.cut_late()

    def shutdown_request(self, request: Any) -> None:
        """Forgets a connection that has ended."""
        self.deadlines.forget(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints nothing: a client that disconnects is no news, and other errors were answered with a page."""

    def server_close(self) -> None:
        """Closes the listening socket and every connection."""
        super().server_close()
        self.deadlines.cut_all()


class WebServer(DeadlineServer, HTTPServer):
    """Listens on a loopback address. port 0: any free one. Raises OSError if the port is in use."""

    request_queue_size = 32

    def __init__(
        self,
        port: int = 0,
        *,
        host: str = HOST,
        is_own: Owner = is_own,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._is_own = is_own
        self.deadlines = ConnectionDeadlines(clock)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), BaseHTTPRequestHandler)

    def answer_with(self, handler: Callable[..., BaseHTTPRequestHandler]) -> None:
        """Sets what handles a connection; before `serve`."""
        self.RequestHandlerClass = handler

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self.server_address[1])

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether this connection is served at all."""
        if len(self.deadlines) >= MAX_CONNECTIONS or not self._is_own(request.getsockname(), client_address):
            return False
        request.settimeout(SEND_S)
        self.deadlines.expect(request, IDLE_S)
        return True


# Open connections, and until when something is expected of each: what is late is cut. Thread-safe.
class ConnectionDeadlines:
    """The open connections of one server. clock: seconds that only grow."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._deadlines: dict[socket.socket, float | None] = {}

    def __len__(self) -> int:
        with self._lock:
            return len(self._deadlines)

    def expect(self, connection: socket.socket, within_s: float | None) -> None:
        """Cuts the connection unless something else is expected of it within this time; None: an answer is made."""
        with self._lock:
            self._deadlines[connection] = None if within_s is None else self._clock() + within_s

    def forget(self, connection: socket.socket) -> None:
        """The connection has ended."""
        with self._lock:
            self._deadlines.pop(connection, None)

    def cut_late(self) -> None:
        """Ends the connections that are late. To be called a few times a second."""
        now = self._clock()
        with self._lock:
            late = [each for each, deadline in self._deadlines.items() if deadline is not None and deadline <= now]
        for connection in late:
            _cut(connection)

    def cut_all(self) -> None:
        """Ends every connection."""
        with self._lock:
            open_ones = list(self._deadlines)
        for connection in open_ones:
            _cut(connection)


def _cut(connection: socket.socket) -> None:
    """Makes the thread of a connection see its end, without touching the state of TLS, which is the thread's."""
    try:
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
    except OSError:
        return


Application = Callable[[WebRequest], WebAnswer]
MAX_TARGET_BYTES = 16 * 1024  # a query in SQL is part of the address
MAX_FORM_BYTES = 64 * 1024
MAX_FIELDS = 100
METHODS = (*SAFE_METHODS, "POST")
_MAX_DIGITS = 9  # of a length; Python reads no number of thousands of them
_ONCE = ("host", "origin", "sec-fetch-site", "cookie")  # what decides whose request it is has one value
_FORM = "application/x-www-form-urlencoded"

Headers = Iterable[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WebSite:
    """What a server answers at one host: its origin, the policy of its answers, and where they come from."""

    origin: str
    policy: str
    application: Application


_log = logging.getLogger(__name__)


class RequestHandler(BaseHTTPRequestHandler):
    """Serves the requests of one connection, one after the other. A host that has no site is refused by the first."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # of an answer in two parts, the second would wait for the browser's receipt
    server_version, sys_version = "kinetoctl", ""
    server: WebServer

    def __init__(self, sites: Sequence[WebSite], *args: Any) -> None:
        self._sites = sites
        self._site = sites[0]
        super().__init__(*args)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: addresses of pages say what somebody looks at."""

    def handle_one_request(self) -> None:
        """Waits for a request and answers it."""
        self.server.deadlines.expect(self.connection, IDLE_S)
        if not self.rfile.peek(1):  # type: ignore[attr-defined]
            self.close_connection = True
            return
        self.server.deadlines.expect(self.connection, REQUEST_S)
        super().handle_one_request()

    def __getattr__(self, name: str) -> Callable[[], None]:
        """Every method is answered by `_serve`."""
        if name.startswith("do_"):
            return self._serve
        raise AttributeError(name)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answers what Python's server refuses: a line or a header that is too long, or is none."""
        self.close_connection = True
        self._send(failure(WebError(HTTPStatus(code), message or HTTPStatus(code).phrase)), content=True)

    def _serve(self) -> None:
        try:
            request = self._received()
            self.server.deadlines.expect(self.connection, None)
            self._site = next((site for site in self._sites if is_at(request, site.origin)), self._sites[0])
            check_request(request, self._site.origin)
            answer = self._site.application(request)
        except WebError as exc:
            answer = failure(exc)
        except OSError:
            raise
        except Exception:  # noqa: BLE001 - of a page: it must not take the connection down without an answer
            _log.exception("the page %s failed", urlsplit(self.path).path)
            answer = failure(WebError(HTTPStatus.INTERNAL_SERVER_ERROR, "this page failed; see the terminal"))
        self._send(answer, content=self.command != "HEAD")

    def _received(self) -> WebRequest:
        """The request. Whatever is refused may stay unread, so nothing follows on that connection. Raises WebError."""
        try:
            self.close_connection |= self.command == "POST"
            return self._request()
        except WebError:
            self.close_connection = True
            raise

    def _request(self) -> WebRequest:
        """The request, whose content has been read. Raises WebError."""
        length = content_length(self.command, self.path, self.headers.items())
        content = self.rfile.read(length)
        if len(content) < length:
            raise WebError(HTTPStatus.BAD_REQUEST, "the form is incomplete")
        return web_request(self.command, self.path, self.headers.items(), content)

    def _send(self, answer: WebAnswer, *, content: bool) -> None:
        file, length = opened(answer)
        with file:
            self._begin(answer, length)
            if content:
                copyfileobj(file, self.wfile, 1 << 20)

    def _begin(self, answer: WebAnswer, length: int) -> None:
        self.send_response(answer.status)
        for name, value in headers_of(answer, self._site.policy, length):
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()


def headers_of(answer: WebAnswer, policy: str, length: int) -> list[tuple[str, str]]:
    """What the browser is told with an answer of this length."""
    headers = {**HEADERS, "Content-Security-Policy": policy, **answer.headers}
    headers |= {"Content-Type": answer.content_type, "Content-Length": str(length)}
    return [(name, value.replace("\r", "").replace("\n", "")) for name, value in headers.items()]


def failure(error: WebError) -> WebAnswer:
    """The answer to what is refused."""
    return WebAnswer(status=error.status, content=f"{error}\n".encode(), content_type=TEXT, headers=error.headers)


# From the parts of a request to `WebRequest`, with limits on each of them. Pure.
def content_length(method: str, target: str, headers: Headers) -> int:
    """How many bytes follow the headers. Raises WebError for anything but a small form with its length."""
    if method not in METHODS:
        raise WebError(
            HTTPStatus.METHOD_NOT_ALLOWED, "only GET, HEAD and POST are allowed", {"Allow": ", ".join(METHODS)}
        )
    if len(target) > MAX_TARGET_BYTES:
        raise WebError(HTTPStatus.REQUEST_URI_TOO_LONG, f"the address is longer than {MAX_TARGET_BYTES} bytes")
    named = [(name.lower(), value) for name, value in headers]
    lengths = [value for name, value in named if name == "content-length"]
    encoded = any(name == "transfer-encoding" for name, _ in named)
    if method != "POST":
        if lengths not in ([], ["0"]) or encoded:
            raise WebError(HTTPStatus.BAD_REQUEST, "only a POST request has content")
        return 0
    if encoded or len(lengths) != 1 or not lengths[0].isascii() or not lengths[0].isdigit():
        raise WebError(HTTPStatus.LENGTH_REQUIRED, "a form needs a Content-Length")
    if len(lengths[0]) > _MAX_DIGITS or int(lengths[0]) > MAX_FORM_BYTES:
        raise WebError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the form is larger than {MAX_FORM_BYTES} bytes")
    if _media_type(named) != _FORM:
        raise WebError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"a form must be sent as {_FORM}")
    return int(lengths[0])


def web_request(method: str, target: str, headers: Headers, content: bytes) -> WebRequest:
    """The request. Raises WebError."""
    named = [(name.lower(), value) for name, value in headers]
    for once in _ONCE:
        if sum(name == once for name, _ in named) > 1:
            raise WebError(HTTPStatus.BAD_REQUEST, f"the header {once} must not be repeated")
    parts = urlsplit(target)
    if not parts.path.startswith("/") or parts.netloc:
        raise WebError(HTTPStatus.BAD_REQUEST, "the address must be a path")
    return WebRequest(
        method=method,
        path=unquote(parts.path, errors="replace"),
        query=_fields(parts.query),
        form=_fields(content.decode("ascii", "replace")),
        headers=dict(named),
    )


def _media_type(headers: Headers) -> str:
    message = Message()
    message["Content-Type"] = next((value for name, value in headers if name == "content-type"), "")
    return message.get_content_type()


def _fields(text: str) -> tuple[tuple[str, str], ...]:
    """The fields of a query or form. Raises WebError."""
    try:
        return tuple(parse_qsl(text, keep_blank_values=True, max_num_fields=MAX_FIELDS, errors="replace"))
    except ValueError as exc:
        raise WebError(HTTPStatus.BAD_REQUEST, f"the form has more than {MAX_FIELDS} fields") from exc
