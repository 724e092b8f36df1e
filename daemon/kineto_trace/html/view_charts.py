"""The chart of each view that has a shape (view_api/plot_shapes.py): what the table below it says, as a picture."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from kineto_trace.html.charts import SERIES, Box, Series, boxes, histogram, lines, stacked_bars
from kineto_trace.view_api.plot_shapes import SHAPES, Curve, Histogram, NamedParts, Parts, Spread, with_bars_of
from kineto_trace.view_api.result_data import ResultData
from kineto_trace.view_api.shape_values import (
    OTHERS,
    Values,
    column_of,
    drawn_rows,
    groups,
    labels,
    moments,
    named_parts,
    numbers,
    parts,
    scale,
    title_of,
)

MAX_BARS = 24
MAX_CHARTS = 8  # of values over time
MAX_POINTS = 2000
BINS = 40
_STEP = "step"


def chart(result: ResultData, column: str = "", bars: int = MAX_BARS) -> Markup:
    """Draws a result with as many bars; empty if it has no rows, or its view no shape.

    column: one of bar_columns, which the bars are of. The longest ones come first then, unless they are steps.
    """
    shape = SHAPES.get(result.view)
    if shape is None or not len(result):
        return Markup("")
    if not column or not isinstance(shape, Parts):
        return _DRAW[type(shape)](result, shape, bars)
    rows = drawn_rows(result, shape)
    if _STEP not in shape.label:
        rows = rows[np.argsort(-np.nan_to_num(numbers(result, column)[rows]), kind="stable")]
    return _bars(result, with_bars_of(shape, column), rows[:bars])


def bar_count(result: ResultData) -> int:
    """Returns how many bars or boxes the chart of a result has if all are drawn; 0 for other charts."""
    shape = SHAPES.get(result.view)
    if isinstance(shape, Parts):
        return len(drawn_rows(result, shape)) if len(result) else 0
    if isinstance(shape, NamedParts):
        return len(groups(result, shape.label)) if len(result) else 0
    return len(result) if isinstance(shape, Spread) else 0


def _curve(result: ResultData, shape: Curve, _: int) -> Markup:
    """Draws a chart for each of the first places; of long ones, every n-th moment."""
    times = moments(result, shape.moment)
    factor, unit = scale(result, shape.values)
    top = 100.0 if column_of(result, shape.values[0]).unit == "%" else 0.0
    values = {title_of(result, name): numbers(result, name) * factor for name in shape.values}
    charts = Markup("")
    for label, rows in list(groups(result, shape.per).items())[:MAX_CHARTS]:
        order = rows[np.argsort(times[rows], kind="stable")][:: max(1, len(rows) // MAX_POINTS)]
        series = [Series(name, _known(every[order])) for name, every in values.items()]
        drawn = lines(times[order].tolist(), series, unit=unit, time_unit="ms", top=top)
        charts += Markup('<p class="chart-title">{}</p>').format(label) + drawn if drawn else ""
    return charts


def _parts(result: ResultData, shape: Parts, bars: int) -> Markup:
    return _bars(result, shape, drawn_rows(result, shape)[:bars])


def _bars(result: ResultData, shape: Parts, rows: npt.NDArray[np.int64]) -> Markup:
    names = labels(result, shape.label)
    return _stacked([names[row] for row in rows], parts(result, shape, rows), scale(result, shape.values))


def _named_parts(result: ResultData, shape: NamedParts, bars: int) -> Markup:
    """Draws the longest parts in colours of their own, and the rest together."""
    drawn = dict(list(groups(result, shape.label).items())[:bars])
    found = named_parts(result, shape, list(drawn.values()))
    if len(found) > SERIES:
        longest = sorted((name for name in found if name != OTHERS), key=lambda name: -found[name].sum())
        rest = [values for name, values in found.items() if name not in longest[: SERIES - 1]]
        found = {**{name: found[name] for name in longest[: SERIES - 1]}, OTHERS: np.sum(rest, axis=0)}
    return _stacked(list(drawn), found, scale(result, [shape.value]))


def _stacked(names: Sequence[str], lengths: Mapping[str, Values], scaled: tuple[float, str]) -> Markup:
    factor, unit = scaled
    series = [Series(name.replace("_", " "), _known(values * factor)) for name, values in lengths.items()]
    return stacked_bars(names, series, unit)


def _spread(result: ResultData, shape: Spread, bars: int) -> Markup:
    factor, unit = scale(result, [f"max{shape.suffix}"])
    quartiles = np.stack(
        [numbers(result, f"{name}{shape.suffix}")[:bars] * factor for name in ("min", "p25", "p50", "p75", "max")]
    )
    names, known = labels(result, shape.label), np.flatnonzero(np.isfinite(quartiles).all(axis=0)).tolist()
    spread = []
    for row in known:
        least, lower, median, upper, most = quartiles[:, row].tolist()
        spread.append(Box(least=least, lower=lower, median=median, upper=upper, most=most))
    return boxes([names[row] for row in known], spread, unit)


def _histogram(result: ResultData, shape: Histogram, _: int) -> Markup:
    factor, unit = scale(result, [shape.value])
    values = numbers(result, shape.value) * factor
    known = values[np.isfinite(values)]
    if not len(known):
        return Markup("")
    counts, edges = np.histogram(known, BINS)
    return histogram(counts.tolist(), float(edges[0]), float(edges[-1]), title_of(result, shape.value), unit)


def _known(values: Values) -> list[float | None]:
    return [value if np.isfinite(value) else None for value in values.tolist()]


_DRAW: Mapping[type, Callable[[ResultData, Any, int], Markup]] = {
    Curve: _curve,
    Parts: _parts,
    NamedParts: _named_parts,
    Spread: _spread,
    Histogram: _histogram,
}
