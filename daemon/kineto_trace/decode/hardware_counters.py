"""Converts files of hardware counter samples, of several GPUs and samplers, to the table `counter`.

Theory of operation
    A file has one row per sample and a column per metric; the table has one row per sample and metric, metric by
    metric, each in the order of time. Values stay those of the file: a float64 that a float32 can hold. A value that is
    not finite becomes NaN, which means "none".

    Two samplers may record the same metric of a GPU. The samples of the first file stay; those of later files only fill
    the gaps, so that the rows of a device and metric never overlap. Label and unit are those of the first file.

    A row takes 40 bytes, and some 100 more while a Perfetto file is written. Up to MAX_ROWS rows (60 s at 100 µs of 8
    metrics of 4 GPUs) every sample is a row. If there would be more, 2, 4, 8, … neighbouring samples become one, whose
    value is their mean over time; the length of a row shows the time it covers. No mean crosses a gap that is longer
    than the requested sampling interval.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kineto_trace.base.array_types import AnyArray, Floats32, Ints
from kineto_trace.model.trace import NO_STRING, SCHEMAS, StringTable, Table, make_table
from kineto_trace.spool.counter_samples import CounterSamples, SampledMetric

MAX_ROWS = 20_000_000


@dataclass(frozen=True, slots=True)
class _Series:
    """A metric of a device: rows of the table, in the order of time."""

    device: int
    metric: SampledMetric
    start: Ints
    end: Ints
    values: Floats32


def counter_table(
    files: Sequence[tuple[int, CounterSamples]],
    strings: StringTable,
    start_ns: int,
    end_ns: int,
    *,
    max_rows: int = MAX_ROWS,
) -> Table:
    """Returns the samples of all files that overlap [start_ns, end_ns) (Unix ns), unclipped, as the table `counter`.

    files: the index of the device as the process sees it (below 2**32), and its samples.
    max_rows: if there are more samples, neighbours are merged.
    """
    return _table(_chosen(files, start_ns, end_ns, max_rows), strings)


def samples_per_row(
    files: Sequence[tuple[int, CounterSamples]], start_ns: int, end_ns: int, *, max_rows: int = MAX_ROWS
) -> int:
    """Returns how many neighbouring samples of these files become one row of the table; 1 if each is a row."""
    rows = sum(_overlapping(samples, start_ns, end_ns).values.size for _, samples in files)
    return 1 << max(0, -(-rows // max_rows) - 1).bit_length()


def _chosen(files: Sequence[tuple[int, CounterSamples]], start_ns: int, end_ns: int, max_rows: int) -> list[_Series]:
    together = samples_per_row(files, start_ns, end_ns, max_rows=max_rows)
    found: dict[tuple[int, str], _Series] = {}
    for device, samples in files:
        near = _merged(_overlapping(samples, start_ns, end_ns), together)
        for metric, values in zip(near.header.metrics, near.values.T, strict=True):
            key, series = (device, metric.name), _Series(device, metric, near.start_ns, near.end_ns, values)
            found[key] = _filled(found[key], series) if key in found else series
    return [found[key] for key in sorted(found)]


def _overlapping(samples: CounterSamples, start_ns: int, end_ns: int) -> CounterSamples:
    first = int(np.searchsorted(samples.end_ns, start_ns, side="right"))
    stop = max(first, int(np.searchsorted(samples.start_ns, end_ns, side="left")))
    return replace(
        samples,
        start_ns=samples.start_ns[first:stop],
        end_ns=samples.end_ns[first:stop],
        values=samples.values[first:stop],
    )


def _merged(samples: CounterSamples, together: int) -> CounterSamples:
    """Merges so many neighbours each, with the mean over time of those that have a value."""
    if together == 1 or not len(samples.start_ns):
        return samples
    start, end = samples.start_ns, samples.end_ns
    place = np.arange(len(start))
    apart = np.append(True, start[1:] - end[:-1] > samples.header.interval_ns)
    run = np.maximum.accumulate(np.where(apart, place, 0))  # where the run of each sample begins
    first = np.flatnonzero((place - run) % together == 0)
    length = (end - start).astype(np.float64)
    values = np.empty((len(first), samples.values.shape[1]), np.float32)
    for number in range(values.shape[1]):  # one at a time: float64 of all would be twice the file
        column = samples.values[:, number].astype(np.float64)
        known = np.isfinite(column)
        total = np.add.reduceat(np.where(known, column * length, 0.0), first)
        time = np.add.reduceat(np.where(known, length, 0.0), first)
        values[:, number] = np.divide(total, time, out=np.full(len(first), np.nan), where=time > 0)
    return replace(samples, start_ns=start[first], end_ns=end[np.append(first[1:], len(end)) - 1], values=values)


def _filled(series: _Series, other: _Series) -> _Series:
    """Returns a series with the samples of another one that overlap none of its own."""
    ended = np.searchsorted(series.end, other.start, side="right")
    begun = np.searchsorted(series.start, other.end, side="left")
    free = ended >= begun
    start = np.concatenate([series.start, other.start[free]])
    order = np.argsort(start, kind="stable")
    return replace(
        series,
        start=start[order],
        end=np.concatenate([series.end, other.end[free]])[order],
        values=np.concatenate([series.values, other.values[free]])[order],
    )


def _table(found: Sequence[_Series], strings: StringTable) -> Table:
    """Writes all series into columns of the final size: nothing is held twice."""
    bounds = np.cumsum([0, *(len(each.start) for each in found)]).tolist()
    columns: dict[str, AnyArray] = {column.name: np.empty(bounds[-1], column.dtype) for column in SCHEMAS["counter"]}
    for each, first, stop in zip(found, bounds, bounds[1:], strict=False):
        part = slice(first, stop)
        columns["start"][part] = each.start
        np.subtract(each.end, each.start, out=columns["duration"][part])
        columns["name"][part] = strings.add(each.metric.label or each.metric.name)
        columns["device"][part] = each.device
        columns["metric"][part] = strings.add(each.metric.name)
        columns["unit"][part] = strings.add(each.metric.unit) if each.metric.unit else NO_STRING
        value = columns["value"][part]
        value[:] = each.values
        value[~np.isfinite(value)] = np.nan
    return make_table("counter", bounds[-1], columns)
