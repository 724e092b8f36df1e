"""Charts as SVG: stacked bars and lines. Texts are escaped, sizes are in the units of the view box.

Colours are classes ("series-0", …) that the page's style gives, so that they follow light and dark.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from markupsafe import Markup, escape

WIDTH = 960
ROW = 22
GAP = 6
LABEL = 170
LINE_HEIGHT = 180
LEFT = 56
TICKS = 4
SERIES = 9  # colours of the page; the parts of a step are as many
_PIECE = Markup('<rect x="{}" y="{}" width="{}" height="{}" class="series-{}"><title>{}</title></rect>')


@dataclass(frozen=True, slots=True)
class Series:
    """One colour of a chart: its name and a value per row or moment; None if it is missing."""

    name: str
    values: Sequence[float | None]


def legend(series: Sequence[Series]) -> Markup:
    """Explains the colours; empty for a single series, and without series that have no values."""
    items = Markup("").join(
        Markup('<span class="key"><i class="series-{}"></i>{}</span>').format(number % SERIES, each.name)
        for number, each in enumerate(series)
        if any(each.values)
    )
    return Markup('<div class="legend">{}</div>').format(items) if len(series) > 1 else Markup("")


def stacked_bars(labels: Sequence[str], series: Sequence[Series], unit: str) -> Markup:
    """Draws one horizontal bar per label, with one piece per series, on a common scale."""
    totals = [sum(max(each.values[row] or 0.0, 0.0) for each in series) for row in range(len(labels))]
    longest = max(totals, default=0.0)
    if longest <= 0:
        return Markup("")
    scale = (WIDTH - LABEL - 110) / longest
    parts = []
    for row, label in enumerate(labels):
        top = row * (ROW + GAP)
        parts.append(
            Markup('<text x="{}" y="{}" class="label" text-anchor="end">{}</text>').format(
                LABEL - 8, top + ROW - 6, _short(label)
            )
        )
        left = float(LABEL)
        for number, each in enumerate(series):
            value = max(each.values[row] or 0.0, 0.0)
            if value * scale >= 0.2:
                parts.append(
                    Markup(
                        '<rect x="{}" y="{}" width="{}" height="{}" class="series-{}"><title>{}</title></rect>'
                    ).format(
                        _number(left),
                        top,
                        _number(value * scale),
                        ROW,
                        number % SERIES,
                        f"{label}, {each.name}: {_number(value)} {unit} ({100 * value / (totals[row] or 1):.1f} %)",
                    )
                )
            left += value * scale
        parts.append(
            Markup('<text x="{}" y="{}" class="value">{} {}</text>').format(
                _number(left + 6), top + ROW - 6, _number(totals[row]), unit
            )
        )
    height = len(labels) * (ROW + GAP)
    return legend(series) + _svg(height, parts, _summary(series, unit))


def lines(times: Sequence[float], series: Sequence[Series], *, unit: str, time_unit: str, top: float = 0.0) -> Markup:
    """Draws values over time, each of which holds until the next one. top: minimum upper end of the scale."""
    known = [value for each in series for value in each.values if value is not None and isfinite(value)]
    if not known or len(times) < 2 or times[-1] <= times[0]:
        return Markup("")
    highest = max(top, *known) or 1.0
    width, height = WIDTH - LEFT - 10, LINE_HEIGHT - 30
    across = width / (times[-1] - times[0])
    parts = []
    for tick in range(TICKS + 1):
        y = 8 + height - height * tick / TICKS
        parts.append(
            Markup(
                '<line x1="{}" x2="{}" y1="{}" y2="{}" class="grid"/><text x="{}" y="{}" class="axis" '
                'text-anchor="end">{}</text>'
            ).format(
                LEFT, WIDTH - 10, _number(y), _number(y), LEFT - 6, _number(y + 4), _number(highest * tick / TICKS)
            )
        )
        x = LEFT + width * tick / TICKS
        parts.append(
            Markup('<text x="{}" y="{}" class="axis" text-anchor="middle">{}</text>').format(
                _number(x), LINE_HEIGHT - 6, _number((times[-1] - times[0]) * tick / TICKS)
            )
        )
    for number, each in enumerate(series):
        points, before = [], None
        for time, value in zip(times, each.values, strict=True):
            if value is None or not isfinite(value):
                continue
            x, y = LEFT + (time - times[0]) * across, 8 + height - height * value / highest
            if before is not None:
                points.append(f"{_number(x)},{_number(before)}")
            points.append(f"{_number(x)},{_number(y)}")
            before = y
        parts.append(Markup('<polyline points="{}" class="line series-{}"/>').format(" ".join(points), number % SERIES))
    caption = Markup('<div class="unit">{} over {}</div>').format(unit, time_unit)
    return legend(series) + caption + _svg(LINE_HEIGHT, parts, f"{_summary(series, unit)}, over {time_unit}")


def _summary(series: Sequence[Series], unit: str) -> str:
    """Says to those who cannot see a chart what it draws."""
    return f"Chart of {', '.join(each.name for each in series)} in {unit}"


def _svg(height: float, parts: Sequence[Markup], summary: str) -> Markup:
    return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        WIDTH, _number(height), summary, Markup("").join(parts)
    )


def _number(value: float) -> str:
    """Formats a number in short form, without an exponent."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if abs(value) < 1e6 else f"{value:.0f}"


def _short(text: str) -> Markup:
    return escape(text if len(text) <= 24 else f"{text[:12]}…{text[-11:]}")
