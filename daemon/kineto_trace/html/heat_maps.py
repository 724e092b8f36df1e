"""Heat maps of values over time, and the map of the blocks of memory.

Theory of operation
    A map has at most MAX_ROWS by MAX_COLUMNS cells, so that it stays legible and its page small. Longer axes are
    divided into as few bins of neighbours as possible; a cell shows the largest value of its bin, so that a single slow
    rank or step cannot disappear. A label covers as many rows or columns as it needs room, and links to a map of these,
    or to the single rank or step.

    The colours are nine steps of lightness of one hue (classes "heat-0" … "heat-8" of the page's style), which
    colour-blind readers can distinguish. A cell without a value has the class "heat-none".

Blocks of memory as bars whose lengths are their bytes, one after the other over several lines. Pure.

A map has the same number of lines whatever its size, so a line is an equal part of all bytes; a block that does not end
with its line continues in the next one. Blocks too small to be seen are drawn together, last.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from kineto_trace.base.array_types import Floats
from kineto_trace.html.charts import SERIES, coordinate

MAX_ROWS, MAX_COLUMNS = 64, 100
LEVELS = 9
WIDTH = 960
LEFT, TOP = 84, 24
LABEL_WIDTH, LABEL_HEIGHT = 62, 12  # room that a label needs
HIGHEST, LOWEST = 20, 9  # of a row
Span = tuple[int, int]  # places on an axis, both included
_CELL = Markup('<rect x="{}" y="{}" width="{}" height="{}" class="heat-{}"><title>{}</title></rect>')
_LABEL = Markup('<a href="{}"><text x="{}" y="{}" text-anchor="{}" class="axis">{}</text></a>')
BLOCK_WIDTH, LINES, LINE_HEIGHT, GAP = 960, 6, 22, 3
LEAST_WIDTH = 1.0  # of a block with a bar of its own
_BAR = Markup('<rect x="{}" y="{}" width="{}" height="{}" class="series-{}"><title>{}</title></rect>')


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One side of a map. names: of its places; href: the link of a label for these places."""

    title: str
    names: Sequence[str]
    href: Callable[[Span], str]

    def text(self, span: Span) -> str:
        """Returns the name of a place, or the names of the first and the last one."""
        first, last = self.names[span[0]], self.names[span[1]]
        return first if span[0] == span[1] else f"{first}-{last}"


@dataclass(frozen=True, slots=True)
class Block:
    """One block. size: bytes, above 0; series: its colour; title: its description."""

    size: int
    series: int
    title: str


def bins(count: int, most: int) -> list[Span]:
    """Divides so many places into at most `most` bins of neighbours, all of one size but the last."""
    size = -(-count // most) if count else 1
    return [(first, min(first + size, count) - 1) for first in range(0, count, size)]


def heat_map(values: Floats, rows: Axis, columns: Axis, text: Callable[[float], str]) -> Markup:
    """Draws values[row, column]; NaN if missing. text: formats a value. Empty if no value is known."""
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
    """Returns the largest value of each cell; NaN if it has none."""
    filled = np.where(np.isfinite(values), values, -np.inf)
    by_row = np.maximum.reduceat(filled, [first for first, _ in rows], axis=0)
    found = np.maximum.reduceat(by_row, [first for first, _ in columns], axis=1)
    return np.where(np.isfinite(found), found, np.nan)


def _labels(spans: Sequence[Span], every: int) -> list[tuple[int, Span]]:
    """Returns every n-th bin with the places of its label: itself and those up to the next label."""
    return [
        (at, (spans[at][0], spans[min(at + every, len(spans)) - 1][1])) for at in range(0, len(spans), max(every, 1))
    ]


def _level(value: float, low: float, high: float) -> int | str:
    if not np.isfinite(value):
        return "none"
    return min(LEVELS - 1, int(LEVELS * (value - low) / (high - low))) if high > low else 0


def _said(value: float, text: Callable[[float], str]) -> str:
    return text(value) if np.isfinite(value) else "unknown"


def _legend(low: float, high: float, text: Callable[[float], str]) -> Markup:
    """Draws the colours in a row, between the value of the first one and that from which the last one counts."""
    count = LEVELS if high > low else 1
    colours = Markup("").join(Markup('<i class="heat-{}"></i>').format(level) for level in range(count))
    last = f"from {text(low + (high - low) * (LEVELS - 1) / LEVELS)}" if count > 1 else ""
    return Markup('<div class="legend"><span class="key scale">{} {} {}</span></div>').format(text(low), colours, last)


def _binning(row_bins: Sequence[Span], column_bins: Sequence[Span], rows: Axis, columns: Axis) -> Markup:
    """Explains the places of a cell, if there is more than one."""
    sizes = [
        f"{spans[0][1] + 1} {axis.title}s"
        for spans, axis in ((row_bins, rows), (column_bins, columns))
        if spans[0][1] > 0
    ]
    if not sizes:
        return Markup("")
    return Markup('<p class="note">Each cell shows the largest value of {}.</p>').format(" and ".join(sizes))


def block_map(blocks: Sequence[Block], summary: str) -> Markup:
    """Draws the blocks in their order; empty if there are none."""
    total = sum(block.size for block in blocks)
    if not total:
        return Markup("")
    scale = LINES * BLOCK_WIDTH / total
    own = [block for block in blocks if block.size * scale >= LEAST_WIDTH]
    small = [block for block in blocks if block.size * scale < LEAST_WIDTH]
    if small:
        own.append(Block(sum(block.size for block in small), SERIES - 1, f"{len(small):,} blocks too small to draw"))
    bars, at = Markup(""), 0.0
    for block in own:
        end = at + block.size * scale
        while end - at > 1e-6:
            line = min(int(at / BLOCK_WIDTH + 1e-9), LINES - 1)
            stop = end if line == LINES - 1 else min(end, (line + 1.0) * BLOCK_WIDTH)
            x, y = at - line * BLOCK_WIDTH, line * (LINE_HEIGHT + GAP)
            bars += _BAR.format(
                coordinate(x), y, coordinate(stop - at), LINE_HEIGHT, block.series % SERIES, block.title
            )
            at = stop
        at = end
    height = LINES * (LINE_HEIGHT + GAP) - GAP
    return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}" class="blocks">{}</svg>').format(
        BLOCK_WIDTH, height, summary, bars
    )
