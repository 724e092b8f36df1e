"""Editors whose links open a file at a line: by name, or by a template of one's own."""

import re
from collections.abc import Mapping

EDITORS: Mapping[str, str] = {
    "vscode": "vscode://file{path}:{line}",
    "cursor": "cursor://file{path}:{line}",
    "pycharm": "pycharm://open?file={path}&line={line}",
}
_TEMPLATE = re.compile(r"[a-z][a-z0-9+.-]*:[\x21-\x7e]+")
_ACTS = ("javascript:", "data:", "vbscript:", "blob:", "about:")  # on the page itself


def parse_editor(text: str) -> str:
    """The template of an editor. Raises ValueError."""
    if text in EDITORS:
        return EDITORS[text]
    if not _TEMPLATE.fullmatch(text) or text.startswith(_ACTS) or "{path}" not in text or "{line}" not in text:
        names = ", ".join(EDITORS)
        raise ValueError(f"expected {names}, or an address with {{path}} and {{line}}, got {text!r}")
    return text
