"""Heat maps as SVG: one row per place, one column per step, the darker the larger. Pure.

Theory of operation
    A map has at most MAX_ROWS by MAX_COLUMNS cells, so that it stays legible and its page small. Longer axes are
    divided into bins of neighbours, as few as that takes; a cell shows the largest value of its bin, so that a single
    slow rank or step cannot disappear. Labels stand for as many rows or columns as have room for one, and each is a
    link: to a map of what it stands for, or to the one rank or step.

    The colours are nine steps of lightness of one hue (classes "heat-0" … "heat-8" of the page's style), which can be
    told apart whatever colours somebody sees. A cell without a value has the class "heat-none".
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from kineto_trace.html.charts import coordinate

MAX_ROWS, MAX_COLUMNS = 64, 100
LEVELS = 9
WIDTH = 960
LEFT, TOP = 84, 24
LABEL_WIDTH, LABEL_HEIGHT = 62, 12  # room that a label needs
HIGHEST, LOWEST = 20, 9  # of a row

Floats = npt.NDArray[np.float64]
Span = tuple[int, int]  # places on an axis, both included
_CELL = Markup('<rect x="{}" y="{}" width="{}" height="{}" class="heat-{}"><title>{}</title></rect>')
_LABEL = Markup('<a href="{}"><text x="{}" y="{}" text-anchor="{}" class="axis">{}</text></a>')


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """What is along one side. names: of its places; href: where a label of these places leads."""

    title: str
    names: Sequence[str]
    href: Callable[[Span], str]

    def text(self, span: Span) -> str:
        """The name of a place, or the names of the first and the last one."""
        first, last = self.names[span[0]], self.names[span[1]]
        return first if span[0] == span[1] else f"{first}-{last}"


def bins(count: int, most: int) -> list[Span]:
    """Divides so many places into at most `most` bins of neighbours, all of one size but the last."""
    size = -(-count // most) if count else 1
    return [(first, min(first + size, count) - 1) for first in range(0, count, size)]


def heat_map(values: Floats, rows: Axis, columns: Axis, text: Callable[[float], str]) -> Markup:
    """Draws values[row, column]; NaN: missing. text: a value for people. Empty if no value is known."""
    known = values[np.isfinite(values)]
    if not len(known):
        return Markup("")
    row_bins, column_bins = bins(len(rows.names), MAX_ROWS), bins(len(columns.names), MAX_COLUMNS)
    cells = _largest(values, row_bins, column_bins)
    low, high = float(np.min(known)), float(np.quantile(cells[np.isfinite(cells)], 0.99))
    height = max(LOWEST, min(HIGHEST, 640 // len(row_bins)))
    width = (WIDTH - LEFT) / len(column_bins)
    parts = [
        _CELL.format(
            *(coordinate(LEFT + width * at), TOP + height * line, coordinate(width), height),
            _level(cells[line, at], low, high),
            f"{rows.title} {rows.text(row)}, {columns.title} {columns.text(column)}: {_said(cells[line, at], text)}",
        )
        for line, row in enumerate(row_bins)
        for at, column in enumerate(column_bins)
    ]
    parts += [
        _LABEL.format(rows.href(span), LEFT - 6, TOP + height * line + 10, "end", rows.text(span))
        for line, span in _labels(row_bins, -(-LABEL_HEIGHT // height))
    ]
    parts += [
        _LABEL.format(columns.href(span), coordinate(LEFT + width * at), TOP - 8, "start", columns.text(span))
        for at, span in _labels(column_bins, int(-(-LABEL_WIDTH // width)))
    ]
    summary = f"Heat map: {rows.title} by {columns.title}, from {text(low)} to {text(float(known.max()))}"
    drawn = Markup('<svg viewBox="0 0 {} {}" role="group" aria-label="{}" class="heat">{}</svg>').format(
        WIDTH, TOP + height * len(row_bins) + 4, summary, Markup("").join(parts)
    )
    return _legend(low, high, text) + drawn + _binning(row_bins, column_bins, rows, columns)


def _largest(values: Floats, rows: Sequence[Span], columns: Sequence[Span]) -> Floats:
    """The largest value of each cell; NaN if it has none."""
    filled = np.where(np.isfinite(values), values, -np.inf)
    by_row = np.maximum.reduceat(filled, [first for first, _ in rows], axis=0)
    found = np.maximum.reduceat(by_row, [first for first, _ in columns], axis=1)
    return np.where(np.isfinite(found), found, np.nan)


def _labels(spans: Sequence[Span], every: int) -> list[tuple[int, Span]]:
    """Every n-th bin with what its label stands for: itself and those up to the next label."""
    return [
        (at, (spans[at][0], spans[min(at + every, len(spans)) - 1][1])) for at in range(0, len(spans), max(every, 1))
    ]


def _level(value: float, low: float, high: float) -> int | str:
    if not np.isfinite(value):
        return "none"
    return min(LEVELS - 1, int(LEVELS * (value - low) / (high - low))) if high > low else 0


def _said(value: float, text: Callable[[float], str]) -> str:
    return text(value) if np.isfinite(value) else "not known"


def _legend(low: float, high: float, text: Callable[[float], str]) -> Markup:
    """The colours in a row between the value of the first one and that from which the last one counts."""
    count = LEVELS if high > low else 1
    colours = Markup("").join(Markup('<i class="heat-{}"></i>').format(level) for level in range(count))
    last = f"from {text(low + (high - low) * (LEVELS - 1) / LEVELS)}" if count > 1 else ""
    return Markup('<div class="legend"><span class="key scale">{} {} {}</span></div>').format(text(low), colours, last)


def _binning(row_bins: Sequence[Span], column_bins: Sequence[Span], rows: Axis, columns: Axis) -> Markup:
    """Says what a cell stands for, if it is more than one place."""
    sizes = [
        f"{spans[0][1] + 1} {axis.title}s"
        for spans, axis in ((row_bins, rows), (column_bins, columns))
        if spans[0][1] > 0
    ]
    if not sizes:
        return Markup("")
    return Markup('<p class="note">Each cell stands for {}, and shows the largest value of them.</p>').format(
        " and ".join(sizes)
    )
