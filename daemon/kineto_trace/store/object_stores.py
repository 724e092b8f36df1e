"""Object stores: supported URLs, their requirements, and reading with retries."""

import importlib.util
import time
from collections.abc import Callable
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from kineto_trace.base.install_advice import install_advice
from kineto_trace.errors import FileError

# Scheme -> the module, and package, that fsspec needs for it.
SCHEMES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs", "file": "fsspec"}
CONNECT_S = 10.0
TIMEOUT_S = 60.0  # of one request
READ_TRIES = 4
PAUSE_S = 0.5  # before the second try; doubles each time
_PROXY = "; the proxy requires a user name and password: put them in https_proxy, or add the store to no_proxy"
_S3_TRIES = 2  # of one request: our own retries are more patient, and report errors
_SEPARATOR = "://"


def is_url(text: object) -> bool:
    """Returns whether this is a URL rather than a path."""
    return isinstance(text, str) and _SEPARATOR in text


def scheme_of(url: str) -> str:
    """Returns s3, gs, az or file."""
    return url.partition(_SEPARATOR)[0]


def missing_package(url: str) -> str:
    """Returns what to install before this store can be used; "" if nothing is missing."""
    if not url:
        return ""
    module = SCHEMES[scheme_of(url)]
    found = importlib.util.find_spec(module)
    return "" if found is not None else f"{module} is not installed: {install_advice(module)}"


def open_store(url: str, *, endpoint: str = "", timeout_s: float = TIMEOUT_S) -> tuple[Any, str]:
    """Returns fsspec's file system for a URL, and the path in it. The libraries find credentials themselves.

    endpoint: of an S3-compatible store; "" for Amazon's, or that of AWS_ENDPOINT_URL.
    """
    import fsspec

    scheme = scheme_of(url)
    arguments: dict[str, Any] = {"use_listings_cache": False}
    if scheme == "s3":
        config = {"connect_timeout": CONNECT_S, "read_timeout": timeout_s, "retries": {"max_attempts": 1}}
        arguments |= {"config_kwargs": {**config, "http_session_cls": _s3_session()}}
        if endpoint:
            arguments |= {"endpoint_url": endpoint}
    elif scheme == "gs":
        arguments |= {"session_kwargs": {"trace_configs": [_no_redirects()]}}
    # url_to_fs would treat "::" in the name of an object, which others may have chosen, as a chain of file systems.
    kind = fsspec.get_filesystem_class(scheme)
    fs = kind(**{**kind._get_kwargs_from_urls(url), **arguments})
    if scheme == "s3":
        fs.retries = _S3_TRIES
    elif scheme == "az":
        _refuse_redirects(fs.service_client)
    return fs, kind._strip_protocol(url)


@cache
def _no_redirects() -> Any:
    """Returns hooks for aiohttp that refuse redirects: requests are for the configured store only."""
    from aiohttp import TraceConfig

    async def refuse(_session: Any, _context: Any, params: Any) -> None:
        if target := params.response.headers.get("Location"):  # some answers of stores have the status but no location
            raise _redirected(params.response.status, target)

    config = TraceConfig()
    config.on_request_redirect.append(refuse)
    config.freeze()
    return config


def _redirected(status: int, target: str) -> OSError:
    parts = urlsplit(target)
    where = f"{status}, a redirect to {parts.scheme}://{parts.hostname or ''}"
    return OSError(f"the store answered {where}: redirects are not followed; configure the address of the store itself")


def _refuse_redirects(client: Any) -> None:
    """Refuses redirects in Azure's client, for which adlfs has no option. Raises OSError if that is impossible."""
    from azure.core.pipeline.policies import AsyncRedirectPolicy

    policies = [each for each in client._pipeline._impl_policies if isinstance(each, AsyncRedirectPolicy)]
    if not policies:
        raise OSError("redirects cannot be turned off in this version of azure-storage-blob; install 12.31")

    def refuse(answer: Any) -> None:
        status, target = answer.http_response.status_code, answer.http_response.headers.get("Location")
        if target and status // 100 == 3:
            raise _redirected(status, target)

    for each in policies:
        each.get_redirect_location = refuse


@cache
def _s3_session() -> Any:
    from aiobotocore.httpsession import AIOHTTPSession

    class Session(AIOHTTPSession):  # type: ignore[misc]
        """The same session without redirects."""

        async def _get_session(self, proxy_url: str | None) -> Any:
            session = await super()._get_session(proxy_url)
            if not session.trace_configs:
                session.trace_configs.append(_no_redirects())
            return session

    return Session


def checked_store(url: str) -> tuple[Any, str]:
    """Opens a store for readers. Raises FileError for an unsupported URL or a missing package."""
    scheme = scheme_of(url)
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}{_SEPARATOR}" for name in SCHEMES)
        raise FileError(f"{url}: traces can be read from {known} and from this machine, not from {scheme!r:.20}")
    if problem := missing_package(url):
        raise FileError(f"{url}: {problem}")
    try:
        fs, path = open_store(url)
    except Exception as exc:
        raise FileError(f"{url}: {store_error(exc)}") from exc
    return fs, str(path).rstrip("/")


def with_retries(read: Callable[[], bytes], sleep: Callable[[float], None] = time.sleep) -> bytes:
    """Returns the result of `read`, with a few retries. Raises FileNotFoundError at once, else the last error."""
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


def list_url(url: str, read: Callable[[], Any]) -> Any:
    """Returns the result of `read` for this URL. Raises FileError."""
    try:
        return read()
    except FileNotFoundError:
        raise FileError(f"{url}: nothing found; check the bucket name") from None
    except Exception as exc:
        raise FileError(
            f"{url} cannot be read: {store_error(exc)}; check the address and the store's credentials"
        ) from exc


def store_error(exc: BaseException) -> str:
    """Returns the error on one line, with advice for a proxy that refuses."""
    inner: BaseException | None = exc
    while inner is not None and getattr(inner, "status", None) != 407 and "(407)" not in str(inner):
        inner = inner.__cause__ or inner.__context__
    return " ".join(f"{type(exc).__name__}: {exc}".split()) + (_PROXY if inner is not None else "")
