"""Values over time as SVG: lines, and areas on top of each other. Pure; colours are those of charts.py.

A value holds from its time until the next one. Times are those since the recording began; sizes and times have the unit
that fits the largest. For scripts, a chart has the times (us) at its ends, and the position of its field.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

from markupsafe import Markup

from kineto_trace.html.charts import SERIES, Series, coordinate, figure, legend, ticks_between
from kineto_trace.view_api.result_columns import scaled_unit

WIDTH, HEIGHT = 960, 220
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 10, 30
MARK = 14


@dataclass(frozen=True, slots=True)
class ChartLine:
    """One line.

    times: us since the recording began, ascending.
    values: one per time; None is unknown until the next one.
    """

    name: str
    times: Sequence[float]
    values: Sequence[float | None]

    @property
    def known(self) -> list[float]:
        """Returns the values that are known."""
        return [value for value in self.values if value is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Highlights in a chart. moments: times with their events; span: start and end."""

    moments: Sequence[tuple[float, str]] = ()
    span: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class _Frame:
    """The coordinates of a chart."""

    first: float
    last: float
    low: float
    high: float

    def x(self, time: float) -> str:
        return coordinate(LEFT + (WIDTH - LEFT - RIGHT) * (time - self.first) / (self.last - self.first))

    @property
    def late(self) -> float:
        """From when on a label in the middle would be cut off."""
        return self.first + 0.98 * (self.last - self.first)

    def has(self, time: float) -> bool:
        return self.first <= time <= self.last

    def y(self, value: float) -> str:
        return coordinate(TOP + (HEIGHT - TOP - BOTTOM) * (self.high - value) / (self.high - self.low))


def curves(series: Sequence[ChartLine], unit: str, marks: Marks = Marks()) -> Markup:
    """Draws lines. Empty if no curve has two moments."""
    shown = [each for each in series if len(each.times) > 1 and each.known and all(map(isfinite, each.known))]
    if not shown or max(each.times[-1] for each in shown) <= min(each.times[0] for each in shown):
        return Markup("")
    frame = _frame([each.times for each in shown], [value for each in shown for value in each.known])
    parts = [] if marks.span is None else [_span(frame, *marks.span)]
    parts += [
        Markup('<polyline points="{}" class="line series-{}"><title>{}</title></polyline>').format(
            " ".join(points), number % SERIES, each.name
        )
        for number, each in enumerate(shown)
        for points in _runs(frame, each)
    ]
    parts += [_mark(frame, time, text, line) for line, (time, text) in enumerate(marks.moments) if frame.has(time)]
    return legend([Series(each.name, each.values) for each in shown]) + _chart(frame, parts, shown, unit)


def areas(times: Sequence[float], series: Sequence[Series], unit: str) -> Markup:
    """Draws areas on top of each other, the first one below. Values are 0 or more; None counts as 0."""
    totals = [sum(each.values[at] or 0.0 for each in series) for at in range(len(times))]
    if len(times) < 2 or times[-1] <= times[0] or max(totals, default=0.0) <= 0:
        return Markup("")
    frame = _frame([times], [0.0, *totals])
    below, parts = [0.0] * len(times), []
    for number, each in enumerate(series):
        above = [low + (value or 0.0) for low, value in zip(below, each.values, strict=True)]
        points = [*_stairs(frame, times, above), *reversed(_stairs(frame, times, below))]
        parts.append(
            Markup('<polygon points="{}" class="area series-{}"><title>{}</title></polygon>').format(
                " ".join(points), number % SERIES, each.name
            )
        )
        below = above
    shown = [ChartLine(each.name, times, []) for each in series]
    return legend(series) + _chart(frame, parts, shown, unit)


def _frame(times: Sequence[Sequence[float]], values: Sequence[float]) -> _Frame:
    low, high = min(0.0, *values), max(0.0, *values)
    return _Frame(min(each[0] for each in times), max(each[-1] for each in times), low, high if high > low else low + 1)


def _runs(frame: _Frame, line: ChartLine) -> Iterator[list[str]]:
    """Yields the points of each span of time in which the value is known."""
    times: list[float] = []
    values: list[float] = []
    for time, value in zip(line.times, line.values, strict=True):
        times.append(time)
        if value is not None:
            values.append(value)
            continue
        if values:
            yield _stairs(frame, times, [*values, values[-1]])
        times, values = [], []
    if values:
        yield _stairs(frame, times, values)


def _stairs(frame: _Frame, times: Sequence[float], values: Sequence[float]) -> list[str]:
    points: list[str] = []
    before = ""
    for time, value in zip(times, values, strict=True):
        x, y = frame.x(time), frame.y(value)
        if before not in ("", y):
            points.append(f"{x},{before}")
        points.append(f"{x},{y}")
        before = y
    return points


def _span(frame: _Frame, start: float, end: float) -> Markup:
    first, last = (frame.x(min(max(time, frame.first), frame.last)) for time in (start, end))
    return Markup('<rect x="{}" y="{}" width="{}" height="{}" class="span"/>').format(
        first, TOP, coordinate(max(float(last) - float(first), 1.0)), HEIGHT - TOP - BOTTOM
    )


def _mark(frame: _Frame, time: float, text: str, line: int) -> Markup:
    return Markup(
        '<line x1="{0}" x2="{0}" y1="{1}" y2="{2}" class="mark"/><text x="{0}" y="{3}" class="axis" '
        'text-anchor="{4}">{5}</text>'
    ).format(
        *(frame.x(time), TOP, HEIGHT - BOTTOM, TOP + MARK * (1 + line)),
        "end" if time > (frame.first + frame.last) / 2 else "start",
        text,
    )


def _chart(frame: _Frame, parts: Sequence[Markup], series: Sequence[ChartLine], unit: str) -> Markup:
    factor, shown_unit = scaled_unit(unit, max(abs(frame.low), abs(frame.high)))
    per, time_unit = scaled_unit("us", frame.last - frame.first)
    grid = [
        Markup(
            '<line x1="{}" x2="{}" y1="{}" y2="{}" class="grid"/>'
            '<text x="{}" y="{}" class="axis" text-anchor="end">{}</text>'
        ).format(
            *(LEFT, WIDTH - RIGHT, frame.y(tick / factor), frame.y(tick / factor)),
            *(LEFT - 6, frame.y(tick / factor), figure(tick)),
        )
        for tick in ticks_between(frame.low * factor, frame.high * factor)
    ]
    grid += [
        Markup('<text x="{}" y="{}" class="axis" text-anchor="{}">{}</text>').format(
            *(frame.x(tick / per), HEIGHT - 10, "end" if tick / per > frame.late else "middle", figure(tick))
        )
        for tick in ticks_between(frame.first * per, frame.last * per)
    ]
    over = f"{shown_unit or 'value (unit unknown)'}; time in {time_unit} since the start"
    summary = f"{', '.join(each.name for each in series)}: {over}; at most {figure(frame.high * factor)}"
    caption = Markup('<div class="unit">{}</div>').format(over)
    place = Markup(
        'data-first="{}" data-last="{}" data-left="{}" data-right="{}" data-top="{}" data-bottom="{}"'
    ).format(frame.first, frame.last, LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM)
    return caption + Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}" {}>{}</svg>').format(
        WIDTH, HEIGHT, summary, place, Markup("").join([*grid, *parts])
    )
