"""The driver's restriction of hardware counters, and the CUPTI versions of a host."""

import os
from pathlib import Path

import pytest
from kinetod.attach.attach_types import Finding, Status
from kinetod.host_checks import gpu_checks
from kinetod.host_checks.gpu_checks import device_findings
from support.accelerators.drm_host import DrmHost
from support.machine import native


@pytest.fixture
def host(tmp_path: Path) -> DrmHost:
    return DrmHost(tmp_path)


def device_found(host: DrmHost, dev: Path) -> dict[str, Finding]:
    return {each.name: each for each in device_findings(host.sys, dev, host.proc)}


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
    assert list(device_found(host, tmp_path).values()) == [
        Finding("gpu_driver", Status.OK, "no AMD or Intel GPU on the PCI bus")
    ]


def test_drivers_are_counted_and_gpus_of_virtual_machines_are_in_order(host: DrmHost, tmp_path: Path) -> None:
    for number in range(2):
        pci(host, f"0000:0{number + 3}:00.0", "0x1002", "0x120000", "amdgpu")
    pci(host, "0000:c1:00.0", "0x8086", "0x038000", "vfio-pci")
    assert device_found(host, tmp_path)["gpu_driver"].detail == "2 with amdgpu, 1 with vfio-pci"


@pytest.mark.parametrize(
    ("vendor", "driver", "advice"), [("0x1002", "", "amdgpu-dkms"), ("0x8086", "snd", "modprobe xe")]
)
def test_a_gpu_without_a_driver_is_told_with_what_to_load(
    host: DrmHost, tmp_path: Path, vendor: str, driver: str, advice: str
) -> None:
    pci(host, "0000:03:00.0", vendor, "0x038000", driver)
    finding = device_found(host, tmp_path)["gpu_driver"]
    assert (finding.status, finding.detail) == (
        Status.NOTE,
        "0000:03:00.0 without a GPU driver: not usable by programs",
    )
    assert advice in finding.advice


def test_missing_device_files_are_named(host: DrmHost, tmp_path: Path) -> None:
    host.gpu("amdgpu", "0000:03:00.0", 128)
    dev = tmp_path / "dev"
    DrmHost.write(dev / "dri", {"renderD128": ""})
    finding = device_found(host, dev)["gpu_nodes"]
    assert (finding.status, finding.detail) == (
        Status.NOTE,
        f"missing: {dev}/kfd; programs here cannot use the GPU",
    )


@pytest.mark.parametrize(
    ("mode", "who"), [(0o666, "anyone can open"), (0o660, "only root and members of the group 4242 may open")]
)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files to a group")
def test_who_may_open_the_device_files_is_told(host: DrmHost, tmp_path: Path, mode: int, who: str) -> None:
    host.gpu("xe", "0000:03:00.0", 128)
    dev = tmp_path / "dev"
    DrmHost.write(dev / "dri", {"renderD128": ""})
    os.chown(dev / "dri/renderD128", 0, 4242)
    (dev / "dri/renderD128").chmod(mode)
    finding = device_found(host, dev)["gpu_nodes"]
    assert (finding.status, finding.detail) == (Status.OK, f"1 device file, which {who}")


def found(name: str, proc: Path, root: Path) -> Finding:
    (one,) = (each for each in gpu_checks.driver_findings(proc, root) if each.name == name)
    return one


@pytest.mark.parametrize(
    ("params", "status"),
    [
        ("ResmanDebugLevel: 4294967295\nRmProfilingAdminOnly: 1\n", Status.NOTE),
        ("RmProfilingAdminOnly: 0\n", Status.OK),
        ("NVreg_RestrictProfilingToAdminUsers: 1\n", Status.NOTE),
        ("RestrictProfilingToAdminUsers: 0\n", Status.OK),
        ("ResmanDebugLevel: 1\n", Status.UNKNOWN),
        (None, Status.OK),
    ],
)
def test_the_restriction_is_read_under_either_name(tmp_path: Path, params: str | None, status: Status) -> None:
    if params is not None:
        (tmp_path / "driver/nvidia").mkdir(parents=True)
        (tmp_path / "driver/nvidia/params").write_text(params)
    one = found("gpu_counters", tmp_path, tmp_path)
    assert one.status is status
    assert ("NVreg_RestrictProfilingToAdminUsers=0" in one.advice) == (status is Status.NOTE)


@pytest.mark.parametrize(
    ("version", "status", "says"),
    [(130001, Status.OK, "(CUDA 13.0)"), (999999, Status.NOTE, "(unknown version 999999)")],
)
def test_libraries_of_this_host_are_listed_once_with_their_version(
    tmp_path: Path, version: int, status: Status, says: str
) -> None:
    source = tmp_path / "cupti.c"
    source.write_text(f"unsigned cuptiGetVersion(unsigned *version) {{ *version = {version}; return 0; }}\n")
    library = native.build("libcupti.so.99", [source], ["-O2", "-fPIC", "-shared"])
    folder = tmp_path / "usr/local/cuda-13.0/lib64"
    folder.mkdir(parents=True)
    (folder / "libcupti.so.99").write_bytes(library.read_bytes())
    (tmp_path / "usr/local/cuda").symlink_to("cuda-13.0")
    one = found("cupti", tmp_path, tmp_path)
    assert one.status is status
    assert one.detail.count("libcupti.so.99") == 1 and says in one.detail


def test_no_library_is_in_order(tmp_path: Path) -> None:
    assert found("cupti", tmp_path, tmp_path).status is Status.OK
