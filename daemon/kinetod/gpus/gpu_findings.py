"""What stands in the way of reading the GPUs, as checks for people. Pure."""

from collections.abc import Iterator, Mapping

from kinetod.attach.finding import Finding, Status
from kinetod.gpus.gpu_types import LibraryState, Snapshot, VendorLibrary

VENDORS = {"nvml": "nvidia", "amdsmi": "amd"}
_PRODUCTS = {"nvml": "NVIDIA", "amdsmi": "AMD"}
_ADVICE = {
    ("nvml", LibraryState.ABSENT): "install the driver's libnvidia-ml.so.1 and `pip install 'kinetod[nvidia]'`",
    ("amdsmi", LibraryState.ABSENT): "install AMD SMI of ROCm 6 or later and `pip install 'kinetod[amd]'`",
}
_RESTART = "check whether `nvidia-smi` or `amd-smi` answers; the driver may have to be reloaded"


def findings(snapshot: Snapshot, present: Mapping[str, int]) -> tuple[Finding, ...]:
    """One for each library, and one for each GPU that is lost.

    present: how many GPUs the kernel's drivers have, by vendor (`metrics_gpus.present`).
    """
    return (*(_of_library(each, snapshot, present) for each in snapshot.libraries), *_lost(snapshot))


def _of_library(library: VendorLibrary, snapshot: Snapshot, present: Mapping[str, int]) -> Finding:
    vendor, name = VENDORS.get(library.name, ""), f"gpus_{library.name}"
    if library.state is LibraryState.OK:
        count = sum(gpu.vendor == vendor for gpu in snapshot.gpus)
        return Finding(name, Status.OK, f"{count} GPUs, driver {library.driver_version or 'of an unknown version'}", "")
    if not present.get(vendor):
        return Finding(name, Status.OK, f"no {_PRODUCTS.get(library.name, vendor)} GPU on this host", "")
    advice = _ADVICE.get((library.name, library.state), _RESTART)
    return Finding(name, Status.NOTE, f"GPUs cannot be measured: {library.detail}", advice)


def _lost(snapshot: Snapshot) -> Iterator[Finding]:
    for gpu in snapshot.gpus:
        if not gpu.works:
            detail = f"GPU {gpu.index} ({gpu.uuid or 'of an unknown UUID'}) has fallen off the bus or must be reset"
            yield Finding("gpu_lost", Status.PROBLEM, detail, "drain the host, then reset the GPU or reboot")
