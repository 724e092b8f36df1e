"""What a page is asked and what it answers, without sockets."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
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
