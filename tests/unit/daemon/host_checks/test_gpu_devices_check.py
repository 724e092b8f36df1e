"""Drivers and device files of AMD's and Intel's GPUs, on made-up hosts."""

import os
from pathlib import Path

import pytest
from kinetod.attach.attach_types import Finding, Status
from kinetod.host_checks.gpu_devices_check import findings
from support.accelerators.drm_host import DrmHost


@pytest.fixture
def host(tmp_path: Path) -> DrmHost:
    return DrmHost(tmp_path)


def found(host: DrmHost, dev: Path) -> dict[str, Finding]:
    return {each.name: each for each in findings(host.sys, dev, host.proc)}


def pci(host: DrmHost, address: str, vendor: str, kind: str, driver: str = "") -> None:
    device = host.sys / "bus/pci/devices" / address
    host.write(device, {"vendor": vendor, "class": kind})
    if driver:
        bus = host.sys / "bus/pci/drivers" / driver
        bus.mkdir(parents=True, exist_ok=True)
        (device / "driver").symlink_to(bus)


def test_a_host_without_such_gpus_is_in_order(host: DrmHost, tmp_path: Path) -> None:
    pci(host, "0000:01:00.0", "0x10de", "0x030200", "nvidia")
    pci(host, "0000:00:02.0", "0x8086", "0x030000")  # integrated
    pci(host, "0000:00:1f.0", "0x8086", "0x060100")  # a bridge
    assert list(found(host, tmp_path).values()) == [
        Finding("gpu_driver", Status.OK, "no GPU of AMD or Intel on the PCI bus")
    ]


def test_drivers_are_counted_and_gpus_of_virtual_machines_are_in_order(host: DrmHost, tmp_path: Path) -> None:
    for number in range(2):
        pci(host, f"0000:0{number + 3}:00.0", "0x1002", "0x120000", "amdgpu")
    pci(host, "0000:c1:00.0", "0x8086", "0x038000", "vfio-pci")
    assert found(host, tmp_path)["gpu_driver"].detail == "2 with amdgpu, 1 with vfio-pci"


@pytest.mark.parametrize(
    ("vendor", "driver", "advice"), [("0x1002", "", "amdgpu-dkms"), ("0x8086", "snd", "modprobe xe")]
)
def test_a_gpu_without_a_driver_is_told_with_what_to_load(
    host: DrmHost, tmp_path: Path, vendor: str, driver: str, advice: str
) -> None:
    pci(host, "0000:03:00.0", vendor, "0x038000", driver)
    finding = found(host, tmp_path)["gpu_driver"]
    assert (finding.status, finding.detail) == (
        Status.NOTE,
        "0000:03:00.0 without a driver for GPUs: programs cannot use them",
    )
    assert advice in finding.advice


def test_missing_device_files_are_named(host: DrmHost, tmp_path: Path) -> None:
    host.gpu("amdgpu", "0000:03:00.0", 128)
    dev = tmp_path / "dev"
    DrmHost.write(dev / "dri", {"renderD128": ""})
    finding = found(host, dev)["gpu_nodes"]
    assert (finding.status, finding.detail) == (
        Status.NOTE,
        f"{dev}/kfd is missing: programs here cannot use the GPU",
    )


@pytest.mark.parametrize(
    ("mode", "who"), [(0o666, "everybody may open"), (0o660, "only root and members of the group 4242 may open")]
)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files to a group")
def test_who_may_open_the_device_files_is_told(host: DrmHost, tmp_path: Path, mode: int, who: str) -> None:
    host.gpu("xe", "0000:03:00.0", 128)
    dev = tmp_path / "dev"
    DrmHost.write(dev / "dri", {"renderD128": ""})
    os.chown(dev / "dri/renderD128", 0, 4242)
    (dev / "dri/renderD128").chmod(mode)
    finding = found(host, dev)["gpu_nodes"]
    assert (finding.status, finding.detail) == (Status.OK, f"1 device files, which {who}")
