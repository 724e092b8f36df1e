"""Charts: bars of parts, pairs of bars, lines over time, boxes and histograms. Texts are escaped.

Theory of operation
    A chart fills its container, from a phone to a wall, and its texts keep their size: only bars and lines are inside
    stretched SVG (preserveAspectRatio="none"); labels and values are text of the page, or SVG text at a position in per
    cent. If the container is narrow, the style puts labels above their bars.

    Colours are classes ("series-0", …) defined by the page's style, so that they follow light and dark.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10
from typing import NamedTuple

from markupsafe import Markup

from kineto_trace.base.quantities import shortened, shortened_apart
from kineto_trace.base.visible_text import one_line

SERIES = 9  # colours of the page; as many as parts of a step
_PALE = 7
TICKS = 4  # at most, in addition to zero
MAX_LABEL, MAX_TITLE = 56, 120  # characters
LEAST_WIDTH = 0.02  # % of a bar: narrower ones are not drawn
POINT_LEAST, POINT_GROWTH = 3.0, 2.5  # px: radius of the smallest point, and its growth with the root of its share
BASELINE, OTHER = "baseline (upper bar)", "this trace (lower bar)"
MORE, LESS, HOLLOW = "series-5", "series-0", "noise"  # classes of differences
_ROW = Markup(
    '<div class="chart-row"><span class="chart-label">{}</span><svg viewBox="0 0 100 1" preserveAspectRatio="none">{}'
    '</svg><span class="chart-value">{}</span></div>'
)
_RECT = Markup('<rect x="{}" y="{}" width="{}" height="{}" class="series-{}"><title>{}</title></rect>')
_CHANGE = Markup('<rect x="{}" y="0.08" width="{}" height="0.84" class="{}"><title>{}</title></rect>')
_KEY = Markup('<span class="key"><i class="{}"></i>{}</span>')


@dataclass(frozen=True, slots=True)
class Series:
    """One colour of a chart: its name and a value per row or moment; None if it is missing.

    pale: grey, for the rest of a whole.
    """

    name: str
    values: Sequence[float | None]
    pale: bool = False

    def colour(self, number: int) -> int:
        """Returns the number of its colour, for the number-th series of a chart."""
        return _PALE if self.pale else number % SERIES


class Box(NamedTuple):
    """The spread of the values of one row."""

    least: float
    lower: float
    median: float
    upper: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One row of two traces.

    baseline, other: its values, None if missing.
    href: the link of its label and bars.
    noise: whether the difference is within the noise.
    """

    label: str
    baseline: float | None
    other: float | None
    noise: bool = False
    href: str = ""

    @property
    def delta(self) -> float | None:
        """Returns the other trace minus the baseline."""
        return None if self.baseline is None or self.other is None else self.other - self.baseline


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldPoint:
    """One point of a field of percentages. kind: determines the colour; size: the percentage shown as its area."""

    label: str
    across: float
    up: float
    kind: str
    size: float


def legend(series: Sequence[Series], unit: str = "") -> Markup:
    """Explains the colours; empty for a single series, and without series that have no values.

    unit: of the values, which are shown if each series has just one.
    """
    items = Markup("").join(
        _KEY.format(
            f"series-{each.colour(number)}",
            f"{each.name} {figure(each.values[0] or 0)} {unit}" if unit and len(each.values) == 1 else each.name,
        )
        for number, each in enumerate(series)
        if any(each.values)
    )
    return _keys(items) if len(series) > 1 else Markup("")


def stacked_bars(labels: Sequence[str], series: Sequence[Series], unit: str) -> Markup:
    """Draws one horizontal bar per label, with one piece per series, on a common scale."""
    totals = [sum(max(each.values[row] or 0.0, 0.0) for each in series) for row in range(len(labels))]
    longest = max(totals, default=0.0)
    if longest <= 0:
        return Markup("")
    longest = max(longest, 100.0) if unit == "%" else longest
    rows, shown = [], _short(labels)
    for row, label in enumerate(labels):
        left, pieces = 0.0, []
        for number, each in enumerate(series):
            value = max(each.values[row] or 0.0, 0.0)
            width = 100 * value / longest
            if width >= LEAST_WIDTH:
                share = f" ({100 * value / totals[row]:.1f} %)" if len(series) > 1 else ""
                said = ", ".join(filter(None, (_line(label), each.name)))
                title = f"{said}: {figure(value)} {unit}{share}"
                pieces.append(_RECT.format(_place(left), 0, _place(width), 1, each.colour(number), title))
            left += width
        only = len(labels) == 1 and len(series) > 1  # of several parts: no other bar to compare with
        text = "" if only else shown[row]
        rows.append(_ROW.format(text, Markup("").join(pieces), f"{figure(totals[row])} {unit}"))
    summary = f"Chart of {', '.join(each.name for each in series)} in {unit}"  # for those who cannot see the chart
    return legend(series, unit) + _rows(rows, summary)


def pair_bars(pairs: Sequence[Pair], unit: str) -> Markup:
    """Draws two bars for each row, of the baseline above that of the other trace, on a common scale."""
    longest = max((value or 0.0 for pair in pairs for value in (pair.baseline, pair.other)), default=0.0)
    if longest <= 0:
        return Markup("")
    rows = []
    for pair, label in zip(pairs, _short([pair.label for pair in pairs]), strict=True):
        pieces = Markup("")
        for number, (name, value) in enumerate((("baseline", pair.baseline), ("this trace", pair.other))):
            width = 100 * max(value or 0.0, 0.0) / longest
            if width >= LEAST_WIDTH:
                title = f"{_line(pair.label)}, {name}: {figure(value or 0.0)} {unit}"
                pieces += _RECT.format(0, 0.5 * number, _place(width), 0.46, 1 - number, title)
        values = " → ".join("?" if value is None else figure(value) for value in (pair.baseline, pair.other))
        rows.append(_pair_row(pair, label, pieces, f"{values} {unit}"))
    keys = _KEY.format("series-1", BASELINE) + _KEY.format("series-0", OTHER)
    return _keys(keys) + _rows(rows, f"Chart of both traces in {unit}", linked=any(pair.href for pair in pairs))


def difference_bars(pairs: Sequence[Pair], unit: str) -> Markup:
    """Draws how much more (right) or less (left) each row is in the other trace; hollow: within the noise."""
    deltas = [pair.delta or 0.0 for pair in pairs]
    lowest, highest = min([0.0, *deltas]), max([0.0, *deltas])
    if lowest == highest:
        return Markup("")
    across = 100 / (highest - lowest)
    zero = Markup('<rect x="{}" y="0" width="0.3" height="1" class="median"/>').format(_place(-lowest * across))
    rows, drawn = [], set()
    for pair, label in zip(pairs, _short([pair.label for pair in pairs]), strict=True):
        delta = pair.delta
        text = "unknown" if delta is None else f"{'+' if delta > 0 else ''}{figure(delta)} {unit}"
        text += ", within noise" if pair.noise else ""
        piece, width = Markup(""), abs(delta or 0.0) * across
        if delta is not None and width >= LEAST_WIDTH:
            kind = HOLLOW if pair.noise else MORE if delta > 0 else LESS
            left = (min(delta, 0.0) - lowest) * across
            piece = _CHANGE.format(_place(left), _place(width), kind, f"{_line(pair.label)}: {text}")
            drawn.add(kind)
        rows.append(_pair_row(pair, label, piece + zero, text))
    told = ((MORE, "more than in the baseline"), (LESS, "less"), (HOLLOW, "within noise"))
    keys = Markup("").join(_KEY.format(kind, said) for kind, said in told if kind in drawn)
    return _keys(keys) + _rows(rows, f"Chart of differences in {unit}", linked=any(pair.href for pair in pairs))


def _pair_row(pair: Pair, label: Markup | str, pieces: Markup, text: str) -> Markup:
    if pair.href:
        label = Markup('<a href="{}">{}</a>').format(pair.href, label)
        pieces = Markup('<a href="{}" tabindex="-1" aria-hidden="true">{}</a>').format(pair.href, pieces)
    return _ROW.format(label, pieces, text)


def _keys(items: Markup) -> Markup:
    return Markup('<div class="legend">{}</div>').format(items)


def boxes(labels: Sequence[str], spread: Sequence[Box], unit: str) -> Markup:
    """Draws one box per label: the middle half of the values, the median, and a line from the smallest to the
    largest."""
    most = max((box.most for box in spread), default=0.0)
    if most <= 0:
        return Markup("")
    rows = []
    for label, shown, box in zip(labels, _short(labels), spread, strict=True):
        least, lower, median, upper, top = (100 * max(value, 0.0) / most for value in box)
        title = (
            f"{_line(label)}: median {figure(box.median)} {unit}, middle half {figure(box.lower)} to "
            f"{figure(box.upper)}, all {figure(box.least)} to {figure(box.most)}"
        )
        pieces = (
            Markup('<rect x="{}" y="0.46" width="{}" height="0.08" class="whisker"/>').format(
                _place(least), _place(top - least)
            )
            + _RECT.format(_place(lower), 0.1, _place(max(upper - lower, 0.4)), 0.8, 0, title)
            + Markup('<rect x="{}" y="0.1" width="0.4" height="0.8" class="median"/>').format(_place(median))
        )
        rows.append(_ROW.format(shown, pieces, f"{figure(box.median)} {unit}"))
    return _rows(rows, f"Chart of medians and spreads in {unit}")


def histogram(counts: Sequence[int], first: float, last: float, name: str, unit: str) -> Markup:
    """Draws how many values lie in each of as many equal parts of the range from `first` to `last`."""
    highest = max(counts, default=0)
    if highest <= 0 or last <= first:
        return Markup("")
    scale, width = _ticks(highest)[-1], 100 / len(counts)
    step = (last - first) / len(counts)
    drawn = Markup("").join(
        Markup('<rect x="{}" y="{}" width="{}" height="{}" class="series-0"><title>{}</title></rect>').format(
            _place(at * width),
            _place(100 - 100 * count / scale),
            _place(width * 0.94),
            _place(100 * count / scale),
            f"{figure(first + at * step)} to {figure(first + (at + 1) * step)} {unit}: {count:,}",
        )
        for at, count in enumerate(counts)
        if count
    )
    caption = f"number of values by {name} in {unit}"
    return _plot(drawn, _ticks(highest), (first, last), caption)


def lines(times: Sequence[float], series: Sequence[Series], *, unit: str, time_unit: str, top: float = 0.0) -> Markup:
    """Draws values over time, each of which holds until the next one. top: minimum upper end of the scale."""
    known = [value for each in series for value in each.values if value is not None and isfinite(value)]
    if not known or len(times) < 2 or times[-1] <= times[0]:
        return Markup("")
    ticks = _ticks(max(top, *known) or 1.0)
    across, highest = 1000 / (times[-1] - times[0]), ticks[-1]
    drawn = Markup("")
    for number, each in enumerate(series):
        points, before = [], None
        for time, value in zip(times, each.values, strict=True):
            if value is None or not isfinite(value):
                continue
            x, y = (time - times[0]) * across, 100 - 100 * max(value, 0.0) / highest
            if before is not None:
                points.append(f"{_place(x)},{_place(before)}")
            points.append(f"{_place(x)},{_place(y)}")
            before = y
        drawn += Markup('<polyline points="{}" class="line series-{}"/>').format(" ".join(points), number % SERIES)
    names = f"{', '.join(each.name for each in series)} in " if len(series) == 1 else ""
    caption = f"{names}{unit} over time in {time_unit}"
    return legend(series) + _plot(drawn, ticks, (0.0, times[-1] - times[0]), caption, wide=1000)


def point_field(points: Sequence[FieldPoint], across: str, up: str) -> Markup:
    """Draws points at two percentages, 0 to 100 each; the larger ones below. across, up: titles of the axes."""
    kinds = list(dict.fromkeys(point.kind for point in points))
    if not points:
        return Markup("")
    drawn = Markup("").join(
        Markup('<circle cx="{}%" cy="{}%" r="{}" class="point series-{}"><title>{}</title></circle>').format(
            _place(min(max(point.across, 0.0), 100.0)),
            _place(100 - min(max(point.up, 0.0), 100.0)),
            _place(POINT_LEAST + POINT_GROWTH * max(point.size, 0.0) ** 0.5),
            kinds.index(point.kind) % SERIES,
            f"{_line(point.label)}: {across} {figure(point.across)} %, {up} {figure(point.up)} %, "
            f"{figure(point.size)} % of the time, {point.kind}",
        )
        for point in sorted(points, key=lambda point: -point.size)
    )
    ticks = _ticks(100.0)
    grid = Markup("").join(
        Markup('<line x1="0" x2="100%" y1="{0}%" y2="{0}%" class="grid"/><line y1="0" y2="100%" x1="{0}%" x2="{0}%" '
               'class="grid"/>').format(_place(100 - tick))
        for tick in ticks
    )  # fmt: skip
    left, below = (
        Markup("").join(text.format(_place(100 - tick if upwards else tick), figure(tick)) for tick in ticks)
        for text, upwards in (
            (Markup('<text x="100%" y="{}%" dy="4">{}</text>'), True),
            (Markup('<text x="{}%" y="14">{}</text>'), False),
        )
    )
    caption = f"{up} (upwards) against {across}, % of peak; area: share of the time"
    keys = Markup("").join(_KEY.format(f"series-{place % SERIES}", kind) for place, kind in enumerate(kinds))
    field = Markup(
        '<div class="chart-plot points" role="img" aria-label="Chart of {}"><div class="unit">{}</div>'
        '<svg class="chart-left">{}</svg><svg class="chart-field">{}{}</svg><svg class="chart-below">{}</svg></div>'
    )
    return _keys(keys) + field.format(caption, caption, left, grid, drawn, below)


def figure(value: float) -> str:
    """Formats a number for people, with three or four digits and without an exponent."""
    if value == 0 or not isfinite(value):
        return "0" if value == 0 else str(value)
    decimals = max(0, min(3, 2 - floor(log10(abs(value)))))
    text = f"{value:,.{decimals}f}"
    return (text.rstrip("0").rstrip(".") or "0") if "." in text else text


def _plot(drawn: Markup, ticks: Sequence[float], span: tuple[float, float], caption: str, *, wide: int = 100) -> Markup:
    """Draws a field with an axis on its left and below. ticks: from 0 to the upper end; span: of the lower axis."""
    highest, (first, last) = ticks[-1], span
    grid = Markup("").join(
        Markup('<line x1="0" x2="{}" y1="{}" y2="{}" class="grid"/>').format(wide, y, y)
        for y in (_place(100 - 100 * tick / highest) for tick in ticks)
    )
    left = Markup("").join(
        Markup('<text x="100%" y="{}%" dy="4">{}</text>').format(_place(100 - 100 * tick / highest), figure(tick))
        for tick in ticks
    )
    below = Markup("").join(
        Markup('<text x="{}%" y="14">{}</text>').format(_place(100 * tick / (last - first)), figure(first + tick))
        for tick in ticks_between(0.0, last - first)
    )
    return Markup(
        '<div class="chart-plot" role="img" aria-label="Chart of {}"><div class="unit">{}</div>'
        '<svg class="chart-left">{}</svg><svg class="chart-field" viewBox="0 0 {} 100" preserveAspectRatio="none">{}{}'
        '</svg><svg class="chart-below">{}</svg></div>'
    ).format(caption, caption, left, wide, grid, drawn, below)


def _ticks(highest: float) -> list[float]:
    """Returns round numbers from 0 on; the last one is at least `highest`."""
    step, inside = _tick_step(highest), ticks_between(0.0, highest)
    return inside if inside[-1] >= highest * 0.999 else [*inside, step * len(inside)]


def ticks_between(low: float, high: float) -> list[float]:
    """Returns the round numbers of an axis that has two ends, of which `high` is the larger one."""
    step = _tick_step(high - low)
    return [step * each for each in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]


def _tick_step(length: float) -> float:
    rough = length / TICKS
    power = 10.0 ** floor(log10(rough))
    return next(size * power for size in (1, 2, 2.5, 5, 10) if size * power >= rough * 0.999)


def _rows(rows: Sequence[Markup], summary: str, *, linked: bool = False) -> Markup:
    """Draws the rows. linked: whether rows have links, which a picture as a whole could not have."""
    return Markup('<div class="chart-rows" role="{}" aria-label="{}">{}</div>').format(
        "group" if linked else "img", summary, Markup("").join(rows)
    )


def coordinate(value: float) -> str:
    """Formats a coordinate of a drawing that is hundreds of units wide."""
    return f"{value:.1f}".removesuffix(".0")


def _place(value: float) -> str:
    """Formats a coordinate."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _short(labels: Sequence[str]) -> list[str]:
    return [_line(text) for text in shortened_apart(labels, MAX_LABEL)]


def _line(text: str) -> str:
    return one_line(shortened(text, MAX_TITLE))
