"""Draws results with matplotlib: values over time, bars of parts, boxes and histograms.

What is drawn of each view is in plot_shapes.py. Texts of traces are drawn as they are: no text is mathematics, steers a
terminal or hides a label. There are at most MAX_BARS bars and MAX_LINES lines, and the title says if there were more.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kineto_trace.base.quantities import shortened
from kineto_trace.base.visible_text import one_line
from kineto_trace.errors import ViewError
from kineto_trace.view_api.cell_texts import heading
from kineto_trace.view_api.plot_shapes import SHAPES, Curve, Histogram, NamedParts, Parts, Spread
from kineto_trace.view_api.result_data import ResultData
from kineto_trace.view_api.result_frames import needed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_BARS, MAX_LINES, MAX_TEXT = 40, 12, 48
BAR_INCHES, WIDTH_INCHES, HEIGHT_INCHES = 0.3, 9.0, 3.6
BINS = 50
Values = npt.NDArray[np.float64]
_SCALES: Mapping[str, Sequence[tuple[float, str]]] = {  # the largest first
    "us": ((1e6, "s"), (1e3, "ms"), (1, "µs")),
    "bytes": ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")),
}


def plot(result: ResultData, ax: "Axes | None" = None) -> "Axes":
    """Draws a result. See Result.plot."""
    shape = SHAPES.get(result.view)
    if shape is None:
        raise ViewError(f"view {result.view} has no shape that can be drawn; these have one: {', '.join(SHAPES)}")
    if not len(result):
        raise ViewError(f"view {result.view} has no rows to draw{''.join(f': {note}' for note in result.notes[:1])}")
    if ax is None:
        height = BAR_INCHES * min(len(result), MAX_BARS) + 1 if not isinstance(shape, (Curve, Histogram)) else 0
        figure = needed("matplotlib.pyplot", "notebook").figure
        ax = figure(figsize=(WIDTH_INCHES, max(height, HEIGHT_INCHES)), layout="constrained").add_subplot()
    assert ax is not None
    more = _DRAW[type(shape)](result, shape, ax)
    ax.set_title(_text(result.view.replace("_", " ") + (f" ({more})" if more else "")))
    return ax


def _curve(result: ResultData, shape: Curve, ax: "Axes") -> str:
    moments = _numbers(result, shape.moment)
    begin = np.nanmin(moments)
    groups = _groups(result, shape.per)
    scale, unit = _scale(result, shape.values)
    drawn = [(rows, label, value) for label, rows in groups.items() for value in shape.values]
    for rows, label, value in drawn[:MAX_LINES]:
        which = f"{label}, {_title(result, value)}" if len(shape.values) > 1 else label
        order = rows[np.argsort(moments[rows], kind="stable")]
        scaled = _numbers(result, value)[order] * scale
        ax.plot((moments[order] - begin) / 1e6, scaled, drawstyle="steps-post", label=_text(which), linewidth=1)
    ax.set_xlabel("ms since the first moment")
    ax.set_ylabel(_axis(result, shape.values, unit))
    ax.legend(fontsize="small")
    return _left_out(len(drawn), MAX_LINES, "lines")


def _parts(result: ResultData, shape: Parts, ax: "Axes") -> str:
    values = {_title(result, name): _numbers(result, name)[:MAX_BARS] for name in shape.values}
    _bars(ax, _labels(result, shape.label)[:MAX_BARS], values, _scale(result, shape.values))
    return _left_out(len(result), MAX_BARS, "bars")


def _named_parts(result: ResultData, shape: NamedParts, ax: "Axes") -> str:
    bars = _groups(result, shape.label)
    shown = dict(list(bars.items())[:MAX_BARS])
    lengths, names = _numbers(result, shape.value), [str(name) for name in result.values(shape.part)]
    values = {name: np.zeros(len(shown)) for name in dict.fromkeys(names)}
    for place, rows in enumerate(shown.values()):
        for row in rows.tolist():
            values[names[row]][place] += np.nan_to_num(lengths[row])
    _bars(ax, list(shown), values, _scale(result, [shape.value]))
    return _left_out(len(bars), MAX_BARS, "bars")


def _bars(ax: "Axes", labels: Sequence[str], parts: Mapping[str, Values], scale: tuple[float, str]) -> None:
    """Draws one bar per label, the first one on top."""
    left = np.zeros(len(labels))
    for name, values in parts.items():
        lengths = np.maximum(np.nan_to_num(values), 0) * scale[0]
        if lengths.any():
            ax.barh(np.arange(len(labels)), lengths, left=left, label=_text(name.replace("_", " ")))
            left += lengths
    ax.set_yticks(np.arange(len(labels)), [_text(label) for label in labels], fontsize="small")
    ax.invert_yaxis()
    ax.set_xlabel(scale[1])
    if len(parts) > 1 and ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))  # beside the bars


def _spread(result: ResultData, shape: Spread, ax: "Axes") -> str:
    names = {"whislo": "min", "q1": "p25", "med": "p50", "q3": "p75", "whishi": "max"}
    scale, unit = _scale(result, [f"max{shape.suffix}"])
    columns = {part: _numbers(result, name + shape.suffix)[:MAX_BARS] * scale for part, name in names.items()}
    known = np.flatnonzero(np.isfinite(columns["med"])).tolist()
    labels = _labels(result, shape.label)
    boxes = [{"label": _text(labels[row]), **{part: columns[part][row] for part in names}} for row in known]
    ax.bxp(boxes, showfliers=False, orientation="horizontal")
    ax.invert_yaxis()
    ax.set_xlabel(unit)
    return _left_out(len(result), MAX_BARS, "boxes")


def _histogram(result: ResultData, shape: Histogram, ax: "Axes") -> str:
    scale, unit = _scale(result, [shape.value])
    values = _numbers(result, shape.value) * scale
    ax.hist(values[np.isfinite(values)], bins=BINS)
    ax.set_xlabel(f"{_title(result, shape.value)} in {unit}")
    ax.set_ylabel("count")
    return ""


_DRAW: Mapping[type, Callable[[ResultData, Any, Any], str]] = {
    Curve: _curve,
    Parts: _parts,
    NamedParts: _named_parts,
    Spread: _spread,
    Histogram: _histogram,
}


def _numbers(result: ResultData, name: str) -> Values:
    """Returns the values of a column; NaN for missing ones."""
    found: Values = result.table[name].cast("float64", safe=False).to_numpy(zero_copy_only=False)
    return found


def _labels(result: ResultData, names: Sequence[str]) -> list[str]:
    """Returns what tells each row from the others; a column that has one value in all rows does not."""
    columns = {name: result.values(name) for name in names if name in result.table.column_names}
    telling = {name: values for name, values in columns.items() if len(set(values)) > 1} or columns
    rows = zip(*telling.values(), strict=True)
    return [", ".join(_said(name, value) for name, value in zip(telling, row, strict=True)) for row in rows]


def _said(name: str, value: Any) -> str:
    return str(value) if name in ("name", "kind") else f"{name} {value}"


def _groups(result: ResultData, names: Sequence[str]) -> dict[str, npt.NDArray[np.int64]]:
    found: dict[str, list[int]] = {}
    for row, label in enumerate(_labels(result, names)):
        found.setdefault(label, []).append(row)
    return {label: np.array(rows, np.int64) for label, rows in found.items()}


def _scale(result: ResultData, names: Sequence[str]) -> tuple[float, str]:
    """Returns a factor and the unit that it leads to: the one that fits the largest value of these columns."""
    unit = next(column.unit for column in result.columns if column.name == names[0])
    largest = max(np.nanmax(np.abs(_numbers(result, name)), initial=0) for name in names)
    for size, scaled in _SCALES.get(unit, ()):
        if largest >= size or size == 1:
            return 1 / size, scaled
    return 1, unit or "count"


def _axis(result: ResultData, names: Sequence[str], unit: str) -> str:
    return unit if len(names) > 1 else f"{_title(result, names[0]).removesuffix(' %')} ({unit})"


def _title(result: ResultData, name: str) -> str:
    return heading(next(column for column in result.columns if column.name == name))


def _left_out(count: int, most: int, what: str) -> str:
    return f"{most} of {count:,} {what}" if count > most else ""


def _text(text: str) -> str:
    """Returns the text so that matplotlib draws it: no mathematics, and no label that a legend skips."""
    shown = one_line(shortened(text, MAX_TEXT)).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown
