"""Samples of hardware counters in the form of viewers: for each device and metric, points in time of one value each.

Theory of operation
    A viewer holds a value until the next point. So a sample is a point at its beginning; if the next sample does not
    begin at its end, there is a point of 0 at its end. A sample without a value is a point of 0, too, since no viewer
    can show a missing value. A point's category distinguishes the three, and has the unit and the vendor's name of the
    metric, so that files that we wrote are read back as the same table:

        %,dram__throughput.avg,hardware_counter          a sample
        %,dram__throughput.avg,hardware_counter_none     a sample without a value
        hardware_counter_gap                             the end of a sample that is not followed by another one

    A sample ends at the next point of its track. The name of a track consists of label and unit (`DRAM %`), and of the
    metric in parentheses if two metrics of a device share both. Values have the precision of a float32: their decimals
    are as short as that allows.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from kineto_trace.base.array_types import AnyArray, Floats, Ints, UInts8
from kineto_trace.model.activity_tables import COUNTER
from kineto_trace.model.trace import Table, Trace

SAMPLE, NONE, GAP = range(3)  # kinds of points
SAMPLE_CATEGORY, NONE_CATEGORY, GAP_CATEGORY = "hardware_counter", "hardware_counter_none", "hardware_counter_gap"
_SEPARATOR = ","
_MOST_DIGITS = 9  # of a float32
_MANY = 4096  # changes between series, above which rows are sorted


class HardwareSeries(NamedTuple):
    """The samples of one metric of one device.

    rows: of the table, in the order of time.
    title: label, and the metric if the label is not unique.
    shown: the title with the unit after the label.
    """

    device: int
    title: str
    shown: str
    unit: str
    metric: str
    rows: Ints

    def categories(self) -> tuple[str, str, str]:
        """Returns the categories of its points by kind."""
        about = f"{self.unit.replace(_SEPARATOR, ';')}{_SEPARATOR}{self.metric}{_SEPARATOR}"
        return about + SAMPLE_CATEGORY, about + NONE_CATEGORY, GAP_CATEGORY


class HardwarePoints(NamedTuple):
    """The points of a series. time: Unix ns, ascending; what: SAMPLE, NONE or GAP; value: 0 unless it is a SAMPLE."""

    time: Ints
    value: Floats
    what: UInts8


class ParsedSeries(NamedTuple):
    """The contents of a point's category and name. has_value: it is a SAMPLE, not a NONE."""

    label: str
    unit: str
    metric: str
    has_value: bool


def hardware_series(trace: Trace) -> list[HardwareSeries]:
    """Returns all series of a trace, by device. Those of several processes in a merged file are separate."""
    table = trace.table(COUNTER)
    keys = [table[name] for name in ("device", "name", "unit", "metric")]
    keys += [table.origin["pid"]] if table.origin else []
    order, begins = None, _changes(keys)
    if len(begins) > _MANY:
        order = np.lexsort((table["start"], *keys))
        keys = [key[order] for key in keys]
        begins = _changes(keys)
    parts: dict[tuple[Any, ...], list[Ints]] = {}
    for first, stop in zip(begins.tolist(), [*begins[1:].tolist(), len(table)], strict=False):
        rows = np.arange(first, stop) if order is None else order[first:stop]
        device, label, unit, metric, *process = (int(key[first]) for key in keys)
        texts = (_as_written(trace.strings[number]) if number >= 0 else "" for number in (label, unit, metric))
        parts.setdefault((device, *texts, *process), []).append(rows)
    found: list[HardwareSeries] = []
    taken: set[tuple[str, tuple[int, ...]]] = set()
    for key in sorted(parts, key=lambda key: key[0]):
        device, label, unit, metric, *process = key
        shown, place = _shown(label, unit), (device, *process)
        further = f" ({metric})" if taken & {(label, place), (shown, place)} else ""
        taken |= {(label, place), (shown, place)}
        rows = np.concatenate(parts[key])
        start = table["start"][rows]
        if (start[1:] < start[:-1]).any():
            rows = rows[np.argsort(start, kind="stable")]
        found.append(HardwareSeries(device, label + further, shown + further, unit, metric, rows))
    return found


def _changes(keys: Sequence[AnyArray]) -> Ints:
    """Returns the rows, from the first one on, whose keys differ from those of the previous row."""
    count = len(keys[0])
    differs = np.zeros(count, np.bool_)
    differs[:1] = True
    for key in keys:
        differs[1:] |= key[1:] != key[:-1]
    return np.flatnonzero(differs)


def _as_written(text: str) -> str:
    """Returns the text as files can store it: texts that differ only in lone surrogates become the same."""
    return text.encode("utf-8", "replace").decode()


def _shown(label: str, unit: str) -> str:
    return f"{label} {unit}" if unit else label


def points(table: Table, series: HardwareSeries) -> HardwarePoints:
    """Returns the points of a series."""
    start, duration = table["start"][series.rows], table["duration"][series.rows]
    with np.errstate(over="ignore"):
        value = table["value"][series.rows].astype(np.float32)
    known = np.isfinite(value)
    end = start + duration
    last = np.flatnonzero(np.append(end[:-1] < start[1:], True))
    what = np.where(known, SAMPLE, NONE).astype(np.uint8)
    return HardwarePoints(
        np.insert(start, last + 1, end[last]),
        np.insert(np.where(known, value, 0).astype(np.float64), last + 1, 0.0),
        np.insert(what, last + 1, GAP).astype(np.uint8),
    )


def parse_series(category: str, shown: str) -> ParsedSeries:
    """Returns the contents of a sample's category and name. Missing parts are empty."""
    about, _, what = category.rpartition(_SEPARATOR)
    unit, _, metric = about.partition(_SEPARATOR)
    label = shown.removesuffix(f" ({metric})")
    label = label.removesuffix(f" {unit}") if unit else label
    return ParsedSeries(label, unit, metric, what.lower() != NONE_CATEGORY)


def shortest_decimals(values: Floats) -> Floats:
    """Returns for each float32 value the number with the fewest digits that rounds to it."""
    found = values.copy()
    rest = np.flatnonzero(values != 0)
    exponent = np.floor(np.log10(np.abs(values[rest]))).astype(np.int64)
    rest, exponent = rest[np.abs(exponent) < 12], exponent[np.abs(exponent) < 12]  # powers of ten are exact up to 22
    for digits in range(1, _MOST_DIGITS + 1):
        places = digits - 1 - exponent
        up, down = 10.0 ** np.maximum(places, 0), 10.0 ** np.maximum(-places, 0)
        tried = np.rint(values[rest] * up / down) / up * down
        fits = tried.astype(np.float32) == values[rest].astype(np.float32)
        found[rest[fits]] = tried[fits]
        rest, exponent = rest[~fits], exponent[~fits]
    return found


def series_points(trace: Trace) -> Iterator[tuple[HardwareSeries, HardwarePoints]]:
    """Yields each series with its points."""
    table = trace.table(COUNTER)
    for series in hardware_series(trace):
        yield series, points(table, series)
