"""What is drawn of a result by its shape (plot_shapes.py): labels, parts and values in units that people read."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.view_api.cell_texts import bare_heading, cell
from kineto_trace.view_api.column_units import scaled_unit
from kineto_trace.view_api.plot_shapes import NamedParts, Pairs, Parts
from kineto_trace.view_api.result_data import ResultColumn, ResultData

REST = "rest"
OTHERS = "others"
_MS: Mapping[str, float] = {"ns": 1e-6, "us": 1e-3}
Values = npt.NDArray[np.float64]


def numbers(result: ResultData, name: str) -> Values:
    """Returns the values of a column; NaN for missing ones."""
    found: Values = result.table[name].cast("float64", safe=False).to_numpy(zero_copy_only=False)
    return found


def column_of(result: ResultData, name: str) -> ResultColumn:
    """Returns the column with this name."""
    return next(column for column in result.columns if column.name == name)


def title_of(result: ResultData, name: str) -> str:
    """Returns what a column is called in a picture."""
    return bare_heading(column_of(result, name))


def labels(result: ResultData, names: Sequence[str]) -> list[str]:
    """Returns what tells each row from the others; a column that has one value in all rows does not."""
    if not names:
        return [""] * len(result)
    columns = {name: result.values(name) for name in names if name in result.table.column_names}
    telling = {name: values for name, values in columns.items() if len(set(map(str, values))) > 1} or columns
    shown = {name: column_of(result, name) for name in telling}
    rows = [", ".join(_said(shown[name], value) for name, value in zip(telling, row, strict=True))
            for row in zip(*telling.values(), strict=True)]  # fmt: skip
    if "complete" not in result.table.column_names:
        return rows
    whole = result.values("complete")
    return [row if complete or complete is None else f"{row} (part)" for row, complete in zip(rows, whole, strict=True)]


def _said(column: ResultColumn, value: Any) -> str:
    if column.type in ("ints", "texts"):
        return str(value[-1]) if value else ""
    if column.type == "text" and column.name not in ("step", "device"):
        return "" if value is None else str(value)
    return f"{column.name.replace('_', ' ')} {cell(value, column)}" if column.unit != "bytes" else cell(value, column)


def groups(result: ResultData, names: Sequence[str]) -> dict[str, npt.NDArray[np.int64]]:
    """Returns the rows of each label."""
    found: dict[str, list[int]] = {}
    for row, label in enumerate(labels(result, names)):
        found.setdefault(label, []).append(row)
    return {label: np.array(rows, np.int64) for label, rows in found.items()}


def scale(result: ResultData, names: Sequence[str]) -> tuple[float, str]:
    """Returns a factor and the unit that it leads to: the one that fits the largest value of these columns."""
    largest = max(np.nanmax(np.abs(numbers(result, name)), initial=0) for name in names)
    factor, unit = scaled_unit(column_of(result, names[0]).unit, float(largest))
    return factor, unit or "count"


def moments(result: ResultData, name: str) -> Values:
    """Returns times in ms since the first one."""
    times = numbers(result, name)
    return (times - np.nanmin(times)) * _MS[column_of(result, name).unit]


def drawn_rows(result: ResultData, shape: Parts) -> npt.NDArray[np.int64]:
    """Returns the places of the rows that have a bar: all of them, or those of a job of several ranks."""
    everything = np.arange(len(result))
    if not shape.of_job or len(set(result.values("rank"))) < 2:
        return everything
    last = result.values(shape.label[-1])
    chosen = np.array([row for row in everything.tolist() if last[row] == shape.of_job], np.int64)
    return chosen if len(chosen) else everything


def parts(result: ResultData, shape: Parts, rows: npt.NDArray[np.int64]) -> dict[str, Values]:
    """Returns the lengths of the parts of these rows' bars, by the title of the part; NaN for missing ones."""
    found = {title_of(result, name): numbers(result, name)[rows] for name in shape.values}
    if not shape.whole:
        return found
    left = numbers(result, shape.whole)[rows] - np.sum([np.nan_to_num(each) for each in found.values()], axis=0)
    return {**found, REST: np.maximum(left, 0)}


def paired_rows(result: ResultData, shape: Pairs) -> list[int]:
    """Returns the places of the rows that have bars: all of them, or those inside of the outermost one if any are."""
    everything = list(range(len(result)))
    if not shape.depth:
        return everything
    depths = result.values(shape.depth)
    return [row for row in everything if depths[row] > min(depths)] or everything


def named_parts(result: ResultData, shape: NamedParts, bars: Sequence[npt.NDArray[np.int64]]) -> dict[str, Values]:
    """Returns the lengths of the parts of these bars, by the name of the part; 0 where a bar does not have it."""
    lengths, names = np.nan_to_num(numbers(result, shape.value)), [str(name) for name in result.values(shape.part)]
    found = {name: np.zeros(len(bars)) for name in dict.fromkeys(names)}
    for place, rows in enumerate(bars):
        for row in rows.tolist():
            found[names[row]][place] += lengths[row]
    return found
