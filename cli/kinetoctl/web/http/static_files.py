"""The scripts, styles and pictures of the pages: the same for everybody, and kept by browsers until they change.

Their addresses on pages name their content (`?v=`), so that a browser asks for each once.
"""

import hashlib
import mimetypes
from collections.abc import Mapping
from functools import cache
from http import HTTPStatus
from importlib.resources import files

from kinetoctl.web.http.web_messages import WebAnswer, WebError, WebRequest

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
