"""Sends one POST to an address of the configuration, for the processes that send webhooks and profiles.

Redirects are not followed: signed content and credentials are for the configured address only.
"""

import contextlib
import http.client
import os
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kinetod.base.http_headers import MAX_HEADER_CHARS
from kinetod.base.safe_text import proxy_secrets, redacted

_AGAIN = (408, 425, 429, 500, 502, 503, 504)
_MAX_SAID_CHARS = 300
_MAX_AFTER_S = 3600.0
_TUNNEL = re.compile(r"Tunnel connection failed: (\d{3})")  # the form of http.client, before the proxy's own words


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverAnswer:
    """The outcome. text: the problem; empty if it was accepted. again: whether a retry may succeed."""

    text: str = ""
    again: bool = False
    after_s: float = 0.0


def post(
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    *,
    ca_file: str,
    timeout_s: float,
    answer_bytes: int = 0,
    secrets: Iterable[str] = (),
) -> tuple[ReceiverAnswer, bytes]:
    """Sends the body; returns the outcome and, if it was accepted, the answer.

    ca_file: authorities (PEM); empty: the system's. answer_bytes: how much of the answer to read. secrets: texts that
    the outcome must not contain.
    """
    request = urllib.request.Request(url, data=body, headers=dict(headers), method="POST")  # noqa: S310  # checked
    try:
        with _opener(url, ca_file).open(request, timeout=timeout_s) as answer:
            return ReceiverAnswer(), answer.read(answer_bytes) if answer_bytes else b""
    except urllib.error.HTTPError as exc:
        return _refused(exc, secrets), b""
    except (OSError, http.client.HTTPException, ValueError) as exc:
        reason = exc.reason if isinstance(exc, urllib.error.URLError) else exc
        return _unreachable(str(reason) or type(reason).__name__, secrets), b""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_args: Any) -> None:
        return None


def _opener(url: str, ca_file: str) -> urllib.request.OpenerDirector:
    context = ssl.create_default_context(cafile=ca_file or None)
    handlers: list[urllib.request.BaseHandler] = [_NoRedirects(), urllib.request.HTTPSHandler(context=context)]
    if urlsplit(url).scheme == "http":  # on this host: without a proxy
        handlers.append(urllib.request.ProxyHandler({}))
    return urllib.request.build_opener(*handlers)


def _unreachable(reason: str, secrets: Iterable[str]) -> ReceiverAnswer:
    if tunnel := _TUNNEL.search(reason):
        status = int(tunnel[1])
        login = status == http.HTTPStatus.PROXY_AUTHENTICATION_REQUIRED
        what = "add a user name and password to its URL" if login else ""
        text = (
            f"the proxy in https_proxy answered {status}: {what or 'ask whoever runs it'}, or add the host to no_proxy"
        )
        return ReceiverAnswer(text=text, again=status in _AGAIN)
    hidden = redacted(reason, {*secrets, *proxy_secrets(os.environ)})
    return ReceiverAnswer(text=f"cannot be reached: {hidden}", again=True)


def _refused(exc: urllib.error.HTTPError, secrets: Iterable[str]) -> ReceiverAnswer:
    said = b""
    with exc, contextlib.suppress(OSError, http.client.HTTPException, ValueError):  # the status is enough
        said = exc.read(_MAX_SAID_CHARS + MAX_HEADER_CHARS)  # whole secrets: half of one would not be recognised
    why = redacted(said.decode("utf-8", "replace"), secrets)[:_MAX_SAID_CHARS]
    text = f"answered {exc.code} {exc.reason}"
    if 300 <= exc.code < 400:
        return ReceiverAnswer(text=f"{text}: redirects are not followed; configure the address that it redirects to")
    after = exc.headers.get("Retry-After", "")
    after_s = min(float(after), _MAX_AFTER_S) if after.isdecimal() else 0.0
    return ReceiverAnswer(text=f"{text}{': ' if why else ''}{why}", again=exc.code in _AGAIN, after_s=after_s)
