"""Text from outside made safe for messages, logs and protobuf strings."""

import re

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
