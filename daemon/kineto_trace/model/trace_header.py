"""The members of a Chrome trace beside its events: JSON text, valid or repaired."""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|\\|[\x00-\x1f]')
_WORD = re.compile(r"N/A|-?\bnan\b|-?\binf\b|\bNone\b")
_WORDS = {"N/A": '"N/A"', "nan": "NaN", "-nan": "NaN", "inf": "Infinity", "-inf": "-Infinity", "None": "null"}
MAX_BASE_NS = 1 << 62


class Mended(NamedTuple):
    """A JSON text, repaired if necessary, and its value."""

    text: str
    value: Any


def mended(text: str) -> Mended:
    """Returns a valid text as it is, and any other with its escapes, control characters and words repaired.

    A text that cannot be repaired becomes a JSON string.
    """
    try:
        return Mended(text, json.loads(text))
    except (ValueError, RecursionError):
        pass
    parts, at = [], 0
    for found in _STRING.finditer(text):
        parts += [_words(text[at : found.start()]), _ESCAPE.sub(_escaped, found[0])]
        at = found.end()
    better = "".join(parts) + _words(text[at:])
    try:
        return Mended(better, json.loads(better))
    except (ValueError, RecursionError):
        return Mended(json.dumps(text), text)


def _words(text: str) -> str:
    return _WORD.sub(lambda found: _WORDS[found[0]], text)


def _escaped(found: re.Match[str]) -> str:
    text = found[0]
    if text == "\\":
        return "\\\\"
    return text if text[0] == "\\" else f"\\u{ord(text):04x}"


def value(head: Mapping[str, str], name: str) -> Any:
    """Returns the value of a member; None if it is missing."""
    text = head.get(name)
    return None if text is None else mended(text).value


def base_ns(head: Mapping[str, str], notes: list[str]) -> int:
    """Returns the base of all event times (Unix ns); 0 if the file does not state it."""
    base = value(head, "baseTimeNanoseconds")
    if base is None:
        return 0
    if isinstance(base, float) and base.is_integer():
        base = int(base)
    if isinstance(base, bool) or not isinstance(base, int) or not 0 <= base < MAX_BASE_NS:
        notes.append(f"baseTimeNanoseconds is {str(base)[:40]}: times are as the events have them")
        return 0
    return base
