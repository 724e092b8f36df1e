"""The table `counter` of files of samples: every sample once, none twice, and bounded."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kineto_trace.decode.hardware_counters import counter_table, samples_per_row
from kineto_trace.model.trace import NO_STRING, StringTable, Table
from kineto_trace.spool.counter_samples import CounterHeader, CounterSamples, SampledMetric

NAN = float("nan")
DRAM = SampledMetric(name="dram__throughput", label="DRAM", unit="%")
READ = SampledMetric(name="pcie__read_bytes", label="PCIe read", unit="B/s")
HOT = SampledMetric(name="throttled", label="Throttled by heat", unit="")
UNNAMED = SampledMetric(name="vendor.raw", label="", unit="cycle")


def samples(
    metrics: Sequence[SampledMetric], times: Sequence[tuple[int, int]], values: Sequence[Sequence[float]]
) -> CounterSamples:
    header = CounterHeader(
        gpu_uuid="GPU-1", gpu_index=0, chip="GH100", interval_ns=5, metrics=tuple(metrics), set="", backend="cupti",
        library_version="130001",
    )  # fmt: skip
    start, end = np.array(times, np.int64).reshape(-1, 2).T
    made = np.array(values, np.float32).reshape(len(times), len(metrics))
    return CounterSamples(header=header, start_ns=start, end_ns=end, values=made, disordered=0)


def readable(table: Table, strings: StringTable) -> list[tuple[int, str, str, str, int, int, float]]:
    def text(number: int) -> str:
        return "" if number == NO_STRING else strings.strings[number]

    rows = zip(*(table[name].tolist() for name in table.columns), strict=True)
    return [
        (device, text(name), text(metric), text(unit), start, start + duration, value)
        for start, duration, name, device, metric, unit, value in rows
    ]


def test_each_sample_and_metric_is_a_row_metric_by_metric() -> None:
    strings = StringTable()
    files = [
        (1, samples([READ, DRAM], [(10, 20), (20, 30)], [(5e9, 12.5), (6e9, 25)])),
        (0, samples([HOT, UNNAMED], [(12, 32)], [(1, 7)])),
    ]
    assert readable(counter_table(files, strings, 0, 100), strings) == [
        (0, "Throttled by heat", "throttled", "", 12, 32, 1.0),
        (0, "vendor.raw", "vendor.raw", "cycle", 12, 32, 7.0),
        (1, "DRAM", "dram__throughput", "%", 10, 20, 12.5),
        (1, "DRAM", "dram__throughput", "%", 20, 30, 25.0),
        (1, "PCIe read", "pcie__read_bytes", "B/s", 10, 20, 5e9),
        (1, "PCIe read", "pcie__read_bytes", "B/s", 20, 30, 6e9),
    ]


def test_samples_that_overlap_the_window_are_whole_rows_and_others_none() -> None:
    file = samples([DRAM], [(0, 10), (10, 20), (20, 30), (30, 40)], [[1], [2], [3], [4]])
    table = counter_table([(0, file)], StringTable(), 10, 30)
    assert (table["start"].tolist(), table["duration"].tolist()) == ([10, 20], [10, 10])
    assert counter_table([(0, file)], StringTable(), 15, 16)["value"].tolist() == [2]
    assert not len(counter_table([(0, file)], StringTable(), 40, 50))
    assert not len(counter_table([], StringTable(), 0, 50))


def test_a_value_that_is_no_number_is_none() -> None:
    file = samples([DRAM], [(0, 10), (10, 20), (20, 30)], [[NAN], [float("inf")], [-float("inf")]])
    assert np.isnan(counter_table([(0, file)], StringTable(), 0, 30)["value"]).all()


def test_a_second_sampler_of_a_metric_fills_only_the_gaps_of_the_first() -> None:
    first = samples([DRAM], [(10, 20), (40, 50)], [[1], [2]])
    second = samples([DRAM, READ], [(0, 10), (15, 25), (25, 40), (50, 60)], [[5, 0], [6, 0], [7, 0], [8, 0]])
    table = counter_table([(0, first), (0, second), (1, second)], StringTable(), 0, 100)
    assert table["value"].tolist()[:5] == [5, 1, 7, 2, 8]
    assert table["start"].tolist()[:5] == [0, 10, 25, 40, 50]
    assert len(table) == 5 + 4 + 8


def test_above_the_limit_neighbours_become_their_mean_over_time_but_not_across_a_gap() -> None:
    file = samples(
        [DRAM, READ], [(0, 10), (10, 40), (50, 60), (65, 75), (75, 80)], [(8, 1), (4, NAN), (2, NAN), (6, NAN), (9, 3)]
    )
    table = counter_table([(0, file)], StringTable(), 0, 100, max_rows=9)
    assert samples_per_row([(0, file)], 0, 100, max_rows=9) == 2
    assert table["start"].tolist() == [0, 50, 75] * 2
    assert table["duration"].tolist() == [40, 25, 5] * 2
    np.testing.assert_array_equal(table["value"], [5, 4, 9, 1, NAN, 3])


@pytest.mark.parametrize(("max_rows", "together"), [(10, 1), (9, 2), (5, 2), (4, 4), (3, 4), (2, 8), (1, 16)])
def test_as_many_samples_are_taken_together_as_the_limit_requires(max_rows: int, together: int) -> None:
    file = samples([DRAM], [(n, n + 1) for n in range(10)], [[n] for n in range(10)])
    assert samples_per_row([(0, file)], 0, 100, max_rows=max_rows) == together
    table = counter_table([(0, file)], StringTable(), 0, 100, max_rows=max_rows)
    assert len(table) <= max_rows
    assert float(table["value"] @ table["duration"]) == pytest.approx(45)


def _times(steps: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found, time = [], 0
    for gap, length in steps:
        found.append((time + gap, time + gap + length))
        time += gap + length
    return found


STEPS = st.lists(st.tuples(st.sampled_from([0, 0, 3]), st.integers(1, 9)), max_size=30).map(_times)


@given(st.lists(STEPS, max_size=4), st.integers(0, 60), st.integers(1, 60), st.integers(1, 40))
def test_rows_of_a_device_and_metric_never_overlap(
    files: list[list[tuple[int, int]]], start: int, length: int, max_rows: int
) -> None:
    made = [(0, samples([DRAM], times, [[n] for n in range(len(times))])) for times in files]
    table = counter_table(made, StringTable(), start, start + length, max_rows=max_rows)
    assert (table["duration"] > 0).all() and (table["start"][1:] >= table.end()[:-1]).all()
    assert ((table["start"] < start + length) & (table.end() > start)).all()
