"""Headers of a webhook: those from a file, and a signature.

The file has one `Name: value` per line, such as an Authorization header. Lines with # are comments. The signature
follows the rules of Standard Webhooks, whose libraries verify it in any language.
"""

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Iterator, Mapping

MAX_HEADERS = 32
MAX_HEADER_CHARS = 8192
_MIN_SECRET_CHARS = 6
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")  # a token of RFC 9110
_OURS = frozenset(("content-type", "content-length", "content-encoding", "transfer-encoding", "host", "connection"))
LEAST_BYTES = 16
_PREFIX = "whsec_"


def headers_in(content: bytes) -> dict[str, str]:
    """The headers by name, in lower case. Raises ValueError, whose message does not contain a value."""
    found: dict[str, str] = {}
    try:
        lines = content.decode("ascii").splitlines()
    except UnicodeDecodeError:
        raise ValueError("contains non-ASCII bytes") from None
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, separator, value = line.partition(":")
        name, value = name.strip().lower(), value.strip()
        if not separator or not _NAME.fullmatch(name) or not value.isprintable() or len(value) > MAX_HEADER_CHARS:
            raise ValueError(f"line {number} is not of the form `Name: value`")
        if name in _OURS:
            raise ValueError(f"line {number} sets {name}, which kinetod sets itself")
        found[name] = value
    if len(found) > MAX_HEADERS:
        raise ValueError(f"has {len(found)} headers; at most {MAX_HEADERS} are allowed")
    return found


def secrets_in(headers: Mapping[str, str]) -> Iterator[str]:
    """The values of headers, and the parts of them that are long enough to be keys."""
    for value in headers.values():
        yield from (part for part in (value, *value.split()) if len(part) >= _MIN_SECRET_CHARS)


def webhook_secret_in(content: bytes) -> bytes:
    """The key in a file: base64 after `whsec_`, or else the bytes without surrounding whitespace. Raises ValueError."""
    content = content.strip()
    if content.startswith(_PREFIX.encode()):
        try:
            content = base64.b64decode(content.removeprefix(_PREFIX.encode()), validate=True)
        except binascii.Error as exc:
            raise ValueError(f"has invalid base64 after {_PREFIX}: {exc}") from exc
    if len(content) < LEAST_BYTES:
        raise ValueError(f"has {len(content)} bytes; a secret needs at least {LEAST_BYTES}: openssl rand -base64 32")
    return content


def signed_headers(secret: bytes | None, message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """The headers with id and time, signed if there is a secret. timestamp: Unix seconds."""
    found = {"webhook-id": message_id, "webhook-timestamp": str(timestamp)}
    if secret is not None:
        signed = hmac.digest(secret, f"{message_id}.{timestamp}.".encode() + body, hashlib.sha256)
        found["webhook-signature"] = f"v1,{base64.b64encode(signed).decode()}"
    return found
