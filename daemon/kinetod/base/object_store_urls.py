"""Addresses of object stores: checks them, and derives a capture's address from them."""

import re
from pathlib import PurePosixPath
from urllib.parse import urlsplit

from kineto_trace.store.object_stores import SCHEMES, scheme_of
from kineto_trace.store.object_stores import missing_package as missing_package

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


def checked_url(text: str) -> str:
    """Checks a prefix such as s3://bucket/path and strips trailing slashes; "" is none. Raises ValueError."""
    if not text:
        return ""
    parts = urlsplit(text)
    # urlsplit accepts S3:// and file:/x, and drops newlines
    if scheme_of(text) not in SCHEMES or not text.isprintable():
        raise ValueError(f"expected s3://bucket/prefix, gs://…, az://container/… or file:///path, got {text!r:.80}")
    if "@" in parts.netloc:
        raise ValueError("contains a user or key; put credentials in the store's own files or environment variables")
    if parts.query or parts.fragment:
        raise ValueError(
            "has a query or fragment (?… or #…); put settings in the store's own files or environment variables"
        )
    if ".." in parts.path.split("/") or "//" in parts.path:
        raise ValueError("contains .. or an empty segment in its path")
    if parts.scheme == "file":
        if parts.netloc or not parts.path.strip("/"):
            raise ValueError("must be file:///absolute/path")
    elif not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", parts.netloc):
        raise ValueError(f"{parts.netloc!r:.80} is not a valid bucket or container name")
    return text.rstrip("/")


def checked_endpoint(text: str) -> str:
    """Checks an endpoint: http://host:port, https://…, or "". Raises ValueError."""
    parts = urlsplit(text)
    if text and (parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.query):
        raise ValueError("expected https://host:port, without a user or key")
    return text.rstrip("/")


def capture_url(prefix: str, host: str, capture_id: str) -> str:
    """The folder of one capture: PREFIX/host/capture-id."""
    return f"{prefix}/{_safe(host)}/{_safe(capture_id)}"


def folder_of(url: str) -> str:
    """The prefix of a capture's URL if it is a local folder, otherwise ""."""
    return str(PurePosixPath(urlsplit(url).path).parents[1]) if scheme_of(url) == "file" else ""


def _safe(text: str) -> str:
    return _UNSAFE.sub("_", text).lstrip(".") or "_"
