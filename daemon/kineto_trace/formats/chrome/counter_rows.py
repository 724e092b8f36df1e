"""The table `counter` from the rows of a Chrome trace that we wrote (formats/shared/counter_series.py)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.row_groups import group
from kineto_trace.formats.shared.counter_series import GAP_CATEGORY, told
from kineto_trace.model.trace import NO_STRING, Table

SHOWN = "shown"  # origin column: the number of the name that the row has in the file
MAX_DEVICE = 2**32 - 1
_COUNTER_PHASE = ord("C")

Ints = npt.NDArray[np.int64]
Columns = dict[str, npt.NDArray[Any]]


def fill_counters(columns: Columns, tid: Ints, category: npt.NDArray[Any], strings: list[str]) -> Columns:
    """Fills the columns of the table but for the lengths of the samples. Returns further origin columns.

    columns: as the file has them, with names. tid, category: of each row.
    """
    count = len(tid)
    origin: Columns = {SHOWN: columns["name"]}
    columns["device"] = np.where((tid >= 0) & (tid <= MAX_DEVICE), tid, 0).astype(np.uint32)
    kinds = group([columns["name"], category])
    known = [told(strings[category[row]], strings[columns["name"][row]]) for row in kinds.first.tolist()]
    numbers = {text: number for number, text in enumerate(strings)}
    for name, texts in (
        ("name", [each.label for each in known]),
        ("metric", [each.metric or None for each in known]),
        ("unit", [each.unit or None for each in known]),
    ):
        columns[name] = np.array([_number(text, strings, numbers) for text in texts], np.int32)[kinds.number]
    told_values = columns.get("value", np.full(count, np.nan))
    has_value = np.array([each.has_value for each in known], np.bool_)[kinds.number]
    with np.errstate(over="ignore"):
        value = np.where(has_value, told_values.astype(np.float32), np.nan).astype(np.float64)
    columns["value"] = np.where(np.isfinite(value), value, np.nan)
    if not np.array_equal(columns["value"], told_values):
        origin["value"] = told_values
    return origin


def _number(text: str | None, strings: list[str], numbers: dict[str, int]) -> int:
    if text is None:
        return NO_STRING
    if text not in numbers:
        numbers[text] = len(strings)
        strings.append(text)
    return numbers[text]


def gap_rows(other: Table, strings: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Tells which rows of the table `other` are ends of samples."""
    if not other.origin or GAP_CATEGORY not in strings:
        return np.zeros(len(other), np.bool_)
    found: npt.NDArray[np.bool_] = (other["phase"] == _COUNTER_PHASE) & (
        other["category"] == strings.index(GAP_CATEGORY)
    )
    return found


def with_lengths(table: Table, other: Table, strings: Sequence[str]) -> Table:
    """Returns the table with the lengths of its samples: until the next row of the track.

    The last row of a track whose end the file does not have is as long as the one before it.
    """
    gaps = other.take(np.flatnonzero(gap_rows(other, strings)))
    both = [
        np.concatenate(pair)
        for pair in (
            (table.origin["pid"], gaps.origin.get("pid", np.empty(0, np.int64))),
            (table.origin["tid"], gaps.origin.get("tid", np.empty(0, np.int64))),
            (table.origin[SHOWN], gaps["name"]),
        )
    ]
    start = np.concatenate([table["start"], gaps["start"]])
    track = group(both).number
    order = np.lexsort((start, track))
    length = np.append(np.diff(start[order]), 0)
    first = np.append(True, np.diff(track[order]) != 0)
    last = np.append(first[1:], True)
    before = np.where(first, 0, np.append(0, length[:-1]))
    found = np.empty(len(order), np.int64)
    found[order] = np.where(last, before, length)
    return table.with_columns({"duration": found[: len(table)]})
