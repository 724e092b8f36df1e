"""What results mean, and whether the kernel lets this process read counters."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from kinetod.counters.interface import SETS, CounterCode, CounterError
from kinetod.counters.level_zero_backend import (
    FORMULAS,
    INTEL_SETS,
    GroupPlan,
    OtherClockError,
    ReportReader,
    SampleGap,
    SampleRow,
    not_started,
    numbers,
    offered,
    planned_metrics,
    planned_set,
    rights_problem,
    translated,
    usable,
)
from kinetod.counters.level_zero_library import VALUE, ClockReading, GroupMetric, LevelZeroFailure, MetricGroup

CAP_PERFMON, CAP_SYS_ADMIN = 1 << 38, 1 << 21


def host(folder: Path, *, i915: str = "", xe: str = "", capabilities: int = 0) -> Path:
    for name, value in (("i915/perf_stream_paranoid", i915), ("xe/observation_paranoid", xe)):
        if value:
            path = folder / "sys/dev" / name
            path.parent.mkdir(parents=True)
            path.write_text(f"{value}\n")
    (folder / "self").mkdir()
    (folder / "self/status").write_text(f"Name:\tx\nCapEff:\t{capabilities:016x}\n")
    return folder


@pytest.mark.parametrize(
    ("facts", "drivers", "refused"),
    [
        ({"i915": "1"}, ["i915"], "perf_stream_paranoid is not 0"),
        ({"xe": "1"}, ["xe"], "observation_paranoid is not 0"),
        ({"xe": "1", "i915": "0"}, ["i915", "xe"], "sysctl dev.xe.observation_paranoid=0"),
        ({"xe": "1", "i915": "0"}, ["i915"], ""),
        ({"i915": "1", "capabilities": CAP_PERFMON}, ["i915"], ""),
        ({"xe": "1", "capabilities": CAP_SYS_ADMIN}, ["xe"], ""),
        ({"i915": "1", "capabilities": 1}, ["i915"], "adds CAP_PERFMON"),
        ({}, ["i915", "xe"], ""),
    ],
)
def test_rights_are_those_that_the_kernel_asks_for(
    tmp_path: Path, facts: dict[str, str | int], drivers: list[str], refused: str
) -> None:
    problem = rights_problem(drivers, host(tmp_path, **facts))  # type: ignore[arg-type]
    assert (refused in problem) if refused else problem == ""


def test_a_library_that_does_not_start_is_told_with_the_rights_first(tmp_path: Path) -> None:
    failure = LevelZeroFailure("zeInit", 0x78000001)
    error = not_started(failure, host(tmp_path, i915="1"))
    assert error.code is CounterCode.NOT_PERMITTED and "perf_stream_paranoid" in error.reason
    (tmp_path / "sys/dev/i915/perf_stream_paranoid").write_text("0\n")
    error = not_started(failure, tmp_path)
    assert error.code is CounterCode.UNAVAILABLE and "zeInit returned 0x78000001" in error.reason


@pytest.mark.parametrize(("seen", "code"), [(True, CounterCode.BUSY), (False, CounterCode.FAILED)])
def test_a_stream_that_does_not_open_is_busy_only_if_somebody_is_seen_to_have_one(
    tmp_path: Path, seen: bool, code: CounterCode
) -> None:
    if seen:
        files = tmp_path / "1234/fd"
        files.mkdir(parents=True)
        (files / "5").symlink_to("anon_inode:[i915_perf]")
    error = translated(LevelZeroFailure("zetMetricStreamerOpen", 0x7FFFFFFE), "G", tmp_path)
    assert error.code is code


def test_a_stream_of_this_process_that_is_still_open_is_nobody_elses(tmp_path: Path) -> None:
    error = translated(LevelZeroFailure("zetMetricStreamerOpen", 0x78000006), "G", tmp_path)
    assert error.code is CounterCode.FAILED and "restart kinetod-counters" in error.reason


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


DURATION, EVENT, THROUGHPUT, TIMESTAMP, RAW = 0, 1, 3, 4, 7
TIME = (
    GroupMetric(name="GpuTime", type=EVENT, value_type=1, unit="ns"),
    GroupMetric(name="QueryBeginTime", type=TIMESTAMP, value_type=1, unit="ns"),
)
MAX = "XVE_ACTIVE XVE_STALL XVE_BUSY XVE_THREADS_OCCUPANCY_ALL XVE_INST_EXECUTED_XMX_ALL_UTILIZATION"
BYTES = "GPU_MEMORY_BYTE_READ GPU_MEMORY_BYTE_WRITE"


def group(name: str, names: str, handle: int = 1) -> MetricGroup:
    metrics = tuple(GroupMetric(name=each, type=DURATION, value_type=2, unit="percent") for each in names.split())
    return MetricGroup(handle=handle, name=name, domain=0, metrics=(*TIME, *metrics))


# The names are those of metrics-discovery, docs/metric_info_PVC_GT1.tsv, _BMG, _ACM_GT1 and _TGL_GT1.
GPU_MAX = [
    group("GpuOffload", f"XVE_ACTIVE XVE_STALL {BYTES}"),
    group("ComputeBasic", f"{MAX} {BYTES} AvgGpuCoreFrequencyMHz"),
]
ARC_B = [
    group("RenderBasic", "GPU_BUSY XVE_ACTIVE XVE_STALL"),
    group("ComputeBasic", f"GPU_BUSY XVE_ACTIVE XVE_STALL XVE_THREADS_OCCUPANCY_ALL {BYTES} AvgGpuCoreFrequencyMHz"),
]
ARC_A = [
    group("ComputeBasic", "GpuBusy XveActive XveStall AvgGpuCoreFrequencyMHz"),
    group("ComputeOverview", f"{MAX} {BYTES} AvgGpuCoreFrequencyMHz"),
]
TIGER_LAKE = [group("ComputeBasic", "GpuBusy EuActive EuStall EuThreadOccupancy AvgGpuCoreFrequencyMHz")]


@pytest.mark.parametrize(
    ("groups", "chosen", "labels"),
    [
        (GPU_MAX, "ComputeBasic", "SM busy,Tensor pipe,Occupancy,DRAM bytes read,DRAM bytes written,GPC clock"),
        (ARC_B, "ComputeBasic", "GPU busy,SM busy,Occupancy,DRAM bytes read,DRAM bytes written,GPC clock"),
        (ARC_A, "ComputeOverview", "SM busy,Tensor pipe,Occupancy,DRAM bytes read,DRAM bytes written,GPC clock"),
        (TIGER_LAKE, "ComputeBasic", "GPU busy,SM busy,Occupancy,GPC clock"),
    ],
    ids=["Max", "Arc B", "Arc A", "Tiger Lake"],
)
def test_the_overview_is_of_the_group_that_has_most_of_it(groups: list[MetricGroup], chosen: str, labels: str) -> None:
    planned = planned_set("the GPU", groups, "overview")
    assert planned.group.name == chosen
    assert [metric.label for metric in planned.plan.metrics] == labels.split(",")


def test_what_another_group_has_is_left_out_with_its_name_and_what_none_has_without() -> None:
    left_out = {each.name: each.why for each in planned_set("Arc", ARC_A, "overview").plan.left_out}
    assert left_out == {
        "GpuBusy": "it is in ComputeBasic, and only one group is measured at a time",
        "DRAM": "Intel's metric groups have no equivalent",
        "Instructions": "Intel's metric groups have no equivalent",
        "PCIe read": "Intel's metric groups have no equivalent",
        "PCIe write": "Intel's metric groups have no equivalent",
    }
    assert "Arc does not have it" in {each.why for each in planned_set("Arc", TIGER_LAKE, "tensor").plan.left_out}


def test_a_set_of_which_there_is_nothing_is_refused() -> None:
    with pytest.raises(CounterError, match="Arc has no metric of the set interconnect; name individual") as told:
        planned_set("Arc", ARC_B, "interconnect")
    assert told.value.code is CounterCode.INVALID_METRIC


def test_labels_and_units_are_those_of_the_other_vendors() -> None:
    units = {metric.label: metric.unit for metrics in SETS.values() for metric in metrics}
    assert {label: units.get(label) for label in FORMULAS} == {
        label: formula.unit for label, formulas in FORMULAS.items() for formula in formulas
    }
    assert INTEL_SETS.keys() == SETS.keys()
    assert {label for labels in INTEL_SETS.values() for label in labels} == FORMULAS.keys()


def test_a_group_whose_samples_have_no_time_is_none() -> None:
    stalls = MetricGroup(handle=2, name="EuStallSampling", domain=1, metrics=TIME[:1])
    assert usable([stalls, *ARC_B]) == ARC_B
    assert offered(TIGER_LAKE)[:2] == ["ComputeBasic.GpuTime", "ComputeBasic.GpuBusy"]


@pytest.mark.parametrize(
    ("name", "label", "unit"),
    [
        ("Memory.GPU_MEMORY_BYTE_READ", "DRAM bytes read", "B/s"),
        ("L3_BYTE_READ", "L3_BYTE_READ", "B/s"),
        ("GpuCoreClocks", "GpuCoreClocks", "Hz"),
        ("GPU_MEMORY_BYTE_READ_RATE", "GPU_MEMORY_BYTE_READ_RATE", "GBpS"),
        ("XVE_BARRIER", "XVE_BARRIER", "event/s"),
        ("GpuTime", "GpuTime", "ns"),
        ("Reason", "Reason", ""),
    ],
)
def test_a_named_metric_that_counts_is_a_rate(name: str, label: str, unit: str) -> None:
    made = MetricGroup(
        handle=1,
        name="Memory",
        domain=0,
        metrics=(
            *TIME,
            *(
                GroupMetric(name=each, type=kind, value_type=1, unit=word)
                for each, kind, word in (
                    ("GPU_MEMORY_BYTE_READ", EVENT, "bytes"),
                    ("L3_BYTE_READ", THROUGHPUT, "bytes"),
                    ("GpuCoreClocks", EVENT, "cycles"),
                    ("GPU_MEMORY_BYTE_READ_RATE", THROUGHPUT, "GBpS"),
                    ("XVE_BARRIER", EVENT, "events"),
                    ("Reason", RAW, ""),
                )
            ),
        ),
    )
    (metric,) = planned_metrics("Arc", [made], [name]).plan.metrics
    assert (metric.name, metric.label, metric.unit) == (name, label, unit)


@pytest.mark.parametrize("name", ["XVE_NONE", "NoGroup.XVE_ACTIVE", "QueryBeginTime"])
def test_a_metric_that_a_gpu_does_not_have_is_refused(name: str) -> None:
    with pytest.raises(CounterError, match=f"Arc has no metric '{name}'"):
        planned_metrics("Arc", ARC_B, ["XVE_ACTIVE", name])
