"""Which group of Intel's metrics is measured for a set, by the names that the generations of GPUs have."""

import pytest
from kinetod.counters.interface import CounterCode, CounterError
from kinetod.counters.level_zero.metric_formulas import (
    FORMULAS,
    INTEL_SETS,
    offered,
    planned_metrics,
    planned_set,
    usable,
)
from kinetod.counters.level_zero.tools_library import GroupMetric, MetricGroup
from kinetod.counters.metric_sets import SETS

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
        "GpuBusy": "it is in ComputeBasic, and one group is measured at a time",
        "DRAM": "Intel's groups have no metric of this meaning",
        "Instructions": "Intel's groups have no metric of this meaning",
        "PCIe read": "Intel's groups have no metric of this meaning",
        "PCIe write": "Intel's groups have no metric of this meaning",
    }
    assert "Arc does not have it" in {each.why for each in planned_set("Arc", TIGER_LAKE, "tensor").plan.left_out}


def test_a_set_of_which_there_is_nothing_is_refused() -> None:
    with pytest.raises(CounterError, match="Arc has no metric of the set interconnect; name metrics") as told:
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
