"""Values of kernels from samples: those that can be known, and reasons for the others."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kineto_trace.analysis.counters.attribution import (
    BLOCK,
    DIRECT,
    FIT,
    MAX_GROUPS,
    NOT_STATED,
    DeviceCounters,
    DeviceTiles,
    FitSamples,
    GroupedActivities,
    SamplePieces,
    ShareFit,
    device_tiles,
    fit,
    pieces_of,
)
from kineto_trace.analysis.counters.hardware_counter_views import by_kernel
from kineto_trace.model.context import Context
from kineto_trace.model.source_coverage import SourceCoverage
from kineto_trace.model.trace import StringTable, Trace
from support.trace_files.simulated.sampled_gpu import MS, Run, counter_table, sampled
from support.trace_files.traces import START_NS, table, trace

US = 1_000
Floats = npt.NDArray[np.float64]
Rows = list[tuple[int, int, int]]


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
    assert found.why[row["rare"], 0] == "not enough evidence: it ran alone for only 10 samples; 50 are needed"


def test_kernels_that_always_run_in_the_same_proportion_are_not_told_apart() -> None:
    """Each sample has the same kernels: only their mean is known."""
    runs = [
        Run(name=name, start=at * MS + start * US, duration=400 * US, counters={"DRAM": value})
        for at in range(500)
        for name, start, value in (("first", 50, 80.0), ("second", 500, 10.0))
    ]
    found, row = one_device(sampled(runs, ["DRAM"], length_ns=500 * MS))
    assert np.isnan(found.value).all()
    said = "not enough evidence: the samples cannot distinguish it from "
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
    assert set(found.why[:, 0]) == {"no sample lies entirely within the recorded time"}


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
    assert "a single value does not fit the samples (residual: " in found.why[row["two kinds"], 0]


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


def fitted(shares: Floats, value: Floats, *, upper: float = 100.0, combinations: Any = None) -> ShareFit:
    """shares: [sample, column]; value: of each sample."""
    sample, column = np.nonzero(shares)
    pieces = SamplePieces(sample, column, shares[sample, column])
    observed = FitSamples(pieces, value[:, None], np.ones(len(value)), np.array([upper]), shares.shape[1])
    return fit(observed, np.eye(shares.shape[1]) if combinations is None else combinations)


def drawn(count: int, columns: int, seed: int = 1) -> Floats:
    return np.random.default_rng(seed).dirichlet(np.ones(columns), count)


def test_values_are_found_from_samples_that_mix_them() -> None:
    shares, true = drawn(500, 4), np.array([93.0, 18.0, 60.0, 0.5])
    found = fitted(shares, shares @ true)
    assert found.value[:, 0] == pytest.approx(true, abs=1e-3)
    assert found.residual.max() < 1e-3


def test_values_stay_in_their_bounds_where_noise_would_lead_out() -> None:
    random = np.random.default_rng(2)
    shares, true = drawn(300, 3), np.array([100.0, 0.0, 50.0])
    found = fitted(shares, shares @ true + 3 * random.standard_normal(300))
    assert found.value.min() >= 0 and found.value.max() <= 100
    free = fitted(shares, shares @ np.array([5e9, 0.0, 1e9]), upper=np.inf)
    assert free.value[:, 0] == pytest.approx([5e9, 0, 1e9], abs=1e6)


def test_collinear_columns_have_no_evidence_but_their_sum_has() -> None:
    shares = drawn(400, 2)
    half = np.stack([shares[:, 0] * 0.25, shares[:, 0] * 0.75, shares[:, 1]], axis=1)  # the first two in proportion
    true = np.array([80.0, 40.0, 10.0])
    together = np.array([[0.25, 0.75, 0.0]]).T
    apart, both = fitted(half, half @ true), fitted(half, half @ true, combinations=together)
    assert apart.samples[:2].tolist() == [0, 0] and np.isinf(apart.error[:2]).all()
    assert apart.partner[:2].tolist() == [1, 0]
    assert apart.samples[2] > 10 and apart.value[2, 0] == pytest.approx(10, abs=1e-3)
    assert both.value[0, 0] == pytest.approx(50, abs=1e-3)
    assert both.samples[0] > 10 and both.error[0, 0] < 1


def test_nearly_collinear_columns_have_next_to_none() -> None:
    random, shares = np.random.default_rng(3), drawn(400, 2)
    jitter = shares[:, 0] * 0.001 * random.standard_normal(400)
    near = np.stack([shares[:, 0] * 0.25 + jitter, shares[:, 0] * 0.75 - jitter, shares[:, 1]], axis=1)
    assert fitted(near, near @ np.array([80.0, 40.0, 10.0])).samples[:2].max() < 0.01


def test_a_column_in_one_sample_alone_is_not_taken_as_certain() -> None:
    shares = np.vstack([np.column_stack([drawn(200, 2), np.zeros(200)]), [[0.5, 0.4, 0.1]]])
    noise = 0.5 * np.random.default_rng(5).standard_normal(201)
    found = fitted(shares, shares @ np.array([30.0, 60.0, 90.0]) + noise)
    assert found.samples[2] < 0.1 and found.error[2, 0] > 3


def test_no_samples_and_no_columns_are_no_error() -> None:
    nothing = fitted(np.zeros((0, 2)), np.zeros(0))
    assert nothing.samples.tolist() == [0, 0]
    one = fitted(np.array([[0.5, 0.5]]), np.array([40.0]))
    assert np.isfinite(one.value).all() and one.samples.tolist() == [0, 0]


@pytest.mark.parametrize("heavy", [False, True])
def test_the_intervals_hold_what_they_promise(heavy: bool) -> None:
    """Over 200 draws, with equal errors and with one column whose values spread: 95 % of the intervals, about."""
    random, true, held = np.random.default_rng(7), np.array([70.0, 20.0, 40.0]), []
    for _ in range(200):
        shares = random.dirichlet(np.ones(3), 150)
        spread = np.array([8.0 if heavy else 0.0, 0.0, 0.0])
        noise = random.standard_normal(150) + (shares * spread * random.standard_normal((150, 3))).sum(axis=1)
        found = fitted(shares, shares @ true + noise)
        held.append(np.abs(found.value[:, 0] - true) <= 1.96 * found.error[:, 0])
    assert np.mean(held) >= 0.92
    assert np.mean(held, axis=0).min() >= 0.90


def test_samples_of_several_blocks_count_alike() -> None:
    shares, true = drawn(2 * BLOCK + 5, 2), np.array([75.0, 25.0])
    found = fitted(shares, shares @ true)
    assert found.value[:, 0] == pytest.approx(true, abs=1e-3)


def test_samples_that_lie_in_one_column_as_a_whole_are_told() -> None:
    found = fitted(np.array([[1.0, 0], [1, 0], [0.5, 0.5], [0, 1]]), np.array([80.0, 90, 50, 10]))
    assert found.whole.tolist() == [2, 1]
    assert found.whole_mean[:, 0].tolist() == pytest.approx([85, 10])


def tiled(rows: Rows, *, groups: int = 3, low: int = 0, high: int = 100) -> DeviceTiles:
    start, end, group = np.array(rows, np.int64).reshape(-1, 3).T
    return device_tiles(GroupedActivities(start, end, group, groups), low, high)


def said(found: DeviceTiles) -> list[tuple[int, int, int]]:
    """Tiles with the group that runs alone, -1: none, -2: several."""
    groups = [*found.groups.tolist(), -2, -1]
    names = [groups[at] if at < len(groups) else -2 for at in found.column.tolist()]
    return list(zip(found.start.tolist(), found.end.tolist(), names, strict=True))


def test_idle_time_and_groups_alone_have_tiles() -> None:
    assert said(tiled([(10, 20, 1), (20, 30, 0)])) == [(0, 10, -1), (10, 20, 1), (20, 30, 0), (30, 100, -1)]


def test_groups_at_once_have_a_tile_of_their_own() -> None:
    assert said(tiled([(0, 60, 1), (40, 100, 2)])) == [(0, 40, 1), (40, 60, -2), (60, 100, 2)]


def test_a_group_beside_itself_is_alone() -> None:
    found = tiled([(0, 60, 1), (40, 100, 1)])
    assert {name for _, _, name in said(found)} == {1}
    assert (found.total_ns.tolist(), found.shared_ns.tolist()) == ([0, 120, 0], [0, 0, 0])


def test_runs_are_cut_off_at_the_edges_and_those_without_length_are_none() -> None:
    found = tiled([(-50, 10, 0), (90, 500, 1), (50, 50, 2), (300, 400, 2)])
    assert said(found) == [(0, 10, 0), (10, 90, -1), (90, 100, 1)]
    assert found.total_ns.tolist() == [10, 10, 0]


def test_no_runs_are_one_tile_of_idle_time() -> None:
    assert said(tiled([])) == [(0, 100, -1)]


def test_the_same_groups_at_once_share_a_column() -> None:
    found = tiled([(0, 10, 0), (5, 15, 1), (40, 50, 1), (45, 60, 0)])
    several = {column for column, (_, _, name) in zip(found.column.tolist(), said(found), strict=True) if name == -2}
    assert len(several) == 1


def test_groups_beyond_the_columns_are_no_group_alone() -> None:
    rows = [(10 * at, 10 * at + 9, at) for at in range(MAX_GROUPS + 50)]
    rows[0] = (0, 5, 0)  # the shortest
    found = tiled(rows, groups=len(rows), high=10 * len(rows))
    assert len(found.groups) == MAX_GROUPS and 0 not in found.groups.tolist()
    assert found.shared_ns[0] == 5  # of which nothing was told apart


@given(st.lists(st.tuples(st.integers(-20, 120), st.integers(0, 60), st.integers(0, 2)), max_size=12))
def test_tiles_have_no_holes_and_say_what_runs(drawn: Rows) -> None:
    rows = [(start, start + length, group) for start, length, group in drawn]
    found = said(tiled(rows))
    assert [end for _, end, _ in found[:-1]] == [start for start, _, _ in found[1:]]
    assert (found[0][0], found[-1][1]) == (0, 100)
    for start, end, name in found:
        for moment in (start, end - 1):
            running = {group for low, high, group in rows if low <= moment < high}
            assert name == (-1 if not running else -2 if len(running) > 1 else running.pop())


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40), st.integers(0, 2)), max_size=8))
def test_the_shares_of_each_sample_sum_to_one(drawn: Rows) -> None:
    found = tiled([(start, start + length, group) for start, length, group in drawn])
    start = np.array([0, 10, 25, 60])
    pieces = pieces_of(found, start, np.array([10, 25, 50, 100]))
    assert np.allclose(np.bincount(pieces.sample, pieces.share, 4), 1)
