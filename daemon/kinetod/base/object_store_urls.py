"""Addresses of object stores: which are taken, what they need, how a capture's place is made of them."""

import re
from pathlib import PurePosixPath
from urllib.parse import urlsplit

from kineto_trace.store.object_stores import SCHEMES, scheme_of
from kineto_trace.store.object_stores import missing_extra as missing_extra

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


def checked_url(text: str) -> str:
    """A prefix such as s3://bucket/path, without a slash at its end; empty: none. Raises ValueError."""
    if not text:
        return ""
    parts = urlsplit(text)
    if scheme_of(text) not in SCHEMES or not text.isprintable():  # urlsplit takes S3:// and file:/x, and drops newlines
        raise ValueError(f"expected s3://bucket/prefix, gs://…, az://container/… or file:///path, got {text!r:.80}")
    if "@" in parts.netloc:
        raise ValueError("has a user or key in it; credentials belong into the files and variables of the store")
    if parts.query or parts.fragment:
        raise ValueError("ends in ?… or #…; settings of the store belong into its own files and variables")
    if ".." in parts.path.split("/") or "//" in parts.path:
        raise ValueError("has .. or an empty part in its path")
    if parts.scheme == "file":
        if parts.netloc or not parts.path.strip("/"):
            raise ValueError("must be file:///absolute/path")
    elif not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", parts.netloc):
        raise ValueError(f"{parts.netloc!r:.80} is no name of a bucket or container")
    return text.rstrip("/")


def checked_endpoint(text: str) -> str:
    """http://host:port or https://…, or empty. Raises ValueError."""
    parts = urlsplit(text)
    if text and (parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.query):
        raise ValueError("expected https://host:port, without a user or key in it")
    return text.rstrip("/")


def capture_url(prefix: str, host: str, capture_id: str) -> str:
    """The folder of one capture: PREFIX/host/capture-id."""
    return f"{prefix}/{_safe(host)}/{_safe(capture_id)}"


def folder_of(url: str) -> str:
    """The prefix of a capture's URL if it is a folder of this machine, else empty."""
    return str(PurePosixPath(urlsplit(url).path).parents[1]) if scheme_of(url) == "file" else ""


def _safe(text: str) -> str:
    return _UNSAFE.sub("_", text).lstrip(".") or "_"
