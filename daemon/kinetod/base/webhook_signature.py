"""The signature of a webhook, by the rules of Standard Webhooks, whose libraries verify it in any language."""

import base64
import binascii
import hashlib
import hmac

LEAST_BYTES = 16
_PREFIX = "whsec_"


def secret_in(content: bytes) -> bytes:
    """The key in a file: `whsec_` and base64, else the bytes without white space around them. Raises ValueError."""
    content = content.strip()
    if content.startswith(_PREFIX.encode()):
        try:
            content = base64.b64decode(content.removeprefix(_PREFIX.encode()), validate=True)
        except binascii.Error as exc:
            raise ValueError(f"has {_PREFIX} and then no base64: {exc}") from exc
    if len(content) < LEAST_BYTES:
        raise ValueError(f"holds {len(content)} bytes; a secret has {LEAST_BYTES} or more: openssl rand -base64 32")
    return content


def headers(secret: bytes | None, message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """Who and when, signed if there is a secret. timestamp: Unix seconds."""
    found = {"webhook-id": message_id, "webhook-timestamp": str(timestamp)}
    if secret is not None:
        signed = hmac.digest(secret, f"{message_id}.{timestamp}.".encode() + body, hashlib.sha256)
        found["webhook-signature"] = f"v1,{base64.b64encode(signed).decode()}"
    return found
