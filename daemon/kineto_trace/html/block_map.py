"""Blocks of memory as bars whose lengths are their bytes, one after the other over several lines. Pure.

A map has the same number of lines whatever its size, so that a line stands for an equal part of all bytes; a block
that does not end with its line goes on in the next one. Blocks too small to be seen are drawn together, last.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from kineto_trace.html.charts import SERIES, coordinate

WIDTH, LINES, LINE_HEIGHT, GAP = 960, 6, 22, 3
LEAST_WIDTH = 1.0  # of a block with a bar of its own
_BAR = Markup('<rect x="{}" y="{}" width="{}" height="{}" class="series-{}"><title>{}</title></rect>')


@dataclass(frozen=True, slots=True)
class Block:
    """One block. size: bytes, above 0; series: its colour; title: what it is."""

    size: int
    series: int
    title: str


def block_map(blocks: Sequence[Block], summary: str) -> Markup:
    """Draws the blocks in their order; empty if there are none."""
    total = sum(block.size for block in blocks)
    if not total:
        return Markup("")
    scale = LINES * WIDTH / total
    own = [block for block in blocks if block.size * scale >= LEAST_WIDTH]
    small = [block for block in blocks if block.size * scale < LEAST_WIDTH]
    if small:
        own.append(Block(sum(block.size for block in small), SERIES - 1, f"{len(small):,} blocks too small to be seen"))
    bars, at = Markup(""), 0.0
    for block in own:
        end = at + block.size * scale
        while end - at > 1e-6:
            line = min(int(at / WIDTH + 1e-9), LINES - 1)
            stop = end if line == LINES - 1 else min(end, (line + 1.0) * WIDTH)
            x, y = at - line * WIDTH, line * (LINE_HEIGHT + GAP)
            bars += _BAR.format(
                coordinate(x), y, coordinate(stop - at), LINE_HEIGHT, block.series % SERIES, block.title
            )
            at = stop
        at = end
    height = LINES * (LINE_HEIGHT + GAP) - GAP
    return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}" class="blocks">{}</svg>').format(
        WIDTH, height, summary, bars
    )
