"""The chart of each view that has a shape (view_api/plot_shapes.py): what the table below it says, as a picture."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from kineto_trace.html.charts import SERIES, Box, Series, boxes, histogram, lines, stacked_bars
from kineto_trace.view_api.plot_shapes import SHAPES, Curve, Histogram, NamedParts, Parts, Spread
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


def chart(result: ResultData) -> Markup:
    """Draws a result; empty if it has no rows, or its view no shape."""
    shape = SHAPES.get(result.view)
    return _DRAW[type(shape)](result, shape) if shape is not None and len(result) else Markup("")


def _curve(result: ResultData, shape: Curve) -> Markup:
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


def _parts(result: ResultData, shape: Parts) -> Markup:
    rows = drawn_rows(result, shape)[:MAX_BARS]
    names = labels(result, shape.label)
    return _stacked([names[row] for row in rows], parts(result, shape, rows), scale(result, shape.values))


def _named_parts(result: ResultData, shape: NamedParts) -> Markup:
    """Draws the longest parts in colours of their own, and the rest together."""
    bars = dict(list(groups(result, shape.label).items())[:MAX_BARS])
    found = named_parts(result, shape, list(bars.values()))
    if len(found) > SERIES:
        longest = sorted((name for name in found if name != OTHERS), key=lambda name: -found[name].sum())
        rest = [values for name, values in found.items() if name not in longest[: SERIES - 1]]
        found = {**{name: found[name] for name in longest[: SERIES - 1]}, OTHERS: np.sum(rest, axis=0)}
    return _stacked(list(bars), found, scale(result, [shape.value]))


def _stacked(names: Sequence[str], lengths: Mapping[str, Values], scaled: tuple[float, str]) -> Markup:
    factor, unit = scaled
    series = [Series(name.replace("_", " "), _known(values * factor)) for name, values in lengths.items()]
    return stacked_bars(names, series, unit)


def _spread(result: ResultData, shape: Spread) -> Markup:
    factor, unit = scale(result, [f"max{shape.suffix}"])
    quartiles = np.stack(
        [numbers(result, f"{name}{shape.suffix}")[:MAX_BARS] * factor for name in ("min", "p25", "p50", "p75", "max")]
    )
    names, known = labels(result, shape.label), np.flatnonzero(np.isfinite(quartiles).all(axis=0)).tolist()
    spread = []
    for row in known:
        least, lower, median, upper, most = quartiles[:, row].tolist()
        spread.append(Box(least=least, lower=lower, median=median, upper=upper, most=most))
    return boxes([names[row] for row in known], spread, unit)


def _histogram(result: ResultData, shape: Histogram) -> Markup:
    factor, unit = scale(result, [shape.value])
    values = numbers(result, shape.value) * factor
    known = values[np.isfinite(values)]
    if not len(known):
        return Markup("")
    counts, edges = np.histogram(known, BINS)
    return histogram(counts.tolist(), float(edges[0]), float(edges[-1]), title_of(result, shape.value), unit)


def _known(values: Values) -> list[float | None]:
    return [value if np.isfinite(value) else None for value in values.tolist()]


_DRAW: Mapping[type, Callable[[ResultData, Any], Markup]] = {
    Curve: _curve,
    Parts: _parts,
    NamedParts: _named_parts,
    Spread: _spread,
    Histogram: _histogram,
}
