"""The chart of each view with a shape (view_api/plot_shapes.py): its table as a picture."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from markupsafe import Markup

from kineto_trace.analysis.diff.diff_views import NOISE
from kineto_trace.analysis.diff.view_differences import compared_pairs
from kineto_trace.base.array_types import Ints
from kineto_trace.html.charts import (
    SERIES,
    Box,
    FieldPoint,
    Pair,
    Series,
    boxes,
    difference_bars,
    histogram,
    lines,
    pair_bars,
    point_field,
    stacked_bars,
)
from kineto_trace.view_api.plot_shapes import (
    OTHERS,
    REST,
    SHAPES,
    Curve,
    Histogram,
    NamedParts,
    Pairs,
    Parts,
    Points,
    Spread,
    Values,
    column_of,
    drawn_rows,
    groups,
    labels,
    moments,
    named_parts,
    numbers,
    parts,
    rows_with_pairs,
    scale,
    title_of,
    with_bars_of,
)
from kineto_trace.view_api.result import Result
from kineto_trace.view_api.result_columns import scaled_unit
from kineto_trace.view_api.result_data import ResultData

MAX_BARS = 24
MAX_CHARTS = 8  # of values over time
MAX_POINTS = 2000
BINS = 40
_STEP = "step"


def chart(result: ResultData, column: str = "", bars: int = MAX_BARS) -> Markup:
    """Draws a result with as many bars; empty if it has no rows, or its view no shape.

    column: one of bar_columns, for the bars. The longest ones then come first, unless they are steps.
    """
    shape = SHAPES.get(result.view)
    if not len(result):
        return Markup("")
    if shape is None:
        return _compared(result, compared_pairs(result), bars)
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
    """Draws a chart for each of the first places; if they are long, every n-th moment."""
    times = moments(result, shape.moment)
    factor, unit = scale(result, shape.values)
    top = 100.0 if column_of(result, shape.values[0]).unit == "%" else 0.0
    values = {title_of(result, name): numbers(result, name) * factor for name in shape.values}
    charts, places = Markup(""), groups(result, shape.per)
    for label, rows in list(places.items())[:MAX_CHARTS]:
        order = rows[np.argsort(times[rows], kind="stable")][:: max(1, len(rows) // MAX_POINTS)]
        series = [Series(name, _known(every[order])) for name, every in values.items()]
        drawn = lines(times[order].tolist(), series, unit=unit, time_unit="ms", top=top)
        charts += Markup('<p class="chart-title">{}</p>').format(label) + drawn if drawn else ""
    if len(places) > MAX_CHARTS:
        charts += Markup('<p class="note">These are the first {} of {} charts. The view {} has all values.</p>').format(
            MAX_CHARTS, len(places), result.view
        )
    return charts


def _parts(result: ResultData, shape: Parts, bars: int) -> Markup:
    return _bars(result, shape, drawn_rows(result, shape)[:bars])


def _bars(result: ResultData, shape: Parts, rows: Ints) -> Markup:
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
    series = [
        Series(name.replace("_", " "), _known(values * factor), pale=name == REST) for name, values in lengths.items()
    ]
    return stacked_bars(names, series, unit)


def pairs(result: ResultData, shape: Pairs, bars: int = MAX_BARS, hrefs: Sequence[str] = ()) -> Markup:
    """Draws both traces, and below them their differences. hrefs: links of the rows of the result, "" for none."""
    return _both(result, {"": shape}, rows_with_pairs(result, shape)[:bars], hrefs)


def _compared(result: ResultData, shapes: Sequence[Pairs], bars: int) -> Markup:
    """Draws the figures of each row below each other, if there is room, or else only the first figure."""
    if not shapes:
        return Markup("")
    shown = shapes if len(shapes) * len(result) <= bars else shapes[:1]
    titles = [title_of(result, each.other).removesuffix(" other") for each in shown]
    return _both(result, dict(zip(titles, shown, strict=True)), range(min(len(result), bars)))


def _both(result: ResultData, shapes: Mapping[str, Pairs], rows: Sequence[int], hrefs: Sequence[str] = ()) -> Markup:
    """Draws both traces. shapes: by the names of their bars."""
    figures = list(shapes.values())
    told = list(shapes) if len(shapes) > 1 else [""]  # a single one is in the title
    of = "".join(f": {name}" for name in shapes if name and len(shapes) == 1)
    columns = [name for each in figures for name in (each.baseline, each.other)]
    values = {name: numbers(result, name) for name in columns}
    names = labels(result, figures[0].label)
    verdicts = {each.verdict: result.values(each.verdict) for each in figures if each.verdict}

    def drawn(factor: float) -> list[Pair]:
        known = {name: _known(values[name] * factor) for name in columns}
        found = [
            Pair(
                label=", ".join(filter(None, (names[row], name))),
                baseline=known[shape.baseline][row],
                other=known[shape.other][row],
                noise=bool(shape.verdict) and verdicts[shape.verdict][row] == NOISE,
                href=hrefs[row] if hrefs else "",
            )
            for row in rows
            for name, shape in zip(told, figures, strict=True)
        ]
        return [pair for pair in found if pair.baseline or pair.other]

    (factor, unit), (finer, fine_unit) = scale(result, columns), _delta_scale(result, figures, values)
    charts = pair_bars(drawn(factor), unit), difference_bars(drawn(finer), fine_unit)
    return Markup("").join(
        Markup('<p class="chart-title">{}</p>{}').format(title + of, each)
        for title, each in zip(("Both traces", "Differences"), charts, strict=True)
        if each
    )


def _delta_scale(result: ResultData, shapes: Sequence[Pairs], values: Mapping[str, Values]) -> tuple[float, str]:
    """Returns a factor and the resulting unit: the one that fits the largest difference."""
    deltas = [np.abs(values[each.other] - values[each.baseline]) for each in shapes]
    largest = max(float(np.nanmax(each, initial=0)) for each in deltas)
    factor, unit = scaled_unit(column_of(result, shapes[0].other).unit, largest)
    return factor, unit or "count"


def _spread(result: ResultData, shape: Spread, bars: int) -> Markup:
    factor, unit = scale(result, [f"max{shape.suffix}"])
    quartiles = np.stack(
        [numbers(result, f"{name}{shape.suffix}")[:bars] * factor for name in ("min", "p25", "p50", "p75", "max")]
    )
    names, known = labels(result, shape.label), np.flatnonzero(np.isfinite(quartiles).all(axis=0)).tolist()
    spread = [Box(*quartiles[:, row].tolist()) for row in known]
    return boxes([names[row] for row in known], spread, unit)


def _histogram(result: ResultData, shape: Histogram, _: int) -> Markup:
    factor, unit = scale(result, [shape.value])
    values = numbers(result, shape.value) * factor
    known = values[np.isfinite(values)]
    if not len(known):
        return Markup("")
    counts, edges = np.histogram(known, BINS)
    return histogram(counts.tolist(), float(edges[0]), float(edges[-1]), title_of(result, shape.value), unit)


def _points(result: ResultData, shape: Points, _: int) -> Markup:
    across, up, size = (numbers(result, name) for name in (shape.across, shape.up, shape.size))
    names, kinds = labels(result, shape.label), result.values(shape.kind)
    drawn = [
        FieldPoint(
            label=names[row], across=across[row], up=up[row], kind=str(kinds[row]), size=float(np.nan_to_num(size[row]))
        )
        for row in np.flatnonzero(np.isfinite(across) & np.isfinite(up)).tolist()
    ]
    return point_field(drawn, title_of(result, shape.across), title_of(result, shape.up))


def _known(values: Values) -> list[float | None]:
    return [value if np.isfinite(value) else None for value in values.tolist()]


def document(result: Result, limit: int) -> dict[str, Any]:
    """Returns the result as a plain value, with its first rows and its chart."""
    shown = replace(result, table=result.table.slice(0, limit)) if len(result) > limit else result
    return {
        "rows": shown.rows(),
        **({"failure": result.failure} if result.failure else {}),
        "notes": list(result.notes),
        "columns": [column._asdict() for column in result.columns],
        **page_parts(result),
    }


def page_parts(
    result: Result, drawn: Markup | None = None, *, column: str = "", bars: int = MAX_BARS
) -> dict[str, Any]:
    """Returns the parts of a page about a result, without its rows.

    drawn: replaces the view's own chart, for which column and bars are those of `chart`.
    """
    if drawn is None:
        drawn = Markup("") if result.failure else chart(result, column, bars)
    return {
        "view": result.view,
        "total": len(result),
        "chart": str(drawn),
        "bars": bar_count(result),
    }


_DRAW: Mapping[type, Callable[[ResultData, Any, int], Markup]] = {
    Curve: _curve,
    Parts: _parts,
    NamedParts: _named_parts,
    Pairs: pairs,
    Spread: _spread,
    Histogram: _histogram,
    Points: _points,
}
