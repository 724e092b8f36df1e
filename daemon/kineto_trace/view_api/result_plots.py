"""Draws results with matplotlib: values over time, bars of parts, boxes, histograms and fields of points.

plot_shapes.py defines what is drawn of each view. Texts of traces are drawn literally: no text is mathematics, controls
a terminal or hides a label. There are at most MAX_BARS bars and MAX_LINES lines, and the title says if there were more.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kineto_trace.base.quantities import shortened_apart
from kineto_trace.base.visible_text import one_line
from kineto_trace.errors import ViewError
from kineto_trace.view_api.plot_shapes import (
    SHAPES,
    Curve,
    Histogram,
    NamedParts,
    Pairs,
    Parts,
    Points,
    Spread,
    Values,
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
)
from kineto_trace.view_api.result_data import ResultData, needed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_BARS, MAX_LINES, MAX_TEXT = 40, 12, 48
BAR_INCHES, WIDTH_INCHES, HEIGHT_INCHES = 0.3, 9.0, 3.6
BINS = 50
POINT_AREA, MAX_NAMES = 12.0, 5  # square points of the smallest point, and growth per cent; points with names


def plot(result: ResultData, ax: "Axes | None" = None) -> "Axes":
    """Draws a result. See Result.plot."""
    shape = SHAPES.get(result.view)
    if shape is None:
        raise ViewError(f"view {result.view} cannot be plotted; these can: {', '.join(SHAPES)}")
    if not len(result):
        raise ViewError(f"view {result.view} has no rows to plot{''.join(f': {note}' for note in result.notes[:1])}")
    if ax is None:
        bars = not isinstance(shape, (Curve, Histogram, Points))
        height = BAR_INCHES * min(len(result), MAX_BARS) + 1 if bars else 0
        figure = needed("matplotlib.pyplot").figure
        ax = figure(figsize=(WIDTH_INCHES, max(height, HEIGHT_INCHES)), layout="constrained").add_subplot()
    assert ax is not None
    more = _DRAW[type(shape)](result, shape, ax)
    ax.set_title(_text(result.view.replace("_", " ") + (f" ({more})" if more else "")))
    return ax


def _curve(result: ResultData, shape: Curve, ax: "Axes") -> str:
    times = moments(result, shape.moment)
    factor, unit = scale(result, shape.values)
    drawn = [(rows, label, value) for label, rows in groups(result, shape.per).items() for value in shape.values]
    for rows, label, value in drawn[:MAX_LINES]:
        which = f"{label}, {title_of(result, value)}" if len(shape.values) > 1 else label
        order = rows[np.argsort(times[rows], kind="stable")]
        scaled = numbers(result, value)[order] * factor
        ax.plot(times[order], scaled, drawstyle="steps-post", label=_text(which), linewidth=1)
    ax.set_xlabel("ms since the first value")
    ax.set_ylabel(_axis(result, shape.values, unit))
    ax.legend(fontsize="small")
    return _left_out(len(drawn), MAX_LINES, "lines")


def _parts(result: ResultData, shape: Parts, ax: "Axes") -> str:
    rows = drawn_rows(result, shape)
    shown, names = rows[:MAX_BARS], labels(result, shape.label)
    _bars(ax, [names[row] for row in shown], parts(result, shape, shown), scale(result, shape.values))
    return _left_out(len(rows), MAX_BARS, "bars")


def _named_parts(result: ResultData, shape: NamedParts, ax: "Axes") -> str:
    bars = groups(result, shape.label)
    shown = dict(list(bars.items())[:MAX_BARS])
    _bars(ax, list(shown), named_parts(result, shape, list(shown.values())), scale(result, [shape.value]))
    return _left_out(len(bars), MAX_BARS, "bars")


def _bars(ax: "Axes", names: Sequence[str], lengths: Mapping[str, Values], scaled: tuple[float, str]) -> None:
    """Draws one bar per name, the first one on top."""
    left = np.zeros(len(names))
    for part, values in lengths.items():
        pieces = np.maximum(np.nan_to_num(values), 0) * scaled[0]
        if pieces.any():
            ax.barh(np.arange(len(names)), pieces, left=left, label=_text(part.replace("_", " ")))
            left += pieces
    ax.set_yticks(np.arange(len(names)), _texts(names), fontsize="small")
    ax.invert_yaxis()
    ax.set_xlabel(scaled[1])
    if len(lengths) > 1 and ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))  # beside the bars


def _pairs(result: ResultData, shape: Pairs, ax: "Axes") -> str:
    """Draws the bar of the baseline above that of the other trace."""
    rows, names = rows_with_pairs(result, shape), labels(result, shape.label)
    shown, (factor, unit) = rows[:MAX_BARS], scale(result, [shape.baseline, shape.other])
    for place, (name, column) in enumerate((("baseline", shape.baseline), ("other trace", shape.other))):
        lengths = np.nan_to_num(numbers(result, column)[shown]) * factor
        ax.barh(np.arange(len(shown)) + 0.4 * place - 0.2, lengths, height=0.4, label=name)
    ax.set_yticks(np.arange(len(shown)), _texts([names[row] for row in shown]), fontsize="small")
    ax.invert_yaxis()
    ax.set_xlabel(unit)
    ax.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    return _left_out(len(rows), MAX_BARS, "rows")


def _spread(result: ResultData, shape: Spread, ax: "Axes") -> str:
    names = {"whislo": "min", "q1": "p25", "med": "p50", "q3": "p75", "whishi": "max"}
    factor, unit = scale(result, [f"max{shape.suffix}"])
    columns = {part: numbers(result, name + shape.suffix)[:MAX_BARS] * factor for part, name in names.items()}
    known = np.flatnonzero(np.isfinite(columns["med"])).tolist()
    names_of_rows = _texts(labels(result, shape.label))
    boxes = [{"label": names_of_rows[row], **{part: columns[part][row] for part in names}} for row in known]
    ax.bxp(boxes, showfliers=False, orientation="horizontal")
    ax.invert_yaxis()
    ax.set_xlabel(unit)
    return _left_out(len(result), MAX_BARS, "boxes")


def _histogram(result: ResultData, shape: Histogram, ax: "Axes") -> str:
    factor, unit = scale(result, [shape.value])
    values = numbers(result, shape.value) * factor
    ax.hist(values[np.isfinite(values)], bins=BINS)
    ax.set_xlabel(f"{title_of(result, shape.value)} in {unit}")
    ax.set_ylabel("count")
    return ""


def _points(result: ResultData, shape: Points, ax: "Axes") -> str:
    """Draws one point per row, in the colour of its kind; those with the most time have names."""
    across, up, size = (numbers(result, name) for name in (shape.across, shape.up, shape.size))
    kinds, names = np.array(result.values(shape.kind), str), labels(result, shape.label)
    for kind in dict.fromkeys(kinds.tolist()):
        own = kinds == kind
        area = POINT_AREA * (1 + np.nan_to_num(size[own]))
        ax.scatter(across[own], up[own], s=area, alpha=0.6, label=_text(kind))
    for row in np.argsort(-np.nan_to_num(size), kind="stable")[:MAX_NAMES].tolist():
        if np.isfinite(across[row]) and np.isfinite(up[row]):
            ax.annotate(_text(names[row]), (across[row], up[row]), fontsize="x-small")
    for axis, name, limits in ((ax.set_xlabel, shape.across, ax.set_xlim), (ax.set_ylabel, shape.up, ax.set_ylim)):
        axis(f"{title_of(result, name)} (%)")
        limits(0, 100)
    ax.legend(fontsize="small")
    return ""


_DRAW: Mapping[type, Callable[[ResultData, Any, Any], str]] = {
    Curve: _curve,
    Parts: _parts,
    NamedParts: _named_parts,
    Pairs: _pairs,
    Spread: _spread,
    Histogram: _histogram,
    Points: _points,
}


def _axis(result: ResultData, names: Sequence[str], unit: str) -> str:
    return unit if len(names) > 1 else f"{title_of(result, names[0])} ({unit})"


def _left_out(count: int, most: int, what: str) -> str:
    return f"{most} of {count:,} {what}" if count > most else ""


def _text(text: str) -> str:
    return _texts([text])[0]


def _texts(texts: Sequence[str]) -> list[str]:
    """Returns the texts so that matplotlib draws them: no mathematics, and no label that a legend skips."""
    shown = [one_line(text).replace("$", r"\$") for text in shortened_apart(texts, MAX_TEXT)]
    return [f" {text}" if text.startswith("_") else text for text in shown]
