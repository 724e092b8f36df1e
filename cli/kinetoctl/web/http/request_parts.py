"""From the parts of a request to `WebRequest`, with limits on each of them. Pure."""

from collections.abc import Iterable
from email.message import Message
from http import HTTPStatus
from urllib.parse import parse_qsl, unquote, urlsplit

from kinetoctl.web.http import security
from kinetoctl.web.http.web_messages import WebError, WebRequest

MAX_TARGET_BYTES = 16 * 1024  # a query in SQL is part of the address
MAX_FORM_BYTES = 64 * 1024
MAX_FIELDS = 100
METHODS = (*security.SAFE_METHODS, "POST")
_MAX_DIGITS = 9  # of a length; Python reads no number of thousands of them
_ONCE = ("host", "origin", "sec-fetch-site", "cookie")  # what decides whose request it is has one value
_FORM = "application/x-www-form-urlencoded"

Headers = Iterable[tuple[str, str]]


def content_length(method: str, target: str, headers: Headers) -> int:
    """How many bytes follow the headers. Raises WebError for anything but a small form with its length."""
    if method not in METHODS:
        raise WebError(HTTPStatus.METHOD_NOT_ALLOWED, "only GET, HEAD and POST", {"Allow": ", ".join(METHODS)})
    if len(target) > MAX_TARGET_BYTES:
        raise WebError(HTTPStatus.REQUEST_URI_TOO_LONG, f"an address has at most {MAX_TARGET_BYTES} bytes")
    named = [(name.lower(), value) for name, value in headers]
    lengths = [value for name, value in named if name == "content-length"]
    encoded = any(name == "transfer-encoding" for name, _ in named)
    if method != "POST":
        if lengths not in ([], ["0"]) or encoded:
            raise WebError(HTTPStatus.BAD_REQUEST, "only a POST has content")
        return 0
    if encoded or len(lengths) != 1 or not lengths[0].isascii() or not lengths[0].isdigit():
        raise WebError(HTTPStatus.LENGTH_REQUIRED, "a form must say its length")
    if len(lengths[0]) > _MAX_DIGITS or int(lengths[0]) > MAX_FORM_BYTES:
        raise WebError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a form has at most {MAX_FORM_BYTES} bytes")
    if _media_type(named) != _FORM:
        raise WebError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"a form is {_FORM}")
    return int(lengths[0])


def web_request(method: str, target: str, headers: Headers, content: bytes) -> WebRequest:
    """The request. Raises WebError."""
    named = [(name.lower(), value) for name, value in headers]
    for once in _ONCE:
        if sum(name == once for name, _ in named) > 1:
            raise WebError(HTTPStatus.BAD_REQUEST, f"the header {once} may be there once only")
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
        raise WebError(HTTPStatus.BAD_REQUEST, f"a form has at most {MAX_FIELDS} fields") from exc
