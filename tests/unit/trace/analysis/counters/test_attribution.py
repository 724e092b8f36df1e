"""Values of kernels from samples: those that can be known, and reasons for the others."""

from typing import Any

import numpy as np
import pytest
from kineto_trace.analysis.counters.attribution import DIRECT, FIT, NOT_STATED, DeviceCounters
from kineto_trace.analysis.counters.groupings import by_kernel
from kineto_trace.model.context import Context
from kineto_trace.model.source_coverage import SourceCoverage
from kineto_trace.model.trace import StringTable, Trace
from support.trace_files.simulated.sampled_gpu import MS, Run, counter_table, sampled
from support.trace_files.traces import START_NS, table, trace

US = 1_000


def one_device(trace: Trace) -> tuple[DeviceCounters, dict[str, int]]:
    """The counters of the only GPU, and the row of each kernel."""
    (found,) = by_kernel(Context(trace))
    return found, {trace.strings[group]: row for row, group in enumerate(found.group.tolist())}


def mixed(count: int, *, seed: int = 3, lengths: dict[str, int] | None = None) -> tuple[list[Run], int]:
    """Kernels much shorter than samples in an irregular order, and when the last one ends."""
    random, now, runs = np.random.default_rng(seed), 0, []
    lengths = lengths or {"copy": 200 * US, "gemm": 400 * US, "softmax": 120 * US}
    values = {"copy": 87.0, "gemm": 18.0, "softmax": 75.0}
    for name in random.choice(list(lengths), count).tolist():
        runs.append(Run(name=name, start=now, duration=lengths[name], counters={"DRAM": values[name]}))
        now += lengths[name] + int(random.exponential(10 * US))
    return runs, now


def test_kernels_shorter_than_samples_have_the_values_of_the_model() -> None:
    runs, length = mixed(3000)
    found, row = one_device(sampled(runs, ["DRAM"], length_ns=length))
    for name, value in {"copy": 87.0, "gemm": 18.0, "softmax": 75.0}.items():
        at = row[name]
        assert found.method[at, 0] == FIT and found.error[at, 0] < 2
        assert abs(found.value[at, 0] - value) < 3 * found.error[at, 0] / 1.96 + 0.5
        assert found.residual[at, 0] < 3


def test_kernels_of_several_samples_are_measured_directly() -> None:
    runs = [Run(name="copy", start=at * 20 * MS, duration=10 * MS, counters={"DRAM": 87}) for at in range(5)]
    found, row = one_device(sampled(runs, ["DRAM"], length_ns=100 * MS, spread=0, noise=0))
    assert found.method[row["copy"], 0] == DIRECT
    assert found.value[row["copy"], 0] == pytest.approx(87)


def test_samples_of_different_length_count_by_their_time() -> None:
    """As those of the power do where a reading comes late: 900 ms at 300 W, then ten of 10 ms at 600 W."""
    length = np.array([900, *[10] * 10]) * MS
    start = np.cumsum(length) - length
    samples = counter_table(
        [
            {
                "label": "Power",
                "device": 0,
                "start": START_NS + start,
                "duration": length,
                "value": [300.0, *[600.0] * 10],
            }
        ],
        strings := StringTable(),
    )
    kernels = table("kernel", [{"name": "copy", "start": 0, "duration": 1000 * MS, "stream": 7}], strings)
    tables = {"counter": samples, "kernel": kernels}
    found, row = one_device(trace({}, strings=tuple(strings.strings), tables=tables, length_ns=1000 * MS))
    assert found.method[row["copy"], 0] == DIRECT
    assert found.value[row["copy"], 0] == pytest.approx((900 * 300 + 100 * 600) / 1000)


def test_a_kernel_that_ran_too_little_has_no_value_but_a_reason() -> None:
    runs, length = mixed(1000)
    rare = [Run(name="rare", start=length + at * 2 * MS, duration=500 * US, counters={"DRAM": 50}) for at in range(20)]
    found, row = one_device(sampled([*runs, *rare], ["DRAM"], length_ns=length + 40 * MS))
    assert np.isnan(found.value[row["rare"], 0]) and found.method[row["rare"], 0] == NOT_STATED
    assert found.why[row["rare"], 0] == "not enough evidence: it ran alone for 10 samples, and 50 are needed"


def test_kernels_that_always_run_in_the_same_proportion_are_not_told_apart() -> None:
    """Each sample has the same kernels: only their mean is known."""
    runs = [
        Run(name=name, start=at * MS + start * US, duration=400 * US, counters={"DRAM": value})
        for at in range(500)
        for name, start, value in (("first", 50, 80.0), ("second", 500, 10.0))
    ]
    found, row = one_device(sampled(runs, ["DRAM"], length_ns=500 * MS))
    assert np.isnan(found.value).all()
    said = "not enough evidence: samples do not tell it from "
    others = {"first": {"second", "idle time"}, "second": {"first", "idle time"}}
    for name, at in row.items():
        assert found.why[at, 0].removeprefix(said) in others[name]


def test_work_beside_others_is_marked_and_has_no_value_if_it_was_never_alone() -> None:
    under = [Run(name="nccl", start=at * 20 * MS, duration=10 * MS, counters={"DRAM": 20}) for at in range(20)]
    above = [
        Run(name="gemm", start=at * 20 * MS, duration=15 * MS, counters={"DRAM": 30}, stream=8) for at in range(20)
    ]
    found, row = one_device(sampled([*under, *above], ["DRAM"], length_ns=400 * MS))
    assert found.shared_pct[row["nccl"]] == pytest.approx(100)
    assert found.why[row["nccl"], 0] == "other work ran during 100 % of its time"
    assert found.shared_pct[row["gemm"]] == pytest.approx(100 * 10 / 15)
    assert found.value[row["gemm"], 0] == pytest.approx(30, abs=1)


def test_idle_time_does_not_dilute_a_kernel() -> None:
    random = np.random.default_rng(4)
    runs = [
        Run(name="copy", start=at * MS + begin * US, duration=length * US, counters={"DRAM": 80})
        for at, (begin, length) in enumerate(random.integers((0, 100), (300, 600), (1000, 2)).tolist())
    ]
    found, row = one_device(sampled(runs, ["DRAM"], length_ns=1000 * MS))
    assert found.value[row["copy"], 0] == pytest.approx(80, abs=1)


def test_each_gpu_has_the_values_of_its_own_samples() -> None:
    runs = [
        Run(name="copy", start=at * 20 * MS, duration=10 * MS, counters={"DRAM": 80 - 50 * device}, device=device)
        for at in range(10)
        for device in (0, 1)
    ]
    found = by_kernel(Context(sampled(runs, ["DRAM"], length_ns=200 * MS)))
    assert [(each.device, round(float(each.value[0, 0]))) for each in found] == [(0, 80), (1, 30)]


@pytest.mark.parametrize(
    ("runs", "length"),
    [
        ([Run(name="long", start=-5 * MS, duration=100 * MS, counters={"DRAM": 70})], 80 * MS),
        ([Run(name="long", start=0, duration=500 * MS, counters={"DRAM": 70})], 80 * MS),
    ],
)
def test_kernels_over_the_edges_of_the_window_count_inside_of_it(runs: list[Run], length: int) -> None:
    found, row = one_device(sampled(runs, ["DRAM"], length_ns=length))
    assert found.value[row["long"], 0] == pytest.approx(70, abs=5)
    assert found.total_ns[row["long"]] == length


def test_kernels_without_duration_have_no_row() -> None:
    runs = [*mixed(500)[0], Run(name="nothing", start=MS, duration=0)]
    assert "nothing" not in one_device(sampled(runs, ["DRAM"], length_ns=100 * MS))[1]


def test_one_sample_tells_nothing() -> None:
    runs, length = mixed(10)
    found, _ = one_device(sampled(runs, ["DRAM"], length_ns=length, sample_ns=length))
    assert np.isnan(found.value).all() and found.why.all()


def test_samples_of_other_times_tell_nothing() -> None:
    runs, length = mixed(500)
    trace = sampled(runs, ["DRAM"], length_ns=length)
    table = trace.table("counter")
    trace.tables["counter"] = table.with_columns({"start": table["start"] + 3600 * 1000 * MS})  # type: ignore[index]
    found, _ = one_device(trace)
    assert np.isnan(found.value).all()
    assert set(found.why[:, 0]) == {"no sample lies in the time of the trace"}


def test_counters_that_were_sampled_apart_each_have_their_evidence() -> None:
    """One lost its samples in the first half: the other is not touched."""
    runs, length = mixed(3000)
    trace = sampled(runs, ["DRAM", "Tensor pipe"], length_ns=length)
    table = trace.table("counter")
    lost = (table["name"] == trace.strings.index("Tensor pipe")) & (table["start"] < START_NS + length // 2)
    value = np.where(lost, np.nan, table["value"])
    trace.tables["counter"] = table.with_columns({"value": value})  # type: ignore[index]
    found, row = one_device(trace)
    assert found.value[row["copy"], 0] == pytest.approx(87, abs=2)
    assert found.value[row["copy"], 1] == pytest.approx(0, abs=2)


def test_time_whose_gpu_work_was_not_recorded_does_not_count_as_idle() -> None:
    runs, length = mixed(3000)
    half = length // 2
    kept = [run for run in runs if run.start > half]
    whole = sampled(runs, ["DRAM"], length_ns=length)
    missing = sampled(kept, ["DRAM"], length_ns=length)
    coverage: Any = SourceCoverage(source="cupti", kinds=("kernel",), missing=((START_NS, START_NS + half),))
    tables = {**missing.tables, "counter": whole.table("counter")}
    strings = whole.strings
    numbers = np.array([strings.index(missing.strings[at]) for at in missing.table("kernel")["name"].tolist()])
    tables["kernel"] = missing.table("kernel").with_columns({"name": numbers.astype(np.int32)})
    changed = Trace(target=whole.target, strings=strings, tables=tables, window_start_ns=whole.window_start_ns,
                    window_end_ns=whole.window_end_ns, devices=whole.devices, coverage=(coverage,))  # fmt: skip
    found, row = one_device(changed)
    assert found.value[row["copy"], 0] == pytest.approx(87, abs=2)


def test_work_of_one_name_that_is_of_two_kinds_shifts_no_value_unsaid() -> None:
    """Kernels of one name and duration, every other one of which uses the memory, which no column can tell apart."""
    random, now, runs = np.random.default_rng(5), 0, []
    for name, value in zip(
        random.choice(["two kinds", "gemm"], 6000).tolist(), random.integers(0, 2, 6000), strict=True
    ):
        dram = 20.0 if name == "gemm" else 10.0 + 75.0 * float(value)
        runs.append(Run(name=name, start=now, duration=300 * US, counters={"DRAM": dram}))
        now += 300 * US + int(random.exponential(3 * US))
    found, row = one_device(sampled(runs, ["DRAM"], length_ns=now))
    assert np.isnan(found.value[row["two kinds"], 0])
    assert "samples differ from what one value for each would make them" in found.why[row["two kinds"], 0]


def test_kernels_of_one_name_that_differ_in_size_have_the_mean_by_their_time() -> None:
    random, now, runs, weighted, total = np.random.default_rng(5), 0, [], 0.0, 0
    for kind in random.choice(3, 12000, p=[0.08, 0.8, 0.12]).tolist():
        name, length, dram = (("add", 400, 85.0), ("add", 40, 10.0), ("gemm", 300, 20.0))[kind]
        length = int(length * US * random.uniform(0.95, 1.05))
        runs.append(Run(name=name, start=now, duration=length, counters={"DRAM": dram}))
        now += length + int(random.exponential(3 * US))
        weighted, total = (weighted + length * dram, total + length) if name == "add" else (weighted, total)
    found, row = one_device(sampled(runs, ["DRAM"], length_ns=now))
    assert found.value[row["add"], 0] == pytest.approx(weighted / total, abs=1.5)
    assert found.value[row["gemm"], 0] == pytest.approx(20, abs=1)
