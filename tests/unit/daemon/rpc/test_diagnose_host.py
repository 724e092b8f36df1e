"""What `doctor` says of the GPUs."""

import pytest
from kinetod.attach.attach_types import Status
from kinetod.gpus.gpu_types import NAMES, GpuActivity, GpuState, LibraryState, Snapshot, VendorLibrary
from kinetod.gpus.nvml import IN_MIG_MODE, OFF
from kinetod.rpc.diagnose_host import gpu_findings


def found(state: LibraryState, *, gpus: int = 0, detail: str = "") -> tuple[Status, str, str]:
    library = VendorLibrary(name="nvml", state=state, detail=detail, driver_version="580")
    snapshot = Snapshot(
        libraries=(library,),
        gpus=tuple(GpuState(vendor="nvidia", index=index, uuid=f"GPU-{index}", name="H200") for index in range(gpus)),
    )
    (finding,) = gpu_findings(snapshot, {"nvidia": gpus})
    assert finding.name == "gpus_nvml"
    return finding.status, finding.detail, finding.advice


def test_a_library_that_works_tells_the_driver() -> None:
    assert found(LibraryState.OK, gpus=2) == (Status.OK, "2 GPUs, driver 580", "")


def test_no_library_is_needed_where_there_is_no_gpu() -> None:
    assert found(LibraryState.ABSENT) == (Status.OK, "no NVIDIA GPU on this host", "")


@pytest.mark.parametrize(
    ("state", "advice"),
    [(LibraryState.ABSENT, "pip install nvidia-ml-py"), (LibraryState.LATE, "the driver may have to be")],
)
def test_gpus_that_cannot_be_measured_are_a_note_with_advice(state: LibraryState, advice: str) -> None:
    status, detail, said = found(state, gpus=1, detail="it is late")
    assert (status, detail) == (Status.NOTE, "GPUs cannot be measured: it is late")
    assert advice in said


def test_a_lost_gpu_is_a_problem() -> None:
    lost = GpuState(vendor="nvidia", index=3, uuid="GPU-3", name="H200", works=False)
    (finding,) = gpu_findings(Snapshot(gpus=(lost,)), {"nvidia": 8})
    assert (finding.name, finding.status) == ("gpu_lost", Status.PROBLEM)
    assert "GPU 3 (GPU-3)" in finding.detail


def counted(*gpus: GpuState) -> list[tuple[Status, str, str]]:
    found = gpu_findings(Snapshot(gpus=gpus), {"nvidia": len(gpus)})
    assert {finding.name for finding in found} <= {"gpu_activity"}
    return [(finding.status, finding.detail, finding.advice) for finding in found]


def one(index: int, **changes: object) -> GpuState:
    values = {"vendor": "nvidia", "index": index, "uuid": f"GPU-{index}", "name": "H200"}
    return GpuState(**{**values, **changes})  # type: ignore[arg-type]


def test_gpus_whose_units_are_counted_are_one_check_and_the_others_say_why_not() -> None:
    whole = GpuActivity(since_ns=1, seconds=2.0, totals=dict.fromkeys(NAMES, 1.0))
    found = counted(one(0, activity=whole), one(1, activity_note=IN_MIG_MODE), one(2, activity=whole))
    assert found == [
        (Status.OK, "GPU unit activity is measured: GPU 0, 2", ""),
        (
            Status.NOTE,
            "GPU unit activity is not measured (in MIG mode the counters belong to GPU instances, which kinetod "
            "does not measure): GPU 1",
            "use dcgm-exporter, which has these values for each GPU instance",
        ),
    ]


def test_what_a_gpu_does_not_count_is_named_once_something_was_counted() -> None:
    totals = {name: 1.0 for name in NAMES if not name.startswith("nvlink")}
    assert counted(one(0, activity=GpuActivity(since_ns=1)))[0][1] == "GPU unit activity is measured: GPU 0"
    assert counted(one(0, activity=GpuActivity(since_ns=1, seconds=1.0, totals=totals)))[0][1] == (
        "GPU unit activity is measured, except nvlink_transmit, nvlink_receive: GPU 0"
    )


def test_a_counter_that_is_switched_off_is_in_order_and_a_gpu_of_another_vendor_needs_none() -> None:
    assert counted(one(0, activity_note=OFF)) == [
        (Status.OK, "GPU unit activity is not measured (switched off by metrics.gpu_activity): GPU 0", "")
    ]
    assert counted(one(0, vendor="amd")) == []
