"""One connection: from the bytes of requests to `WebRequest`, and from `WebAnswer` to bytes.

Sizes are limited before anything is read into memory, and every error becomes a short page without details of ours.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from shutil import copyfileobj
from typing import Any
from urllib.parse import urlsplit

from kinetoctl.web.http import security
from kinetoctl.web.http.request_parts import content_length, web_request
from kinetoctl.web.http.web_messages import TEXT, WebAnswer, WebError, WebRequest, opened
from kinetoctl.web.http.web_server import IDLE_S, REQUEST_S, WebServer

Application = Callable[[WebRequest], WebAnswer]


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
            self._site = next((site for site in self._sites if security.is_at(request, site.origin)), self._sites[0])
            security.check(request, self._site.origin)
            answer = self._site.application(request)
        except WebError as exc:
            answer = failure(exc)
        except OSError:
            raise
        except Exception:  # noqa: BLE001 - of a page: it must not take the connection down without an answer
            _log.exception("the page %s failed", urlsplit(self.path).path)
            answer = failure(WebError(HTTPStatus.INTERNAL_SERVER_ERROR, "this page failed; the terminal says why"))
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
    headers = {**security.HEADERS, "Content-Security-Policy": policy, **answer.headers}
    headers |= {"Content-Type": answer.content_type, "Content-Length": str(length)}
    return [(name, value.replace("\r", "").replace("\n", "")) for name, value in headers.items()]


def failure(error: WebError) -> WebAnswer:
    """The answer to what is refused."""
    return WebAnswer(status=error.status, content=f"{error}\n".encode(), content_type=TEXT, headers=error.headers)
