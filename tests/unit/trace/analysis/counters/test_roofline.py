"""What bounds kernels: by the rule, and for a program of which arithmetic says it."""

import math
from typing import Any

import pytest
from kineto_trace.analysis.counters.roofline import UnitUse, WorkTraits, roofline, roofline_verdict
from kineto_trace.analysis.counters.sampled_counters import NO_COUNTERS
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Trace
from support.trace_files.simulated.known_intensity import KERNELS, ON_CORES, OVERVIEW, TENSOR_SET, KnownKernel, program
from support.trace_files.simulated.sampled_gpu import MS, Run, sampled
from support.trace_files.traces import trace

NOTHING: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("use", "traits", "verdict"),
    [
        (UnitUse(dram=87, tensor=0, sm_busy=98), WorkTraits(), "memory-bound"),
        (UnitUse(dram=18, tensor=93, sm_busy=96), WorkTraits(multiplies=True), "compute-bound"),
        (UnitUse(dram=65, tensor=80, sm_busy=96), WorkTraits(multiplies=True), "compute-bound"),
        (UnitUse(dram=80, tensor=65, sm_busy=96), WorkTraits(multiplies=True), "memory-bound"),
        (UnitUse(dram=10, tensor=0, cores=88, sm_busy=99), WorkTraits(), "compute-bound"),
        (UnitUse(dram=20, tensor=30, sm_busy=90), WorkTraits(multiplies=True), "latency-bound"),
        (UnitUse(dram=5, tensor=0, sm_busy=12), WorkTraits(), "latency-bound"),
        (UnitUse(dram=20, tensor=0, cores=30, sm_busy=90), WorkTraits(), "latency-bound"),
        (UnitUse(dram=20, tensor=0, sm_busy=90), WorkTraits(moves=True), "latency-bound"),
        # What the counters do not tell: ordinary cores, DRAM, anything; and the speed of links.
        (UnitUse(dram=20, tensor=0, sm_busy=90), WorkTraits(), "not known"),
        (UnitUse(tensor=30, sm_busy=90), WorkTraits(multiplies=True), "not known"),
        (UnitUse(dram=20, sm_busy=90), WorkTraits(multiplies=True), "not known"),
        (UnitUse(dram=20, cores=20, sm_busy=90), WorkTraits(), "not known"),
        (UnitUse(), WorkTraits(), "not known"),
        (UnitUse(dram=90), WorkTraits(link=True), "not known"),
        # One that is high is enough.
        (UnitUse(dram=87), WorkTraits(), "memory-bound"),
        (UnitUse(tensor=87), WorkTraits(), "compute-bound"),
    ],
)
def test_the_larger_use_decides_and_what_is_not_sampled_decides_nothing(
    use: UnitUse, traits: WorkTraits, verdict: str
) -> None:
    assert roofline_verdict(use, traits)[0] == verdict


def test_a_verdict_has_the_numbers_that_it_comes_from() -> None:
    use = UnitUse(dram=18.02, tensor=93.4, sm_busy=95)
    assert roofline_verdict(use, WorkTraits())[1] == "DRAM 18 %, tensor pipe 93.4 %, SM busy 95 % of peak"
    assert "--counters=tensor" in roofline_verdict(UnitUse(dram=5, tensor=0), WorkTraits())[1]


def agreed(made: Trace, kernels: tuple[KnownKernel, ...]) -> float:
    """The share of kernel time whose verdict is that of the arithmetic."""
    expected = {each.name: each.verdict for each in kernels}
    rows = roofline(Context(made)).rows()
    whole = sum(row["time_us"] for row in rows)
    right = sum(row["time_us"] for row in rows if row["verdict"] == expected[row["name"]])
    return float(right / whole)


def test_the_program_has_all_three_kinds() -> None:
    assert {each.verdict for each in KERNELS} == {"memory-bound", "compute-bound", "latency-bound"}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"phases": True},
        {"sample_ns": MS // 10, "per_kernel_ns": 40 * MS},
        {"noise": 0.03, "seed": 2},
        {"beside": 0.2},
    ],
    ids=["mixed", "phases", "100us", "noisy", "two streams"],
)
def test_kernel_time_is_classified_as_the_arithmetic_says(settings: dict[str, Any]) -> None:
    assert agreed(program(KERNELS, **settings), tuple(KERNELS)) >= 0.95


def test_products_on_ordinary_cores_are_known_with_the_set_that_samples_them() -> None:
    kernels = (*KERNELS, ON_CORES)
    assert agreed(program(kernels, labels=TENSOR_SET), kernels) >= 0.95
    rows = roofline(Context(program(kernels, labels=OVERVIEW))).rows()
    (row,) = [row for row in rows if row["name"] == ON_CORES.name]
    assert row["verdict"] == "not known" and "--counters=tensor" in row["why"]


def test_rates_are_those_of_the_gpus_data_sheet() -> None:
    rows = {row["name"]: row for row in roofline(Context(program())).rows()}
    large = next(each for each in KERNELS if each.name.startswith("nvjet_tst_256x128"))
    row = rows[large.name]
    assert (row["precision"], row["peak_tflop_s"], row["peak_gb_s"]) == ("bf16", 989.4, 4800)
    assert row["speed_tflop_s"] == pytest.approx(large.flop / large.duration / 1e3, rel=0.03)
    assert row["dram_gb_s"] == pytest.approx(large.bytes / large.duration, rel=0.1)
    assert row["intensity_flop_byte"] == pytest.approx(large.flop / large.bytes, rel=0.12)
    copy = rows[KERNELS[0].name]
    assert copy["speed_tflop_s"] is None and copy["intensity_flop_byte"] is None


def test_counted_bytes_take_precedence_over_the_percentage() -> None:
    counters = {"DRAM": 50.0, "DRAM bytes read": 2e12, "DRAM bytes written": 1e12}
    runs = [Run(name="copy", start=0, duration=100 * MS, counters=counters)]
    (row,) = roofline(Context(sampled(runs, list(counters), length_ns=100 * MS, noise=0, spread=0))).rows()
    assert row["dram_gb_s"] == pytest.approx(3000)
    only = list(counters)[1:]
    (row,) = roofline(Context(sampled(runs, only, length_ns=100 * MS, noise=0, spread=0))).rows()
    assert row["dram_pct"] == pytest.approx(100 * 3000 / 4800)


def test_a_gpu_that_no_table_knows_has_verdicts_without_rates() -> None:
    runs = [Run(name="copy", start=0, duration=100 * MS, counters={"DRAM": 90})]
    found = roofline(Context(sampled(runs, ["DRAM"], length_ns=100 * MS, devices=())))
    (row,) = found.rows()
    assert (row["verdict"], row["dram_gb_s"]) == ("memory-bound", None)
    assert "does not know the peak rates" in found.notes[0]


def test_fp32_on_tensor_cores_is_tf32() -> None:
    runs = [Run(name="ampere_sgemm_128x64_tn", start=0, duration=100 * MS, counters={"Tensor pipe": 80})]
    (row,) = roofline(Context(sampled(runs, ["Tensor pipe"], length_ns=100 * MS))).rows()
    assert (row["precision"], row["verdict"]) == ("tf32", "compute-bound")
    assert row["speed_tflop_s"] == pytest.approx(0.8 * 494.7, rel=0.05)


def test_copies_over_links_have_no_verdict() -> None:
    runs = [
        Run(name="Memcpy HtoD (Pinned -> Device)", start=0, duration=90 * MS, counters={"DRAM": 3}, kind="gpu_memcpy"),
        Run(name="Memcpy PtoP (Device -> Device)", start=100 * MS, duration=80 * MS, kind="gpu_memcpy"),
        Run(name="ncclDevKernel_AllReduce_Sum_bf16_RING_LL", start=200 * MS, duration=70 * MS),
    ]
    rows = roofline(Context(sampled(runs, ["DRAM", "SM busy"], length_ns=300 * MS))).rows()
    assert [row["verdict"] for row in rows] == ["not known"] * 3
    assert {row["why"] for row in rows} == {"it moves data over a link: see the view collective_counters"}


def test_operators_have_a_roofline_of_their_own() -> None:
    runs = [
        Run(name=f"kernel_{at % 2}", start=at * 10 * MS, duration=8 * MS, counters={"DRAM": 80}, correlation=at + 1)
        for at in range(20)
    ]
    rows = {
        "cpu_op": [{"name": "aten::add", "start": at * 1000, "duration": 900, "finished": 1, "id": at + 1}
                   for at in range(19)],
        "cuda_runtime": [{"name": "cudaLaunchKernel", "start": at * 1000 + 10, "duration": 100, "correlation": at + 1}
                         for at in range(20)],
    }  # fmt: skip
    made = sampled(runs, ["DRAM"], length_ns=200 * MS, rows=rows)
    found = roofline(Context(made), by="op").rows()
    assert [(row["name"], row["verdict"], row["time_us"]) for row in found] == [
        ("aten::add", "memory-bound", 19 * 8000), (None, "memory-bound", 8000),
    ]  # fmt: skip
    assert sum(row["share_pct"] for row in found) == pytest.approx(100)


def test_a_trace_without_samples_says_how_to_record_them() -> None:
    found = roofline(Context(trace(NOTHING)))
    assert (len(found), found.notes) == (0, (NO_COUNTERS,))
    assert math.isnan(UnitUse().compute)
