"""From the values of reports to rows, with clocks that wrap."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from kinetod.counters.level_zero.metric_formulas import GroupPlan, planned_metrics
from kinetod.counters.level_zero.report_values import (
    OtherClockError,
    ReportReader,
    SampleGap,
    SampleRow,
    numbers,
)
from kinetod.counters.level_zero.tools_library import VALUE, ClockReading, GroupMetric, MetricGroup

MS = 1_000_000
WRAP_NS = 2.0**32 * 1e9 / 19_200_000
UNIX_NS = 1_800_000_000_000_000_000
NAMES = ("GpuTime", "QueryBeginTime", "GPU_MEMORY_BYTE_READ")
GROUP = MetricGroup(
    handle=1,
    name="G",
    domain=0,
    metrics=tuple(
        GroupMetric(name=name, type=kind, value_type=1, unit=unit)
        for name, kind, unit in zip(NAMES, (1, 4, 1), ("ns", "ns", "bytes"), strict=True)
    ),
)
PLANNED: GroupPlan = planned_metrics("Arc", [GROUP], ["GPU_MEMORY_BYTE_READ"])


def reports(*rows: tuple[float, int, int]) -> npt.NDArray[np.void]:
    """Of (end after the clock's zero, length, bytes), with a clock that wraps."""
    made = np.zeros((len(rows), 3), dtype=VALUE)
    made["type"] = 1
    made["bits"] = [[length, int(end % WRAP_NS), amount] for end, length, amount in rows]
    return made


def read(*batches: Sequence[tuple[float, int, int]], zero: float = 0.0) -> list[SampleRow | SampleGap]:
    """Each batch is read at the end of its last report; the GPU's clock has `zero` when Unix time is UNIX_NS."""
    reader = ReportReader(PLANNED, MS, WRAP_NS, ClockReading(UNIX_NS, zero % WRAP_NS))
    found: list[SampleRow | SampleGap] = []
    for batch in batches:
        last = max(end for end, _, _ in batch)
        clock = ClockReading(UNIX_NS + round(last), (zero + last) % WRAP_NS)
        found += reader.rows(reports(*((zero + end, length, amount) for end, length, amount in batch)), clock)
    return found


def ticks(first: int, last: int) -> list[tuple[float, int, int]]:
    return [(number * MS, MS, 1000) for number in range(first, last)]


def test_the_first_report_is_left_out_and_the_others_abut() -> None:
    rows = read([(MS, 5_000 * MS, 7), *ticks(2, 4)], ticks(4, 6))
    assert [(row.start_ns - UNIX_NS, row.end_ns - UNIX_NS) for row in rows if isinstance(row, SampleRow)] == [
        (number * MS - MS, number * MS) for number in range(2, 6)
    ]
    assert [row.values.tolist() for row in rows if isinstance(row, SampleRow)] == [[1e6]] * 4


@pytest.mark.parametrize("zero", [WRAP_NS - 3.5 * MS, 7 * WRAP_NS + 12_345_678])
def test_a_clock_that_begins_anew_changes_nothing(zero: float) -> None:
    rows = read(ticks(1, 5), ticks(5, 9), zero=zero)
    assert [type(row) for row in rows] == [SampleRow] * 7
    ends = [row.end_ns - UNIX_NS for row in rows if isinstance(row, SampleRow)]
    assert ends == pytest.approx([number * MS for number in range(2, 9)], abs=2)


def test_a_report_of_a_longer_time_and_a_hole_are_gaps_of_their_length() -> None:
    assert read([*ticks(1, 3), (5 * MS, 3 * MS, 1), *ticks(6, 7)])[1] == SampleGap(3 * MS)
    rows = read([*ticks(1, 3), *ticks(8, 9)])
    assert rows[1] == SampleGap(5 * MS)
    assert isinstance(rows[2], SampleRow) and rows[2].start_ns == UNIX_NS + 7 * MS


def test_readings_of_the_clock_that_differ_by_a_little_leave_no_hole_and_no_overlap() -> None:
    reader = ReportReader(PLANNED, MS, WRAP_NS, ClockReading(UNIX_NS, 0))
    rows: list[SampleRow | SampleGap] = []
    for number, off_ns in enumerate((0, 20_000, -20_000, 0), 1):
        clock = ClockReading(UNIX_NS + number * MS + off_ns, number * MS)
        rows += reader.rows(reports((number * MS, MS, 1000)), clock)
    times = [(row.start_ns, row.end_ns) for row in rows if isinstance(row, SampleRow)]
    assert len(times) == len(rows) == 3
    assert all(before[1] == after[0] for before, after in zip(times, times[1:], strict=False))


def test_unix_time_that_steps_back_gives_no_overlap() -> None:
    reader = ReportReader(PLANNED, MS, WRAP_NS, ClockReading(UNIX_NS, 0))
    list(reader.rows(reports(*ticks(1, 5)), ClockReading(UNIX_NS + 4 * MS, 4 * MS)))
    stepped = list(reader.rows(reports(*ticks(5, 12)), ClockReading(UNIX_NS + 8 * MS, 11 * MS)))
    assert stepped[:3] == [SampleGap(MS)] * 3
    times = [(row.start_ns - UNIX_NS, row.end_ns - UNIX_NS) for row in stepped[3:] if isinstance(row, SampleRow)]
    assert times == [(number * MS, number * MS + MS) for number in range(4, 8)]


def test_a_reading_of_the_clock_that_was_held_up_makes_no_gap() -> None:
    reader = ReportReader(PLANNED, MS, WRAP_NS, ClockReading(UNIX_NS, 0))
    rows = list(reader.rows(reports(*ticks(1, 5)), ClockReading(UNIX_NS + 4 * MS, 4 * MS)))
    rows += reader.rows(reports(*ticks(5, 9)), ClockReading(UNIX_NS + 11 * MS, 8 * MS))
    assert [type(row) for row in rows] == [SampleRow] * 7
    assert isinstance(rows[3], SampleRow) and rows[3].start_ns == UNIX_NS + 4 * MS


@pytest.mark.parametrize("off_ns", [-500 * MS, 500 * MS, 20_000 * MS])
def test_times_of_another_clock_are_no_samples(off_ns: int) -> None:
    reader = ReportReader(PLANNED, MS, WRAP_NS, ClockReading(UNIX_NS, 0))
    with pytest.raises(OtherClockError):
        list(reader.rows(reports((MS + off_ns, MS, 1)), ClockReading(UNIX_NS + MS, MS)))


def test_a_report_without_length_is_no_sample_and_no_report_no_row() -> None:
    rows = read([*ticks(1, 3), (2 * MS, 0, 5), *ticks(3, 4)])
    assert len(rows) == 2
    reader = ReportReader(PLANNED, MS, WRAP_NS, ClockReading(UNIX_NS, 0))
    assert list(reader.rows(np.zeros((0, 3), dtype=VALUE), ClockReading(UNIX_NS, 0))) == []


@pytest.mark.parametrize(
    ("kind", "bits", "number"),
    [
        (0, 0xFFFFFFFF00000007, 7.0),
        (1, 1 << 40, 2.0**40),
        (2, 0x40490FDB, 3.1415927),
        (3, 0x400921FB54442D18, 3.141592653589793),
        (4, 0xABCD01, 1.0),
        (6, 0x1FF, 255.0),
        (7, 0x1FFFF, 65535.0),
    ],
)
def test_a_value_of_each_type_is_its_number(kind: int, bits: int, number: float) -> None:
    values = np.array([(kind, 0, bits)], dtype=VALUE)
    assert numbers(values).tolist() == pytest.approx([number])


def test_a_text_is_no_number() -> None:
    assert np.isnan(numbers(np.array([(5, 0, 1)], dtype=VALUE))).all()
