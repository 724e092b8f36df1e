"""What `doctor` says of the GPUs."""

import pytest
from kinetod.attach.finding import Status
from kinetod.gpus.gpu_findings import findings
from kinetod.gpus.gpu_types import GpuState, LibraryState, Snapshot, VendorLibrary


def found(state: LibraryState, *, gpus: int = 0, detail: str = "") -> tuple[Status, str, str]:
    library = VendorLibrary(name="nvml", state=state, detail=detail, driver_version="580")
    snapshot = Snapshot(
        libraries=(library,),
        gpus=tuple(GpuState(vendor="nvidia", index=index, uuid=f"GPU-{index}", name="H200") for index in range(gpus)),
    )
    (finding,) = findings(snapshot, {"nvidia": gpus})
    assert finding.name == "gpus_nvml"
    return finding.status, finding.detail, finding.advice


def test_a_library_that_works_tells_the_driver() -> None:
    assert found(LibraryState.OK, gpus=2) == (Status.OK, "2 GPUs, driver 580", "")


def test_no_library_is_needed_where_there_is_no_gpu() -> None:
    assert found(LibraryState.ABSENT) == (Status.OK, "no NVIDIA GPU on this host", "")


@pytest.mark.parametrize(
    ("state", "advice"), [(LibraryState.ABSENT, "kinetod[nvidia]"), (LibraryState.LATE, "the driver may have to be")]
)
def test_gpus_that_cannot_be_measured_are_a_note_with_advice(state: LibraryState, advice: str) -> None:
    status, detail, said = found(state, gpus=1, detail="it is late")
    assert (status, detail) == (Status.NOTE, "GPUs cannot be measured: it is late")
    assert advice in said


def test_a_lost_gpu_is_a_problem() -> None:
    lost = GpuState(vendor="nvidia", index=3, uuid="GPU-3", name="H200", works=False)
    (finding,) = findings(Snapshot(gpus=(lost,)), {"nvidia": 8})
    assert (finding.name, finding.status) == ("gpu_lost", Status.PROBLEM)
    assert "GPU 3 (GPU-3)" in finding.detail
