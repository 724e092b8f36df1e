"""One connection: from the bytes of requests to `WebRequest`, and from `WebAnswer` to bytes.

Sizes are limited before anything is read into memory, and every error becomes a short page without details of ours.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from shutil import copyfileobj
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from kinetoctl.web.http import security
from kinetoctl.web.http.web_messages import TEXT, WebAnswer, WebError, WebRequest
from kinetoctl.web.http.web_server import IDLE_S, REQUEST_S, WebServer

MAX_TARGET_BYTES = 16 * 1024  # a query in SQL is part of the address
MAX_FORM_BYTES = 64 * 1024
MAX_FIELDS = 100
_FORM = "application/x-www-form-urlencoded"
_METHODS = (*security.SAFE_METHODS, "POST")

Application = Callable[[WebRequest], WebAnswer]


@dataclass(frozen=True, slots=True, kw_only=True)
class WebSite:
    """What one server answers: its own origin, the policy that goes with its answers, and where these come from."""

    origin: str
    policy: str
    application: Application


_log = logging.getLogger(__name__)


class RequestHandler(BaseHTTPRequestHandler):
    """Serves the requests of one connection, one after the other."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "kinetoctl", ""
    server: WebServer

    def __init__(self, site: WebSite, *args: Any) -> None:
        self._site = site
        super().__init__(*args)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: addresses of pages say what somebody looks at."""

    def handle_one_request(self) -> None:
        """Waits for a request and answers it."""
        self.server.expect(self.connection, IDLE_S)
        if not self.rfile.peek(1):  # type: ignore[attr-defined]
            self.close_connection = True
            return
        self.server.expect(self.connection, REQUEST_S)
        super().handle_one_request()

    def __getattr__(self, name: str) -> Callable[[], None]:
        """Every method is answered by `_serve`."""
        if name.startswith("do_"):
            return self._serve
        raise AttributeError(name)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answers what Python's server refuses: a line or a header that is too long, or is none."""
        self.close_connection = True
        self._send(_failure(WebError(HTTPStatus(code), message or HTTPStatus(code).phrase)), content=True)

    def _serve(self) -> None:
        try:
            request = self._request()
            self.server.expect(self.connection, None)
            security.check(request, self._site.origin)
            answer = self._site.application(request)
        except WebError as exc:
            answer = _failure(exc)
        except OSError:
            raise
        except Exception:  # noqa: BLE001 - of a page: it must not take the connection down without an answer
            _log.exception("the page %s failed", urlsplit(self.path).path)
            answer = _failure(WebError(HTTPStatus.INTERNAL_SERVER_ERROR, "this page failed; the terminal says why"))
        self._send(answer, content=self.command != "HEAD")

    def _request(self) -> WebRequest:
        """The request, whose content has been read. Raises WebError."""
        if self.command not in _METHODS:
            self.close_connection = True
            raise WebError(HTTPStatus.METHOD_NOT_ALLOWED, "only GET, HEAD and POST", {"Allow": ", ".join(_METHODS)})
        if len(self.path) > MAX_TARGET_BYTES:
            self.close_connection = True
            raise WebError(HTTPStatus.REQUEST_URI_TOO_LONG, f"an address has at most {MAX_TARGET_BYTES} bytes")
        form = self._form()
        parts = urlsplit(self.path)
        if not parts.path.startswith("/") or parts.netloc:
            raise WebError(HTTPStatus.BAD_REQUEST, "the address must be a path")
        return WebRequest(
            method=self.command,
            path=unquote(parts.path, errors="replace"),
            query=_fields(parts.query),
            form=_fields(form),
            headers={name.lower(): value for name, value in self.headers.items()},
        )

    def _form(self) -> str:
        """The content of a POST. Raises WebError for anything but a small form."""
        lengths = self.headers.get_all("Content-Length", [])
        if self.command != "POST":
            if lengths not in ([], ["0"]) or "Transfer-Encoding" in self.headers:
                self.close_connection = True
                raise WebError(HTTPStatus.BAD_REQUEST, "only a POST has content")
            return ""
        self.close_connection = True  # what is refused may stay unread
        if (
            "Transfer-Encoding" in self.headers
            or len(lengths) != 1
            or not lengths[0].isascii()
            or not lengths[0].isdigit()
        ):
            raise WebError(HTTPStatus.LENGTH_REQUIRED, "a form must say its length")
        if int(lengths[0]) > MAX_FORM_BYTES:
            raise WebError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a form has at most {MAX_FORM_BYTES} bytes")
        if self.headers.get_content_type() != _FORM:
            raise WebError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"a form is {_FORM}")
        content = self.rfile.read(int(lengths[0]))
        if len(content) < int(lengths[0]):
            raise WebError(HTTPStatus.BAD_REQUEST, "the form is incomplete")
        return content.decode("ascii", "replace")

    def _send(self, answer: WebAnswer, *, content: bool) -> None:
        if isinstance(answer.content, Path):
            with answer.content.open("rb") as file:
                self._begin(answer, answer.content.stat().st_size)
                if content:
                    copyfileobj(file, self.wfile, 1 << 20)
            return
        self._begin(answer, len(answer.content))
        if content:
            self.wfile.write(answer.content)

    def _begin(self, answer: WebAnswer, length: int) -> None:
        headers = {**security.HEADERS, "Content-Security-Policy": self._site.policy, **answer.headers}
        self.send_response(answer.status)
        for name, value in headers.items():
            self.send_header(name, value.replace("\r", "").replace("\n", ""))
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(length))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()


def _fields(text: str) -> tuple[tuple[str, str], ...]:
    """The fields of a query or form. Raises WebError."""
    try:
        return tuple(parse_qsl(text, keep_blank_values=True, max_num_fields=MAX_FIELDS, errors="replace"))
    except ValueError as exc:
        raise WebError(HTTPStatus.BAD_REQUEST, f"a form has at most {MAX_FIELDS} fields") from exc


def _failure(error: WebError) -> WebAnswer:
    return WebAnswer(status=error.status, content=f"{error}\n".encode(), content_type=TEXT, headers=error.headers)
