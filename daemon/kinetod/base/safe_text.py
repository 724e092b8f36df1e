"""Text from outside made safe for messages, logs and protobuf strings."""

import re
from collections.abc import Iterable

MAX_MESSAGE_CHARS = 500
_HIDDEN = "(hidden)"
# What looks like a secret wherever it comes from: signatures in URLs, keys in connection strings, authorisation
# headers.
_PATTERNS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"((?:X-Amz-(?:Signature|Credential|Security-Token)|sig|AccountKey|SharedAccessSignature|access_token)=)[^&;\s'\"]+",
        r"((?:Authorization|Bearer|x-amz-security-token)\W{1,4})[^\s'\",]+(?: [^'\"]+)?",
        r"(://)[^/@\s]+(?=@)",
    )
)
_CONTROLS = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)], " ")
_REASON_CODE = re.compile(r"[A-Z][A-Z0-9_]{0,63}")


def clean(text: str, limit: int) -> str:
    """Valid UTF-8 without control characters (lone surrogates become ?), at most `limit` characters."""
    text = text[:limit]
    if text.isprintable() or (text := text.translate(_CONTROLS)).isprintable():  # most are; the rest takes ten times
        return text
    text = text.encode("utf-8", "replace").decode()
    return "".join(char if char.isprintable() else " " for char in text)


def clean_code(text: str, otherwise: str) -> str:
    """A reason code from a peer, or `otherwise` if it does not look like one."""
    return text if _REASON_CODE.fullmatch(text) else otherwise


def redacted(text: str, secrets: Iterable[str] = ()) -> str:
    """The text on one line without secrets and not too long."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, _HIDDEN)
    for pattern in _PATTERNS:
        text = pattern.sub(lambda match: match[1] + _HIDDEN, text)
    return clean(" ".join(text.split()), MAX_MESSAGE_CHARS)
