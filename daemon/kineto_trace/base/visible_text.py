"""Text that is safe to show: in a terminal, and as HTML in notebooks.

A label, a process's command line, a kernel's name or a server's message may hold escape sequences, which move the
cursor, rewrite what stands above, set a terminal's title or put text on its input; C1 controls do the same in one
character. The controls of bidirectional text show a line in another order than it has. All of them become `\\x1b`,
`\\u202e` and the like. A lone surrogate could not be written at all.

HTML for notebooks: tables and lists of facts that look the same on light and dark pages.

Every text is escaped, including bidirectional controls. There is no style sheet, no script and no colour: text has the
notebook's own, and lines are a grey that shows on both.
"""

import re
from collections.abc import Iterable, Sequence

from markupsafe import Markup

_BIDIRECTIONAL = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_OTHERS = f"\\x7f-\\x9f\u2028\u2029\ufeff\ud800-\udfff{_BIDIRECTIONAL}"
_CONTROLS = re.compile(f"[\\x00-\\x08\\x0b-\\x1f{_OTHERS}]")  # all but tabs and line feeds
_LINE_CONTROLS = re.compile(f"[\\x00-\\x1f{_OTHERS}]")
_LINE = "1px solid rgba(128,128,128,.4)"
_CELL = f"padding:2px 10px 2px 0;border:0;border-bottom:{_LINE};vertical-align:top;"
_TITLE = Markup('<div style="font-weight:600;margin:4px 0">{}</div>')
_NOTE = Markup('<div style="opacity:.75;margin:2px 0">{}</div>')
_LINES = Markup('<pre style="margin:4px 0;overflow-x:auto">{}</pre>')
_VALUE = Markup('<td style="{}text-align:{}">{}</td>')
_HEADING = Markup('<th style="{}text-align:{}">{}</th>')
_TABLE = Markup(
    '<div style="overflow-x:auto"><table style="border-collapse:collapse;border:0;margin:0">{}<tbody>{}</tbody>'
    "</table></div>"
)


def visible(text: str) -> str:
    """Returns the text with every control character except line feeds and tabs escaped."""
    return text if text.isprintable() else _CONTROLS.sub(_spelled, text)  # most texts are printable: ten times as fast


def one_line(text: str) -> str:
    """Does the same and keeps it on one line, so that no text can add a line to a table or a log."""
    return text if text.isprintable() else _LINE_CONTROLS.sub(_spelled, text)


def in_json(text: str) -> str:
    """Escapes control characters that JSON leaves as they are; the value stays the same."""
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _spelled(match: re.Match[str]) -> str:
    number = ord(match[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"


def title(text: str) -> Markup:
    """Returns a heading."""
    return _TITLE.format(one_line(text))


def notes(texts: Iterable[str]) -> Markup:
    """Returns lines below a table."""
    return Markup("").join(_NOTE.format(one_line(text)) for text in texts)


def lines(texts: Iterable[str]) -> Markup:
    """Returns lines whose columns stay below each other."""
    return _LINES.format("\n".join(map(one_line, texts)))


def facts(pairs: Iterable[tuple[str, str]]) -> Markup:
    """Returns a table of names and values, one pair in a line."""
    return _TABLE.format("", Markup("").join(_row(pair, (False, False)) for pair in pairs))


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[bool] = ()) -> Markup:
    """Returns a table. numbers: for each column, whether its values are aligned to the right; empty for none."""
    right = numbers or [False] * len(headings)
    body = Markup("").join(_row(row, right) for row in rows)
    return _TABLE.format(Markup("<thead>{}</thead>").format(_row(headings, right, _HEADING)), body)


def _row(texts: Sequence[str], right: Sequence[bool], cell: Markup = _VALUE) -> Markup:
    cells = (
        cell.format(_CELL, "right" if aligned else "left", one_line(text))
        for text, aligned in zip(texts, right, strict=True)
    )
    return Markup('<tr style="background:none">{}</tr>').format(Markup("").join(cells))
