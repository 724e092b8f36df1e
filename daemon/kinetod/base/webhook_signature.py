"""The signature of a webhook, by the rules of Standard Webhooks, whose libraries verify it in any language."""

import base64
import binascii
import hashlib
import hmac

LEAST_BYTES = 16
_PREFIX = "whsec_"


def secret_in(content: bytes) -> bytes:
    """The key in a file: base64 after `whsec_`, or else the bytes without surrounding whitespace. Raises ValueError."""
    content = content.strip()
    if content.startswith(_PREFIX.encode()):
        try:
            content = base64.b64decode(content.removeprefix(_PREFIX.encode()), validate=True)
        except binascii.Error as exc:
            raise ValueError(f"has no valid base64 after {_PREFIX}: {exc}") from exc
    if len(content) < LEAST_BYTES:
        raise ValueError(f"has {len(content)} bytes; a secret needs {LEAST_BYTES} or more: openssl rand -base64 32")
    return content


def headers(secret: bytes | None, message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """The headers with id and time, signed if there is a secret. timestamp: Unix seconds."""
    found = {"webhook-id": message_id, "webhook-timestamp": str(timestamp)}
    if secret is not None:
        signed = hmac.digest(secret, f"{message_id}.{timestamp}.".encode() + body, hashlib.sha256)
        found["webhook-signature"] = f"v1,{base64.b64encode(signed).decode()}"
    return found
