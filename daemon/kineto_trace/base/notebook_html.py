"""HTML for notebooks: tables and lists of facts that look alike on light and dark pages.

Every text is escaped, and what would turn its line round is spelled out. There is no style sheet, no script and no
colour: text has the notebook's own, and lines are a grey that shows on both.
"""

from collections.abc import Iterable, Sequence

from markupsafe import Markup

from kineto_trace.base.visible_text import one_line

_LINE = "1px solid rgba(128,128,128,.4)"
_CELL = f"padding:2px 10px 2px 0;border:0;border-bottom:{_LINE};vertical-align:top;"
_TITLE = Markup('<div style="font-weight:600;margin:4px 0">{}</div>')
_NOTE = Markup('<div style="opacity:.75;margin:2px 0">{}</div>')
_VALUE = Markup('<td style="{}text-align:{}">{}</td>')
_HEADING = Markup('<th style="{}text-align:{}">{}</th>')
_TABLE = Markup(
    '<div style="overflow-x:auto"><table style="border-collapse:collapse;border:0;margin:0">{}<tbody>{}</tbody>'
    "</table></div>"
)


def title(text: str) -> Markup:
    """Returns a heading."""
    return _TITLE.format(one_line(text))


def notes(texts: Iterable[str]) -> Markup:
    """Returns lines below a table."""
    return Markup("").join(_NOTE.format(one_line(text)) for text in texts)


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
