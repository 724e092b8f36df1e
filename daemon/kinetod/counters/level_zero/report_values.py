"""From the values of a stream's reports to rows: numbers, and Unix time. Pure.

Theory of operation
    A report of the stream tells of the time since the report before it. Its GpuTime is how long that is, and its
    QueryBeginTime, against its name, is when it ended: the driver reads it from the later one of the two raw reports
    (metrics-discovery, md_calculation.cpp, ProcessCalculation). Reports come with each tick of the timer and, besides,
    when the GPU switches between contexts; so samples may be shorter than the interval, and their times abut.

    QueryBeginTime is the GPU's timestamp in ns, and begins anew when its counter wraps, which is after minutes on some
    chips. So it is held against a reading of the same clock that is at most some seconds away, modulo the wrap. All
    wraps of a GPU are powers of two of its ticks, and its clocks' frequencies differ by a power of two, so the shortest
    wrap serves for all. Whether samples abut is told by the GPU's clock alone: readings of it against Unix time differ
    by microseconds.

    Where a report is missing, the next one tells of a longer time. Its counters may have wrapped meanwhile; so it is
    left out, and its time counts as lost, like a hole between two samples. The driver's own word that it dropped
    reports is not counted: it comes before or after the place.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kinetod.counters.level_zero.metric_formulas import END, LENGTH, GroupPlan, MetricFormula
from kinetod.counters.level_zero.tools_library import ClockReading

UINT32, UINT64, FLOAT32, FLOAT64, BOOL8, STRING, UINT8, UINT16 = range(8)  # zet_value_type_t
SLACK_NS = 100e6  # between two readings of a clock
_WHOLE_BITS = {UINT32: 32, UINT64: 64, BOOL8: 8, UINT8: 8, UINT16: 16}


class OtherClockError(Exception):
    """The samples' times are not those of the GPU's clock."""


class SampleRow(NamedTuple):
    """A sample in Unix time."""

    start_ns: int
    end_ns: int
    values: npt.NDArray[np.float32]


class SampleGap(NamedTuple):
    """A place where samples are missing."""

    lost_ns: int


def numbers(values: npt.NDArray[np.void]) -> npt.NDArray[np.float64]:
    """Of one metric, whose values all have the same type; NaN for what is no number."""
    kind, bits = int(values["type"][0]), np.ascontiguousarray(values["bits"])
    if kind == FLOAT32:
        return bits.astype("<u4").view("<f4").astype(np.float64)
    if kind == FLOAT64:
        return bits.view("<f8").copy()
    if kind not in _WHOLE_BITS:
        return np.full(len(values), np.nan)
    mask = np.uint64((1 << _WHOLE_BITS[kind]) - 1)
    return (bits & mask).astype(np.float64)


class ReportReader:
    """Makes rows of the values of one stream.

    period_ns: the hardware's interval; wrap_ns: of the shortest of its clocks; opened: read before the stream was.
    """

    def __init__(self, planned: GroupPlan, period_ns: int, wrap_ns: float, opened: ClockReading) -> None:
        self._formulas = planned.formulas
        used = {LENGTH, END, *(name for formula in self._formulas for name in (*formula.terms, *formula.per))}
        self._places = {metric.name: place for place, metric in enumerate(planned.group.metrics) if metric.name in used}
        self._period_ns = period_ns
        self._wrap_ns = wrap_ns
        self._opened = opened
        self._latest_ns = 0  # the end of the sample before, in Unix time; 0: there was none
        self._latest_gpu_ns = 0.0

    def rows(self, values: npt.NDArray[np.void], clock: ClockReading) -> Iterator[SampleRow | SampleGap]:
        """The rows and gaps in the order of time. clock: read after the values.

        The very first report is left out: it may tell of a time before the stream was opened. Raises OtherClockError.
        """
        if not len(values):
            return
        columns = {name: numbers(values[:, place]) for name, place in self._places.items()}
        lengths, ends, apart = columns[LENGTH], columns[END], self._apart(columns[END], clock)
        figures = np.stack([_figure(formula, columns) for formula in self._formulas], axis=1).astype(np.float32)
        for row in np.flatnonzero(lengths > 0):
            end_ns, passed_ns = clock.unix_ns + round(apart[row]), (ends[row] - self._latest_gpu_ns) % self._wrap_ns
            if self._latest_ns:
                if passed_ns > self._wrap_ns / 2:  # it ended before the sample before
                    continue
                yield from self._sample(end_ns, passed_ns, lengths[row], figures[row])
            self._latest_ns = max(self._latest_ns, end_ns)
            self._latest_gpu_ns = ends[row]

    def _apart(self, ends: npt.NDArray[np.float64], clock: ClockReading) -> npt.NDArray[np.float64]:
        """How long after the reading of the clock."""
        half = self._wrap_ns / 2
        apart: npt.NDArray[np.float64] = (ends - clock.gpu_ns + half) % self._wrap_ns - half
        before_opened = apart[-1] < self._opened.unix_ns - clock.unix_ns - SLACK_NS
        if apart[-1] > SLACK_NS or (before_opened and not self._latest_ns):
            raise OtherClockError
        return apart

    def _sample(
        self, end_ns: int, passed_ns: float, length_ns: float, figures: npt.NDArray[np.float32]
    ) -> Iterator[SampleRow | SampleGap]:
        """passed_ns: from the end of the sample before to the end of this one, by the GPU's clock."""
        near_ns, start_ns = self._period_ns / 2, self._latest_ns
        if (
            length_ns > self._period_ns + near_ns or end_ns <= start_ns
        ):  # reports are missing, or Unix time stepped back
            yield SampleGap(round(passed_ns))
            return
        if passed_ns - length_ns >= near_ns:
            yield SampleGap(round(passed_ns - length_ns))
            start_ns = max(start_ns, end_ns - round(length_ns))
        yield SampleRow(start_ns, end_ns, figures)


def _figure(formula: MetricFormula, columns: dict[str, npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    figure = formula.factor * _sum(columns, formula.terms)
    with np.errstate(divide="ignore", invalid="ignore"):
        if formula.per:
            per = _sum(columns, formula.per)
            figure = np.where(per > 0, figure / per, np.nan)
        if formula.rate:
            figure = figure / (columns[LENGTH] / 1e9)
    return figure


def _sum(columns: dict[str, npt.NDArray[np.float64]], names: Sequence[str]) -> npt.NDArray[np.float64]:
    total: npt.NDArray[np.float64] = np.sum([columns[name] for name in names], axis=0)
    return total
