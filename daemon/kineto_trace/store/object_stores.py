"""Object stores: which URLs are known, what they need, and reading from them with patience."""

import importlib.util
import time
from collections.abc import Callable
from typing import Any

from kineto_trace.errors import FileError

# Scheme -> the module that fsspec needs for it, and our extra that brings it.
SCHEMES = {
    "s3": ("s3fs", "s3"),
    "gs": ("gcsfs", "gcs"),
    "az": ("adlfs", "azure"),
    "file": ("fsspec", ""),
}
CONNECT_S = 10.0
TIMEOUT_S = 60.0  # of one request
READ_TRIES = 4
PAUSE_S = 0.5  # before the second try; it doubles
_S3_TRIES = 2  # of one request: we have more patience than the library, and say what is wrong
_SEPARATOR = "://"


def is_url(text: object) -> bool:
    """Tells whether this is a URL rather than a path."""
    return isinstance(text, str) and _SEPARATOR in text


def scheme_of(url: str) -> str:
    """Returns s3, gs, az or file."""
    return url.partition(_SEPARATOR)[0]


def missing_extra(url: str) -> str:
    """Returns the extra to install before this store can be used; "" if there is none."""
    if not url:
        return ""
    module, extra = SCHEMES[scheme_of(url)]
    if importlib.util.find_spec(module) is not None:
        return ""
    return f"{module} is not installed: run pip install 'kinetod[{extra}]'"


def open_store(url: str, *, endpoint: str = "", timeout_s: float = TIMEOUT_S) -> tuple[Any, str]:
    """Returns fsspec's file system for a URL, and the path in it. The libraries look for credentials themselves.

    endpoint: of an S3-compatible store; "" for Amazon's, or that of AWS_ENDPOINT_URL.
    """
    import fsspec

    scheme = scheme_of(url)
    arguments: dict[str, Any] = {"use_listings_cache": False}
    if scheme == "s3":
        config = {"connect_timeout": CONNECT_S, "read_timeout": timeout_s, "retries": {"max_attempts": 1}}
        arguments |= {"config_kwargs": config}
        if endpoint:
            arguments |= {"endpoint_url": endpoint}
    fs, path = fsspec.core.url_to_fs(url, **arguments)
    if scheme == "s3":
        fs.retries = _S3_TRIES
    return fs, path


def checked_store(url: str) -> tuple[Any, str]:
    """The same for readers. Raises FileError for an unsupported URL or a missing package."""
    scheme = scheme_of(url)
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}{_SEPARATOR}" for name in SCHEMES)
        raise FileError(f"{url}: traces are read from {known} and from this machine, not from {scheme!r:.20}")
    if problem := missing_extra(url):
        raise FileError(f"{url}: {problem}")
    try:
        fs, path = open_store(url)
    except Exception as exc:
        raise FileError(f"{url}: {_text(exc)}") from exc
    return fs, str(path).rstrip("/")


def patiently(read: Callable[[], bytes], sleep: Callable[[float], None] = time.sleep) -> bytes:
    """Returns what `read` returns, with a few retries. FileNotFoundError and the error of the last try are raised."""
    for attempt in range(READ_TRIES):
        try:
            return read()
        except FileNotFoundError:
            raise
        except Exception:
            if attempt + 1 == READ_TRIES:
                raise
            sleep(PAUSE_S * 2**attempt)
    raise AssertionError("unreachable")


def listed(url: str, read: Callable[[], Any]) -> Any:
    """Returns what `read` returns for this URL. Raises FileError."""
    try:
        return read()
    except FileNotFoundError:
        raise FileError(f"{url}: nothing found; check the name of the bucket") from None
    except Exception as exc:
        raise FileError(f"{url} cannot be read: {_text(exc)}; check the address and the store's credentials") from exc


def _text(exc: BaseException) -> str:
    return " ".join(f"{type(exc).__name__}: {exc}".split())
