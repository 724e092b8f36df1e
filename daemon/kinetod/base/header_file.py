"""A file with HTTP headers, one `Name: value` per line, such as an Authorization header. Lines with # are comments."""

import re
from collections.abc import Iterator, Mapping

MAX_HEADERS = 32
MAX_HEADER_CHARS = 8192
_MIN_SECRET_CHARS = 6
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")  # a token of RFC 9110
_OURS = frozenset(("content-type", "content-length", "content-encoding", "transfer-encoding", "host", "connection"))


def headers_in(content: bytes) -> dict[str, str]:
    """The headers by name, in lower case. Raises ValueError, whose text does not show a value."""
    found: dict[str, str] = {}
    try:
        lines = content.decode("ascii").splitlines()
    except UnicodeDecodeError:
        raise ValueError("has bytes that are not ASCII") from None
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, separator, value = line.partition(":")
        name, value = name.strip().lower(), value.strip()
        if not separator or not _NAME.fullmatch(name) or not value.isprintable() or len(value) > MAX_HEADER_CHARS:
            raise ValueError(f"line {number} is not `Name: value`")
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
