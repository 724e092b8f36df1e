"""The map of a memory snapshot: a bar for each segment, with its blocks in the order of addresses. Pure.

Theory of operation
    A bar's width is its segment's share of the largest one drawn, but always wide enough to be seen. At most
    MAX_SEGMENTS are drawn, the largest first. Neighbours that are too narrow to be seen are one piece, in the colour of
    the largest of them, with the number of its blocks; so there are at most about MAX_PIECES. A piece links to its
    block, the label of a bar to the segment alone. The labels can be reached by the keyboard; the pieces cannot, since
    the page of a segment lists its blocks.

    The colours of the states differ in lightness, too.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from kineto_trace.base.quantities import format_size, times
from kineto_trace.snapshots.snapshot_reader import (
    ACTIVE,
    AWAITING,
    INACTIVE,
    MemorySnapshot,
    SnapshotBlock,
    SnapshotSegment,
)
from kineto_trace.snapshots.snapshot_results import address_text, place_of

MAX_SEGMENTS = 60
MAX_PIECES = 8000
LEAST_WIDTH = 0.15  # % of the widest bar: minimum for a piece
LEAST_BAR = 4.0  # % of the widest bar
CLASSES = {ACTIVE: "active", AWAITING: "awaiting", INACTIVE: "inactive"}
_NAMES = {ACTIVE: "in use", AWAITING: "freed, but another stream still uses it", INACTIVE: "free"}
_BLOCK = Markup(
    '<a href="{}" tabindex="-1"><rect x="{}" y="0" width="{}" height="1" class="block-{}{}"><title>{}</title></rect>'
    "</a>"
)
_ROW = Markup(
    '<div class="chart-row"><span class="chart-label"><a href="{}">{}</a></span>'
    '<svg viewBox="0 0 100 1" preserveAspectRatio="none" role="group" aria-label="{}" class="segment">{}</svg>'
    '<span class="chart-value">{}</span></div>'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MapLinks:
    """The links of parts of the map. chosen: device and address of the block that is shown."""

    segment: Callable[[SnapshotSegment], str]
    block: Callable[[SnapshotSegment, SnapshotBlock], str]
    chosen: tuple[int, int] | None = None


@dataclass(slots=True)
class _Piece:
    """Blocks that are drawn as one. first: the block that it links to."""

    first: SnapshotBlock
    size: int
    blocks: int = 1


def segment_map(snapshot: MemorySnapshot, segments: Sequence[SnapshotSegment], links: MapLinks) -> Markup:
    """Draws these segments; empty if there are none."""
    shown = sorted((each for each in segments if each.size), key=lambda each: (-each.size, each.device, each.address))
    drawn = shown[:MAX_SEGMENTS]
    if not drawn:
        return Markup("")
    widths = [max(100 * segment.size / drawn[0].size, LEAST_BAR) for segment in drawn]
    many = sum(len(segment.blocks) for segment in drawn) > MAX_PIECES
    least = max(LEAST_WIDTH, 2 * sum(widths) / MAX_PIECES) if many else LEAST_WIDTH
    rows = Markup("").join(
        _row(snapshot, segment, (width, least), links) for segment, width in zip(drawn, widths, strict=True)
    )
    legend = Markup("").join(
        Markup('<span class="key"><i class="block-{}"></i>{}</span>').format(CLASSES[state], name)
        for state, name in _NAMES.items()
    )
    rest = shown[MAX_SEGMENTS:]
    return Markup('<div class="legend">{}</div><div class="chart-rows">{}</div>{}').format(
        legend, rows, _more(rest) if rest else ""
    )


def _more(rest: Sequence[SnapshotSegment]) -> Markup:
    return Markup('<p class="note">{} not drawn ({} in total).</p>').format(
        times(len(rest), "smaller segment is", "smaller segments are"),
        format_size(sum(segment.size for segment in rest)),
    )


def _row(snapshot: MemorySnapshot, segment: SnapshotSegment, widths: tuple[float, float], links: MapLinks) -> Markup:
    """Draws one segment. widths: of the bar, and the minimum for a piece."""
    width, least = widths
    kind = " ".join(filter(None, (segment.kind, "segment")))
    notes = [f"pool {segment.pool}"] * bool(segment.pool) + [f"stream {segment.stream}"] * bool(segment.stream)
    label = ", ".join((f"GPU{segment.device} {address_text(segment.address)}", *notes))
    blocks = times(len(segment.blocks), "block")
    pieces, at = [], 0.0
    for piece in _pieces(segment, segment.size * least / width):
        wide = width * piece.size / segment.size
        title = _title(snapshot, piece)
        chosen = " chosen" if links.chosen == (segment.device, piece.first.address) else ""
        href = links.block(segment, piece.first)
        pieces.append(_BLOCK.format(href, _short(at), _short(wide), CLASSES[piece.first.state], chosen, title))
        at += wide
    return _ROW.format(
        links.segment(segment),
        label,
        f"{kind} {label}: {format_size(segment.size)}, {blocks}",
        Markup("").join(pieces),
        f"{format_size(segment.size)}, {blocks}",
    )


def _pieces(segment: SnapshotSegment, least: float) -> Iterator[_Piece]:
    """Yields the blocks in the order of addresses. least: bytes of a block that is drawn by itself."""
    piece: _Piece | None = None
    for block in segment.blocks:
        small = block.size < least
        if piece is not None and small and piece.size < least:
            piece.size += block.size
            piece.blocks += 1
            if block.size > piece.first.size:
                piece.first = block
        else:
            if piece is not None:
                yield piece
            piece = _Piece(block, block.size)
    if piece is not None:
        yield piece


def _title(snapshot: MemorySnapshot, piece: _Piece) -> str:
    if piece.blocks > 1:
        return f"{piece.blocks} blocks, {format_size(piece.size)} in total; the largest is {_NAMES[piece.first.state]}"
    block = piece.first
    text = f"{format_size(block.size)} {_NAMES[block.state]}"
    place = None if block.state == INACTIVE else place_of(snapshot, block.stack)
    return f"{text}: {place}" if place else text


def _short(value: float) -> str:
    return f"{value:.3f}".rstrip("0").removesuffix(".")
