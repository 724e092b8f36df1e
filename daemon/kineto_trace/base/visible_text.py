r"""Texts of others for terminals, logs and tables: what would steer them, or turn their lines round, is spelled out.

A label, a process's command line, a kernel's name or a server's message may hold escape sequences, which move the
cursor, rewrite what stands above, set a terminal's title or put text on its input; C1 controls do the same in one
character. The controls of bidirectional text show a line in another order than it has. All of them become `\x1b`,
`\u202e` and the like. A lone surrogate could not be written at all.
"""

import re

_BIDIRECTIONAL = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_OTHERS = f"\\x7f-\\x9f\u2028\u2029\ufeff\ud800-\udfff{_BIDIRECTIONAL}"
_CONTROLS = re.compile(f"[\\x00-\\x08\\x0b-\\x1f{_OTHERS}]")  # all but tabs and ends of lines
_LINE_CONTROLS = re.compile(f"[\\x00-\\x1f{_OTHERS}]")


def visible(text: str) -> str:
    """Returns the text with every control character except line feeds and tabs spelled out."""
    return text if text.isprintable() else _CONTROLS.sub(_spelled, text)  # most are: ten times as fast


def one_line(text: str) -> str:
    """Does the same and keeps it on one line, so that no text can add a line to a table or a log."""
    return text if text.isprintable() else _LINE_CONTROLS.sub(_spelled, text)


def in_json(text: str) -> str:
    """Escapes control characters that JSON leaves as they are; the value stays the same."""
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _spelled(match: re.Match[str]) -> str:
    number = ord(match[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"
