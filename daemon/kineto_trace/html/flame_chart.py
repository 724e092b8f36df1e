"""Flame graphs as SVG: a row for each level, a rectangle for each frame, as wide as its time.

Colours and text sizes are classes defined by the page's style, so that they follow light and dark; nothing needs a
script. Without a baseline the colour shows the kind of a frame, with one its difference: red for more, blue for less
(after ColorBrewer's RdBu, which colour-blind readers can distinguish), and the title says it in words.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from markupsafe import Markup

from kineto_trace.analysis.flame_trees import NS, FlameKind, FlameNode
from kineto_trace.base.quantities import format_duration, share, shortened, times
from kineto_trace.base.visible_text import one_line

WIDTH = 1200  # of the view box
ROW, GAP = 18, 1
CHARACTER = 6.4  # width of a character at the size of the labels
LEAST_LABEL = 3  # characters
MAX_NAME = 240  # characters of a name in a title
LEVELS = (0.02, 0.1, 0.3, 0.7)  # smallest difference, as a share of the larger side, for each strength of a colour

_FRAME = Markup('<{} class="frame {}"><title>{}</title><rect x="{}" y="{}" width="{}" height="{}"/>{}</{}>')
_LABEL = Markup('<text x="{}" y="{}">{}</text>')


def flame_chart(
    root: FlameNode,
    *,
    name: str,
    link: Callable[[FlameNode], str] | None = None,
    whole: int | None = None,
    unit: str = NS,
    periods: float = 1,
    per: str = "",
    upward: bool = False,
) -> Markup:
    """Draws a frame and everything that it called; empty if it has no width.

    name: description for those who cannot see the drawing.
    link: the address of a frame; "" for none.
    whole: the basis of shares (None: the frame's total).
    unit: of the values.
    periods, per: divisor of differences (number of steps or seconds), and its unit.
    upward: draws the frame below what it "called", for its callers.
    """
    if root.width <= 0:
        return Markup("")
    texts = FrameTexts(whole=root.total if whole is None else whole, unit=unit, periods=periods, per=per)
    placed = list(_levels(root))
    height = (max(level for level, _ in placed) + 1) * (ROW + GAP)
    frames = []
    for level, node in placed:
        top = level * (ROW + GAP)
        frames.append(_frame(node, root, height - top - ROW - GAP if upward else top, texts, link))
    return Markup('<svg class="flame" viewBox="0 0 {} {}" role="group" aria-label="{}">{}</svg>').format(
        WIDTH, height, name, Markup("").join(frames)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameTexts:
    """Titles of frames. The fields are those of `flame_chart`."""

    whole: int
    unit: str
    periods: float
    per: str

    def title(self, node: FlameNode) -> str:
        """Returns the frame's name, its total and own value, its share, and its difference from the baseline."""
        said = [f"{self.amount(node.total)}, {share(node.total, self.whole)}"]
        if node.children or node.own != node.total:
            said.append(f"self {self.amount(node.own)}")
        if node.kind is FlameKind.OTHERS:
            said.append(f"{times(node.frames, 'frame')} too narrow to draw")
        if node.base_total is not None:
            said.append(self.difference(node.total, node.base_total))
        return f"{one_line(shortened(node.name, MAX_NAME))}\n{'; '.join(said)}"

    def amount(self, value: float) -> str:
        """Returns a value with its unit."""
        return format_duration(value) if self.unit == NS else f"{value:,.0f} {self.unit}"

    def difference(self, value: float, base: float) -> str:
        """Returns the signed difference from the baseline, per step or second."""
        delta = (value - base) / self.periods
        sign = "+" if delta >= 0 else "-"
        per = f" per {self.per}" if self.per else ""
        relative = f" ({sign}{share(abs(value - base), base)})" if base else " (not in the baseline)"
        return f"{sign}{self.amount(abs(delta))}{per}{relative}"


def difference_class(value: float, base: float) -> str:
    """Returns the colour of a frame with time `value`, and `base` in the baseline: more-4 … same … less-4."""
    relative = (value - base) / max(value, base, 1e-9)
    strength = sum(abs(relative) >= level for level in LEVELS)
    return "same" if not strength else f"{'more' if relative > 0 else 'less'}-{strength}"


def _levels(root: FlameNode) -> Iterator[tuple[int, FlameNode]]:
    """Yields the frames with their levels, callers before callees and from left to right."""
    waiting = [(0, root)]
    while waiting:
        level, node = waiting.pop()
        yield level, node
        waiting += [(level + 1, child) for child in reversed(node.children)]


def _frame(
    node: FlameNode, root: FlameNode, top: int, texts: FrameTexts, link: Callable[[FlameNode], str] | None
) -> Markup:
    left = WIDTH * (node.start - root.start) / root.width
    width = WIDTH * node.width / root.width
    address = link(node) if link else ""
    room = int((width - 6) / CHARACTER)
    label = _LABEL.format(f"{left + 4:.2f}", top + ROW - 5, _label(node.name, room)) if room >= LEAST_LABEL else ""
    tag = Markup('a href="{}"').format(address) if address else Markup("g")
    colour = node.kind if node.base_total is None else difference_class(node.total, node.base_total)
    return _FRAME.format(
        tag, colour, texts.title(node), f"{left:.2f}", top, f"{width:.2f}", ROW, label, "a" if address else "g"
    )


def _label(name: str, room: int) -> str:
    text = one_line(name)
    return text if len(text) <= room else f"{text[: room - 1]}…"
