"""NVML by its real ABI: the process that reads GPUs, against the fake library."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from kinetod.gpus.gpu_types import GpuActivity, GpuProcess, LibraryState, Snapshot
from kinetod.gpus.nvml_gpm import NO_COUNTERS
from support.machine.gpus import FakeGpus


@pytest.fixture
def gpus(tmp_path: Path) -> FakeGpus:
    return FakeGpus(tmp_path)


def read(gpus: FakeGpus, readings: int = 1) -> Snapshot:
    """What one process answers to its last question."""
    command = [sys.executable, "-m", "kinetod.gpus.reader_process"]
    environ = {**os.environ, **gpus.environ, "ROCM_PATH": "/nonexistent"}
    done = subprocess.run(command, input=b"?" * readings, env=environ, capture_output=True, check=True)
    lines = done.stdout.splitlines()
    assert (len(lines), done.stderr) == (readings, b"")
    return msgspec.json.decode(lines[-1], type=Snapshot)


def test_a_gpu_has_all_its_figures(gpus: FakeGpus) -> None:
    gpus.say("gpus 1", "process 0 99 50 3", "process 0 1234 500 33")
    (gpu,) = read(gpus).gpus
    assert gpu.activity is not None
    assert msgspec.structs.asdict(gpu) == {
        "vendor": "nvidia",
        "index": 0,
        "uuid": "GPU-00000000-0000-0000-0000-000000000000",
        "name": "NVIDIA H200",
        "pci_bus_id": "00000000:18:00.0",
        "device": "nvidia0",
        "works": True,
        "memory_total_bytes": 143771 << 20,
        "memory_used_bytes": 43100 << 20,
        "utilization": 0.87,
        "memory_utilization": 0.43,
        "power_watts": 512.345,
        "power_limit_watts": 700.0,
        "energy_joules": 123456.0,
        "temperature_celsius": 61,
        "memory_temperature_celsius": 70,
        "sm_clock_hertz": 1.98e9,
        "memory_clock_hertz": 3.201e9,
        "pcie_transmit_bytes_per_second": 1000 * 1024,
        "pcie_receive_bytes_per_second": 2000 * 1024,
        "nvlink_transmit_bytes": 5000 * 1024,
        "nvlink_receive_bytes": 6000 * 1024,
        "ecc_corrected": 3,
        "ecc_uncorrected": 1,
        "xid_errors": {},
        "activity": GpuActivity(since_ns=gpu.activity.since_ns),  # the first sample
        "activity_note": "",
        "processes": (
            GpuProcess(pid=99, memory_bytes=50 << 20, utilization=0.03),
            GpuProcess(pid=1234, memory_bytes=500 << 20, utilization=0.33),
        ),
    }


def test_what_an_old_driver_does_not_tell_is_left_out(gpus: FakeGpus) -> None:
    gpus.say("gpus 1", "old 1", "xid 79")
    (gpu,) = read(gpus).gpus
    assert (gpu.works, gpu.utilization) == (True, 0.87)
    assert gpu.memory_used_bytes == 43771 << 20  # with what the driver keeps for itself
    absent = (gpu.energy_joules, gpu.ecc_corrected, gpu.nvlink_transmit_bytes, gpu.pcie_receive_bytes_per_second)
    assert absent == (None, None, None, None)
    assert gpu.xid_errors == {}
    assert (gpu.activity, gpu.activity_note) == (None, NO_COUNTERS)


def test_a_lost_gpu_keeps_its_name_and_does_not_hide_the_others(gpus: FakeGpus) -> None:
    gpus.say("gpus 3", "lost 1")
    snapshot = read(gpus)
    assert [(gpu.index, gpu.works, gpu.device) for gpu in snapshot.gpus] == [
        (0, True, "nvidia0"),
        (1, False, "nvidia1"),
        (2, True, "nvidia2"),
    ]
    assert snapshot.gpus[1].power_watts is None


def test_an_xid_is_counted_once(gpus: FakeGpus) -> None:
    gpus.say("gpus 2", "xid 79")
    assert [gpu.xid_errors for gpu in read(gpus, readings=3).gpus] == [{79: 1}, {}]


def test_libraries_say_how_they_are(gpus: FakeGpus) -> None:
    nvml, amdsmi, *_ = read(gpus).libraries
    assert (nvml.name, nvml.state, nvml.driver_version) == ("nvml", LibraryState.OK, "580.65.06")
    assert (amdsmi.name, amdsmi.state) == ("amdsmi", LibraryState.ABSENT)
    assert "not found" in amdsmi.detail


def test_a_library_that_does_not_come_up_says_why(gpus: FakeGpus) -> None:
    gpus.say("init 9")
    snapshot = read(gpus, readings=2)  # it is not asked again at once
    assert snapshot.gpus == ()
    assert (snapshot.libraries[0].state, snapshot.libraries[0].detail) == (
        LibraryState.FAILED,
        "NVML: Driver Not Loaded",
    )
