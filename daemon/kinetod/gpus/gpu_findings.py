"""What stands in the way of reading the GPUs, as checks for people. Pure."""

from collections.abc import Iterator, Mapping

from kinetod.attach.finding import Finding, Status
from kinetod.gpus.gpu_activity import NAMES
from kinetod.gpus.gpu_types import GpuState, LibraryState, Snapshot, VendorLibrary
from kinetod.gpus.nvml_gpm import IN_MIG_MODE, NOT_ALLOWED, OFF, OLD_DRIVER

VENDORS = {"nvml": ("nvidia",), "amdsmi": ("amd",), "sysman": ("intel",), "drm": ("amd", "intel")}
_BESIDE_THE_KERNEL = ("amdsmi", "sysman")  # the kernel's files tell of the same GPUs
_PRODUCTS = {"nvidia": "NVIDIA", "amd": "AMD", "intel": "Intel"}
_ADVICE = {
    ("nvml", LibraryState.ABSENT): "install the driver's libnvidia-ml.so.1 and `pip install 'kinetod[nvidia]'`",
    ("amdsmi", LibraryState.ABSENT): "install AMD SMI of ROCm 6 or later and `pip install 'kinetod[amd]'`",
    ("sysman", LibraryState.ABSENT): "install Intel's Level Zero loader and driver (libze1, intel-level-zero-gpu)",
}
_RESTARTS = {
    "nvml": "check whether `nvidia-smi` answers; the driver may have to be reloaded",
    "amdsmi": "check whether `amd-smi` answers; the driver may have to be reloaded",
    "sysman": "check whether `xpu-smi` answers; the driver may have to be reloaded",
    "drm": "check whether /sys/class/drm can be read; the driver may have to be reloaded",
}
_ACTIVITY = "gpu_activity"
_ACTIVITY_ADVICE = {
    OFF: "",
    IN_MIG_MODE: "take dcgm-exporter's values, which has them for each GPU instance",
    NOT_ALLOWED: "run kinetod as root, or load the driver with NVreg_RestrictProfilingToAdminUsers=0",
    OLD_DRIVER: "install a driver of the branch 535 or later and `pip install -U nvidia-ml-py`",
}


def findings(snapshot: Snapshot, present: Mapping[str, int]) -> tuple[Finding, ...]:
    """One for each library, for each GPU that is lost, and for what is counted of the units of which GPUs.

    present: how many GPUs the kernel's drivers have, by vendor (`gpu_metrics.present`).
    """
    return (
        *(_of_library(each, snapshot, present) for each in snapshot.libraries),
        *_lost(snapshot),
        *_activity(snapshot),
    )


def _of_library(library: VendorLibrary, snapshot: Snapshot, present: Mapping[str, int]) -> Finding:
    vendors, name = VENDORS.get(library.name, ()), f"gpus_{library.name}"
    products = " or ".join(_PRODUCTS[vendor] for vendor in vendors) or library.name
    if library.state is LibraryState.OK:
        count = sum(gpu.vendor in vendors for gpu in snapshot.gpus)
        return Finding(name, Status.OK, f"{count} GPUs, driver {library.driver_version or 'of an unknown version'}", "")
    if not any(present.get(vendor) for vendor in vendors):
        return Finding(name, Status.OK, f"no {products} GPU on this host", "")
    advice = _ADVICE.get((library.name, library.state)) or _RESTARTS.get(library.name, "")
    if library.name in _BESIDE_THE_KERNEL and any(gpu.vendor in vendors for gpu in snapshot.gpus):
        detail = f"GPUs are measured by the kernel's files alone, which tell less: {library.detail}"
        return Finding(name, Status.NOTE, detail, advice)
    return Finding(name, Status.NOTE, f"GPUs cannot be measured: {library.detail}", advice)


def _lost(snapshot: Snapshot) -> Iterator[Finding]:
    for gpu in snapshot.gpus:
        if not gpu.works:
            detail = f"GPU {gpu.index} ({gpu.uuid or 'of an unknown UUID'}) has fallen off the bus or must be reset"
            yield Finding("gpu_lost", Status.PROBLEM, detail, "drain the host, then reset the GPU or reboot")


def _activity(snapshot: Snapshot) -> Iterator[Finding]:
    """What is counted of NVIDIA's GPUs, one finding for all GPUs of which the same is to be said."""
    alike: dict[tuple[Status, str, str], list[int]] = {}
    for gpu in snapshot.gpus:
        if gpu.works and (gpu.activity is not None or gpu.activity_note):
            alike.setdefault(_activity_of(gpu), []).append(gpu.index)
    for (status, detail, advice), indexes in alike.items():
        numbers = ", ".join(map(str, indexes))
        yield Finding(_ACTIVITY, status, f"{detail}: GPU {numbers}", advice)


def _activity_of(gpu: GpuState) -> tuple[Status, str, str]:
    if gpu.activity is None:
        status = Status.OK if gpu.activity_note == OFF else Status.NOTE
        detail = f"the work of units is not counted ({gpu.activity_note})"
        return status, detail, _ACTIVITY_ADVICE.get(gpu.activity_note, "")
    missing = [name for name in NAMES if gpu.activity.seconds and name not in gpu.activity.totals]
    without = f", without {', '.join(missing)}" if missing else ""
    return Status.OK, f"the work of units is counted{without}", ""
