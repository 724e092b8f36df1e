"""What a page is asked and what it answers, without sockets; the checks of every request, and sessions."""

import hashlib
import hmac
import mimetypes
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from importlib.resources import files
from io import SEEK_END, BytesIO
from pathlib import Path
from threading import Lock
from typing import BinaryIO, NamedTuple

from kinetoctl.output.stack_page import StandingTimes

HTML, JSON, TEXT = "text/html; charset=utf-8", "application/json", "text/plain; charset=utf-8"
CSV = "text/csv; charset=utf-8"


class WebError(Exception):
    """A request that is answered with an error. `headers` go with the answer."""

    def __init__(self, status: HTTPStatus, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})


@dataclass(frozen=True, slots=True, kw_only=True)
class WebRequest:
    """One request. path: decoded. query and form: fields in their order, the same name perhaps several times."""

    method: str
    path: str
    query: tuple[tuple[str, str], ...] = ()
    form: tuple[tuple[str, str], ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)  # names in lower case

    def first(self, name: str, default: str = "") -> str:
        """The first value of a field of the query or the form."""
        return next((value for key, value in (*self.query, *self.form) if key == name), default)

    def cookie(self, name: str) -> str:
        """The value of a cookie; empty if there is none."""
        for part in self.headers.get("cookie", "").split(";"):
            key, _, value = part.strip().partition("=")
            if key == name:
                return value
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebAnswer:
    """One answer. content: bytes, or a file that is sent as it is; one that is open is closed then."""

    status: HTTPStatus = HTTPStatus.OK
    content: bytes | Path | BinaryIO = b""
    content_type: str = HTML
    headers: Mapping[str, str] = field(default_factory=dict)


def opened(answer: WebAnswer) -> tuple[BinaryIO, int]:
    """The content of an answer, which the caller closes, and its length in bytes. Raises OSError."""
    content = answer.content
    file = (
        BytesIO(content) if isinstance(content, bytes) else content.open("rb") if isinstance(content, Path) else content
    )
    length = file.seek(0, SEEK_END)
    file.seek(0)
    return file, length


def redirect(location: str, headers: Mapping[str, str] | None = None) -> WebAnswer:
    """Sends the browser to another page of this server after a POST."""
    return WebAnswer(status=HTTPStatus.SEE_OTHER, content_type=TEXT, headers={**(headers or {}), "Location": location})


# The scripts, styles and pictures of the pages: the same for everybody, and kept by browsers until they change.
# Their addresses on pages name their content (`?v=`), so that a browser asks for each once.
STATIC = "/static/"
KEPT = {"Cache-Control": "private, max-age=31536000, immutable"}
_DIGITS = 16
# By name: those of the offline report, and our own.
_FILES: Mapping[str, tuple[str, str]] = {
    "style.css": ("kineto_trace.html", "page"),
    "page.js": ("kineto_trace.html", "page"),
    **dict.fromkeys(
        ("web.css", "web.js", "editor.js", "enter.js", "flame.js", "memory.js", "timeline.js", "icon.svg"),
        ("kinetoctl.web.pages", "static"),
    ),
}


def static_address(name: str) -> str:
    """Where pages find a file. Raises KeyError."""
    return f"{STATIC}{name}?v={_version(name)}"


def static_file(request: WebRequest) -> WebAnswer:
    """The file that a request names, to be kept if it names this content. Raises WebError."""
    name = request.path.removeprefix(STATIC)
    if name not in _FILES:
        raise WebError(HTTPStatus.NOT_FOUND, "there is no such file")
    kind = mimetypes.guess_type(name)[0] or "text/plain"
    headers = KEPT if request.first("v") == _version(name) else {}
    return WebAnswer(content=_content(name), content_type=f"{kind}; charset=utf-8", headers=headers)


@cache
def _content(name: str) -> bytes:
    package, folder = _FILES[name]
    return (files(package) / folder / name).read_bytes()


@cache
def _version(name: str) -> str:
    return hashlib.sha256(_content(name)).hexdigest()[:_DIGITS]


# What every request is checked for, and what every answer tells the browser. Pure.
#
# The pages live at 127.0.0.1 and the copy of the Perfetto UI at `localhost`, on the same port: to the browser they are
# two sites, so that a fault of the UI, which needs a policy with inline scripts and shows hostile traces, reads neither
# pages nor forms nor the cookie. Browsers try ::1 for `localhost` first; so this server has that port, too, or somebody
# else could show a UI there and be given the trace.
#
# A request must name one of the two as its host, or another site could reach the server through a name of its own that
# resolves to this machine. A POST must come from one of our own pages, by what the browser says (Origin) and by the
# secret in the form.
HOST, HOST_V6, UI_HOST = "127.0.0.1", "::1", "localhost"
SAFE_METHODS = ("GET", "HEAD")
NOWHERE = "'none'"
LIFETIME_S = 12 * 3600
MAX_SESSIONS = 16  # of one user's browsers; the oldest one ends
MAX_HISTORY = 50
COOKIE = "kinetoctl_web"


class Origins(NamedTuple):
    """Where the two parts of the server are. ui: empty if the UI is not served."""

    pages: str
    ui: str


def origin(port: int) -> str:
    """The origin of the pages on this port."""
    return f"http://{HOST}:{port}"


def ui_origin(port: int) -> str:
    """The origin of the Perfetto UI on the same port."""
    return f"http://{UI_HOST}:{port}"


def is_at(request: WebRequest, own: str) -> bool:
    """Whether a request names this origin as its host."""
    return request.headers.get("host", "") == own.partition("://")[2]


def check_request(request: WebRequest, own: str) -> None:
    """Refuses a request that names another host than this origin, or comes from another site. Raises WebError."""
    if not is_at(request, own):
        raise WebError(HTTPStatus.MISDIRECTED_REQUEST, f"open this page at {own}")
    if request.method in SAFE_METHODS:
        return
    fetch_site = request.headers.get("sec-fetch-site", "same-origin")
    if request.headers.get("origin") != own or fetch_site != "same-origin":
        raise WebError(HTTPStatus.FORBIDDEN, "this form was sent by another site")


def page_policy(origins: Origins) -> str:
    """The policy of the pages: own files only, no inline script or style, no frame around them."""
    return (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        f"frame-src {origins.ui or NOWHERE}; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    )


def ui_policy(origins: Origins) -> str:
    """The policy of the Perfetto UI: what its own files need, nothing from elsewhere, in our frames only."""
    return (
        "default-src 'self'; script-src 'self' 'unsafe-inline' 'wasm-unsafe-eval'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; connect-src 'self' data: blob:; worker-src 'self' blob:; font-src 'self' data:; "
        f"base-uri 'none'; form-action 'none'; frame-ancestors {origins.pages}"
    )


HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # with no-referrer, browsers do not say where a form comes from
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), usb=()",
    "Cache-Control": "no-store",
}


# Who may use the server: a token that works once becomes a session, whose key only the browser's cookie has.
# The cookie is HttpOnly and SameSite=Strict. Cookies do not tell ports apart, so that another server on 127.0.0.1 may
# see it; a session therefore is no more than one of two checks: `socket_owner` is the other one. Each session has a
# secret of its own that every form must repeat.
@dataclass(slots=True)
class WebSession:
    """One browser. history: its SQL queries, the last one first. stood: what its last look at stacks saw."""

    form_secret: str
    ends_s: float
    history: list[str] = field(default_factory=list)
    stood: StandingTimes = field(default_factory=StandingTimes)

    def remember(self, sql: str) -> None:
        """Puts a query first in the history, where it stands once."""
        self.history[:] = [sql, *(other for other in self.history if other != sql)][:MAX_HISTORY]

    def owns(self, form_secret: str) -> bool:
        """Whether a form was made for this session."""
        return hmac.compare_digest(self.form_secret.encode(), form_secret.encode())


def new_session(ends_s: float) -> WebSession:
    """A session with a secret of its own."""
    return WebSession(secrets.token_urlsafe(32), ends_s)


class Sessions:
    """The token for the next browser, and the sessions. Thread-safe. clock: seconds that only grow."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._token = secrets.token_urlsafe(32)
        self._sessions: dict[str, WebSession] = {}

    @property
    def token(self) -> str:
        """The token that opens the next session."""
        return self._token

    def enter(self, token: str) -> str | None:
        """Opens a session and makes the next token. Returns the session's key, or None for a wrong or used token."""
        with self._lock:
            if not hmac.compare_digest(self._token.encode(), token.encode()):
                return None
            self._token = secrets.token_urlsafe(32)
            key = secrets.token_urlsafe(32)
            while len(self._sessions) >= MAX_SESSIONS:
                del self._sessions[next(iter(self._sessions))]
            self._sessions[key] = new_session(self._clock() + LIFETIME_S)
            return key

    def find(self, key: str) -> WebSession | None:
        """The session of this key, unless it has ended."""
        with self._lock:
            session = self._sessions.get(key)
            if session is not None and session.ends_s <= self._clock():
                del self._sessions[key]
                return None
            return session
