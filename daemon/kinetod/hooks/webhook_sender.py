"""Sends one webhook: `python -m kinetod.hooks.webhook_sender`, a process of its own, since resolving names may hang
for long.

Standard input has one line of JSON (Delivery) and then the body; standard output gets one line of JSON (Answer).
"""

import http.client
import json
import ssl
import sys
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from kinetod import __version__
from kinetod.base import webhook_signature
from kinetod.sandbox.confined_jobs import die_with_parent

_AGAIN = (408, 425, 429, 500, 502, 503, 504)
_MAX_ANSWER_BYTES = 300
_MAX_AFTER_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What to send, and where. secret_file, ca_file: a path, or empty."""

    url: str
    message_id: str
    secret_file: str = ""
    ca_file: str = ""
    timeout_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverAnswer:
    """The outcome. text: what went wrong; empty if it was accepted. again: whether a retry may succeed."""

    text: str = ""
    again: bool = False
    after_s: float = 0.0


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A signed message is for the address that was configured, and no other."""

    def redirect_request(self, *_args: Any) -> None:
        return None


def deliver(delivery: Delivery, body: bytes, now: int) -> ReceiverAnswer:
    """One POST. now: Unix seconds."""
    try:
        secret = webhook_signature.secret_in(Path(delivery.secret_file).read_bytes()) if delivery.secret_file else None
    except (OSError, ValueError) as exc:
        return ReceiverAnswer(text=f"the secret {delivery.secret_file} cannot be used: {exc}", again=True)
    headers = {
        "Content-Type": "application/json",
        "User-Agent": f"kinetod/{__version__}",
        **webhook_signature.headers(secret, delivery.message_id, now, body),
    }
    request = urllib.request.Request(delivery.url, data=body, headers=headers, method="POST")  # noqa: S310  # checked
    try:
        with _opener(delivery).open(request, timeout=delivery.timeout_s):
            return ReceiverAnswer()
    except urllib.error.HTTPError as exc:
        return _refused(exc)
    except (OSError, http.client.HTTPException, ValueError) as exc:
        reason = exc.reason if isinstance(exc, urllib.error.URLError) else exc
        return ReceiverAnswer(text=f"cannot be reached: {str(reason) or type(reason).__name__}", again=True)


def _opener(delivery: Delivery) -> urllib.request.OpenerDirector:
    context = ssl.create_default_context(cafile=delivery.ca_file or None)
    handlers: list[urllib.request.BaseHandler] = [_NoRedirects(), urllib.request.HTTPSHandler(context=context)]
    if urlsplit(delivery.url).scheme == "http":  # on this host: through no proxy
        handlers.append(urllib.request.ProxyHandler({}))
    return urllib.request.build_opener(*handlers)


def _refused(exc: urllib.error.HTTPError) -> ReceiverAnswer:
    with exc:
        said = " ".join(exc.read(_MAX_ANSWER_BYTES).decode("utf-8", "replace").split())
    text = f"answered {exc.code} {exc.reason}"
    if 300 <= exc.code < 400:
        return ReceiverAnswer(text=f"{text}: redirects are not followed; configure the address that it points to")
    after = exc.headers.get("Retry-After", "")
    after_s = min(float(after), _MAX_AFTER_S) if after.isdecimal() else 0.0
    return ReceiverAnswer(text=f"{text}{': ' if said else ''}{said}", again=exc.code in _AGAIN, after_s=after_s)


def main(stdin: IO[bytes], stdout: IO[str]) -> int:
    """Does what standard input says."""
    delivery = Delivery(**json.loads(stdin.readline()))
    stdout.write(json.dumps(asdict(deliver(delivery, stdin.read(), int(time.time())))) + "\n")
    return 0


if __name__ == "__main__":
    die_with_parent()
    sys.exit(main(sys.stdin.buffer, sys.stdout))
