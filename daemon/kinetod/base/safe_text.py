"""Makes text from outside safe for messages, logs and protobuf strings."""

import base64
import re
from collections.abc import Iterable, Mapping
from urllib.parse import quote, unquote

MAX_MESSAGE_CHARS = 500
_HIDDEN = "(hidden)"
# What looks like a secret wherever it comes from: signatures in URLs, keys in connection strings, authorisation
# headers and those of the kind of X-Api-Key, and tokens that are known by their form (Slack, GitHub, GitLab, JWT).
_PATTERNS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"((?:signature|credential|token|secret|password|passwd|pwd|(?:api|access|account)[-_]?key(?:id)?"
        r"|(?:(?<![a-z])|(?<=%[0-9a-f][0-9a-f]))sig)(?: ?= ?|%3D|['\"]: ?['\"]))[^&;\s'\"]+",
        r"((?:Authorization|Bearer|x-amz-security-token)\W{1,4})[^\s'\",]+(?: [^'\"]+)?",
        r"(\b(?:(?:x-)?(?:api|auth|access|private|vault|amz)-(?:key|token)|(?:set-)?cookie)['\"]?: ?['\"]?)[^\s'\",]+",
        r"(\b)(?:xox[a-z]-|gh[pousr]_|github_pat_|glpat-|eyJ[\w-]{8,}\.)[\w.-]{8,}",
        r"(://hooks\.slack\.com/services/)\S+",
        r"(://)[^/?#\s]+(?=@)",
        r"(://[^/?#\s:@]+:)(?!\d*/)[^\s@]+(?=@)",  # a password with a slash
        r"(\b(?:password|passwd|pwd|secret): ?)[^\s'\",;]+",
        r"(--(?:\w+-)*(?:token|password|secret|key)[ =])[^\s'\"]+",
        r"([?&](?:key|code)=)[^&;\s'\"]+",
        r"(-----BEGIN [A-Z ]*PRIVATE KEY-----)[\s\S]+?(?=-----END|$)",
        r"(['\"]\w*(?:secret|password|token|key)\w*['\"]\s*:\s*b?['\"])[^'\"]+",  # options as Python prints them
    )
)
_CONTROLS = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)], " ")
_REASON_CODE = re.compile(r"[A-Z][A-Z0-9_]{0,63}")


def clean(text: str, limit: int) -> str:
    """Returns valid UTF-8 without control characters (lone surrogates become ?), at most `limit` characters."""
    text = text[:limit]
    # most texts are; the rest takes ten times as long
    if text.isprintable() or (text := text.translate(_CONTROLS)).isprintable():
        return text
    text = text.encode("utf-8", "replace").decode()
    return "".join(char if char.isprintable() else " " for char in text)


def clean_code(text: str, otherwise: str) -> str:
    """Returns a reason code from a peer, or `otherwise` if it does not look like one."""
    return text if _REASON_CODE.fullmatch(text) else otherwise


def _spelled(char: str) -> str:
    """A pattern for a character in plain form and in the escapes of URLs, JSON and XML."""
    if char.isascii() and char.isalnum():
        return char
    number = ord(char)
    return rf"(?:\\?{re.escape(char)}|{quote(char, safe='')}|%{number:02x}|\\u{number:04x}|&#(?:{number}|x{number:x});)"


def proxy_secrets(environ: Mapping[str, str]) -> frozenset[str]:
    """Parts of proxy addresses that no message may show: passwords, and the headers made from them."""
    found = set[str]()
    for name, value in environ.items():
        if name.lower().endswith("_proxy") and "@" in value:
            user, _, password = value.rpartition("@")[0].rpartition("//")[2].partition(":")
            found |= {password, unquote(password)}
            found.add(base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode())
    return frozenset(found - {""})


def redacted(text: str, secrets: Iterable[str] = ()) -> str:
    """Returns the text on one line, without secrets and shortened."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = re.sub("".join(map(_spelled, secret)), _HIDDEN, text, flags=re.IGNORECASE)
    for pattern in _PATTERNS:
        text = pattern.sub(lambda match: match[1] + _HIDDEN, text)
    return clean(" ".join(text.split()), MAX_MESSAGE_CHARS)
