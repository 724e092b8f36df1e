"""What a page is asked and what it answers, without sockets."""

import hashlib
import mimetypes
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from importlib.resources import files
from io import SEEK_END, BytesIO
from pathlib import Path
from typing import BinaryIO

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
