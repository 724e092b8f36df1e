"""GPUs by their kernel drivers, in folders that stand for /sys and /proc."""

from pathlib import Path

from kinetod.counters.kernel_gpus import AMD, INTEL, NVIDIA, kernel_gpus
from support.accelerators.drm_host import DrmHost


def test_gpus_have_the_numbers_and_names_that_they_have_elsewhere(tmp_path: Path) -> None:
    host = DrmHost(tmp_path)
    sys, proc = host.sys, host.proc
    for address, facts in (("0000:01:00.0", "Model: \t NVIDIA H200\nGPU UUID: \t GPU-7a\n"), ("0000:02:00.0", "")):
        folder = proc / "driver/nvidia/gpus" / address
        folder.mkdir(parents=True)
        (folder / "information").write_text(facts)
    host.gpu("amdgpu", "0000:c1:00.0", 128, unique_id="1a2b", product_name="AMD Instinct MI300X")
    host.gpu("xe", "0000:d1:00.0", 129)
    found = [gpu for vendor in (NVIDIA, AMD, INTEL) for gpu in kernel_gpus(vendor, sys, proc)]
    assert [(gpu.index, gpu.uuid, gpu.name, gpu.pci_bus_id) for gpu in found] == [
        (0, "GPU-7a", "NVIDIA H200", "0000:01:00.0"),
        (1, "0000:02:00.0", "NVIDIA GPU", "0000:02:00.0"),
        (2, "1a2b", "AMD Instinct MI300X", "0000:c1:00.0"),
        (3, "0000:d1:00.0", "Intel GPU", "0000:d1:00.0"),
    ]


def test_a_host_without_a_driver_has_none(tmp_path: Path) -> None:
    assert [kernel_gpus(vendor, tmp_path, tmp_path) for vendor in (NVIDIA, AMD, INTEL)] == [[], [], []]
