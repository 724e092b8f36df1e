"""NVML by its real ABI: the process that reads GPUs, against the fake library."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pynvml
import pytest
from kinetod.gpus.gpu_reader import GpuReader
from kinetod.gpus.gpu_types import NAMES, SHARES, GpuActivity, GpuProcess, LibraryState, Snapshot, between
from kinetod.gpus.nvml import IN_MIG_MODE, METRICS, NO_COUNTERS, NOT_ALLOWED, OFF, OLD_DRIVER, GpmCounter, Nvml
from support.machine.gpus import FakeGpus, fake_nvml

MIB = 1 << 20
LONG_S = 30.0
NO_PERMISSION, NOT_SUPPORTED, VERSION_MISMATCH, UNKNOWN = 4, 3, 25, 999


@pytest.fixture
def nvml(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """pynvml with the fake library, in this process."""
    monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(fake_nvml())))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    pynvml.nvmlInit()
    yield pynvml
    wrong = set(gpus.gpm_calls()) - {"alloc", "free"}
    assert wrong == set()


class Counted:
    """The counter of a GPU and its clock."""

    def __init__(self, nvml: Any, index: int = 0) -> None:
        self.now_ns = 10**12
        self.counter = GpmCounter(nvml, nvml.nvmlDeviceGetHandleByIndex(index), clock=lambda: self.now_ns)

    def step(self, seconds: float = 0.0) -> GpuActivity | None:
        """What is counted after that time."""
        self.now_ns += round(seconds * 1e9)
        self.counter.step()
        return self.counter.activity


@pytest.fixture
def counted(nvml: Any) -> Counted:
    return Counted(nvml)


def known(activity: GpuActivity | None) -> GpuActivity:
    assert activity is not None
    return activity


def test_totals_grow_by_what_each_interval_had(gpus: FakeGpus, counted: Counted) -> None:
    assert counted.step() == GpuActivity(since_ns=10**12)
    gpus.say("metric 5 50", "metric 10 25", "metric 20 3", "metric 60 100")
    first = known(counted.step(2.0))
    assert (first.since_ns, first.seconds, set(first.totals)) == (10**12, 2.0, set(NAMES))
    assert first.totals["tensor_active"] == 1.0
    assert first.totals["dram_active"] == 0.5
    assert first.totals["pcie_transmit"] == 6 * MIB
    assert first.totals["nvlink_receive"] == 200 * MIB
    gpus.say("metric 5 100", "metric 10 0", "metric 20 0")
    second = known(counted.step(1.0))
    assert (second.seconds, second.totals["tensor_active"], second.totals["dram_active"]) == (3.0, 2.0, 0.5)
    rates = between(first, second)
    assert (rates["tensor_active"], rates["dram_active"], rates["pcie_transmit"]) == (1.0, 0.0, 0.0)


def test_every_metric_is_asked_by_its_number_at_nvidia(nvml: Any, counted: Counted) -> None:
    names = {
        "graphics_active": "GRAPHICS_UTIL", "sm_active": "SM_UTIL", "sm_occupancy": "SM_OCCUPANCY",
        "tensor_active": "ANY_TENSOR_UTIL", "dram_active": "DRAM_BW_UTIL", "fp64_active": "FP64_UTIL",
        "fp32_active": "FP32_UTIL", "fp16_active": "FP16_UTIL", "pcie_transmit": "PCIE_TX_PER_SEC",
        "pcie_receive": "PCIE_RX_PER_SEC", "nvlink_transmit": "NVLINK_TOTAL_TX_PER_SEC",
        "nvlink_receive": "NVLINK_TOTAL_RX_PER_SEC",
    }  # fmt: skip
    assert {name: getattr(nvml, f"NVML_GPM_METRIC_{theirs}") for name, theirs in names.items()} == METRICS
    counted.step()
    totals = known(counted.step(1.0)).totals  # the fake's values are the numbers
    assert totals == {name: number / 100 if name in SHARES else number * MIB for name, number in METRICS.items()}


def test_two_buffers_serve_for_all_samples_and_are_freed(gpus: FakeGpus, counted: Counted) -> None:
    for _ in range(5):
        counted.step(1.0)
    assert gpus.gpm_calls() == ["alloc", "alloc"]
    counted.counter.close()
    assert gpus.gpm_calls() == ["alloc", "alloc", "free", "free"]


def test_a_sample_that_is_too_young_is_not_compared(counted: Counted) -> None:
    first = counted.step()
    assert counted.step(0.099) is first
    assert known(counted.step(0.001)).seconds == pytest.approx(0.1)


def test_a_metric_that_the_gpu_does_not_have_has_no_total(gpus: FakeGpus, counted: Counted) -> None:
    gpus.say("no_metric 60", "no_metric 61")
    counted.step()
    assert set(known(counted.step(1.0)).totals) == set(NAMES) - {"nvlink_transmit", "nvlink_receive"}


def test_a_metric_that_goes_or_comes_begins_all_totals_anew(gpus: FakeGpus, counted: Counted) -> None:
    counted.step()
    before = known(counted.step(1.0))
    gpus.say("no_metric 60")
    now = known(counted.step(1.0))
    assert (now.since_ns, now.seconds) == (before.since_ns + 10**9, 1.0)
    assert between(before, now) == {}
    gpus.say()
    assert "nvlink_receive" in known(counted.step(1.0)).totals


@pytest.mark.parametrize("value", ["105.1", "-0.1", "nan", "inf"])
def test_a_value_that_cannot_be_is_none(gpus: FakeGpus, counted: Counted, value: str) -> None:
    gpus.say(f"metric 2 {value}")
    counted.step()
    assert set(known(counted.step(1.0)).totals) == set(NAMES) - {"sm_active"}


def test_a_little_above_all_of_the_gpu_is_all_of_it(gpus: FakeGpus, counted: Counted) -> None:
    gpus.say("metric 2 100.4")
    counted.step()
    assert known(counted.step(1.0)).totals["sm_active"] == 1.0


@pytest.mark.parametrize(
    ("line", "refusal"),
    [
        ("gpm 0", NO_COUNTERS),
        ("old 1", NO_COUNTERS),
        ("mig 0", IN_MIG_MODE),
        (f"gpm_error {NO_PERMISSION}", NOT_ALLOWED),
        (f"gpm_error {NOT_SUPPORTED}", NO_COUNTERS),
        (f"gpm_error {UNKNOWN}", "NVML: Unknown Error"),
        ("lost 0", "NVML: GPU is lost"),
    ],
)
def test_what_cannot_be_counted_says_why_and_has_no_zeros(
    gpus: FakeGpus, counted: Counted, line: str, refusal: str
) -> None:
    gpus.say(line)
    assert (counted.step(), counted.step(1.0), counted.counter.refusal) == (None, None, refusal)


@pytest.mark.parametrize(
    ("line", "refusal"),
    [
        ("lost 0", "NVML: GPU is lost"),
        ("mig 0", IN_MIG_MODE),
        (f"gpm_error {NO_PERMISSION}", NOT_ALLOWED),
        (f"gpm_get_error {VERSION_MISMATCH}", OLD_DRIVER),
        (f"gpm_get_error {UNKNOWN}", "NVML: Unknown Error"),
    ],
)
def test_after_a_failure_totals_begin_anew(gpus: FakeGpus, counted: Counted, line: str, refusal: str) -> None:
    counted.step()
    before = known(counted.step(1.0))
    gpus.say(line)
    assert (counted.step(1.0), counted.counter.refusal) == (None, refusal)
    gpus.say()
    assert (known(counted.step(1.0)).seconds, counted.counter.refusal) == (0.0, "")
    now = known(counted.step(1.0))
    assert (now.seconds, between(before, now)) == (1.0, {})


def test_a_gpu_in_mig_mode_does_not_keep_the_others_from_being_counted(gpus: FakeGpus, nvml: Any) -> None:
    gpus.say("mig 1")
    first, second = Counted(nvml, 0), Counted(nvml, 1)
    for each in (first, second):
        each.step()
        each.step(1.0)
    assert known(first.counter.activity).seconds == 1.0
    assert (second.counter.activity, second.counter.refusal) == (None, IN_MIG_MODE)


def test_the_size_of_the_bindings_structure_does_not_matter(
    nvml: Any, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = type(
        "c_nvmlGpmMetricsGet_t",
        (ctypes.Structure,),
        {"_fields_": [*nvml.c_nvmlGpmMetricsGet_t._fields_[:4], ("metrics", nvml.c_nvmlGpmMetric_t * 98)]},
    )  # of the first bindings
    monkeypatch.setattr(nvml, "c_nvmlGpmMetricsGet_t", older)
    counted.step()
    assert set(known(counted.step(1.0)).totals) == set(NAMES)


def test_a_binding_of_another_version_is_refused(nvml: Any, counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "NVML_GPM_METRICS_GET_VERSION", 2)
    counted.step()
    assert (counted.step(1.0), counted.counter.refusal) == (None, OLD_DRIVER)


def test_a_binding_without_gpm_is_refused() -> None:
    counter = GpmCounter(SimpleNamespace(NVMLError=pynvml.NVMLError), object())
    counter.step()
    assert (counter.activity, counter.refusal) == (None, OLD_DRIVER)


def test_the_library_frees_the_buffers_of_all_gpus(gpus: FakeGpus, nvml: Any) -> None:
    gpus.say("gpus 3", "lost 1")
    library = Nvml(nvml)
    library.open()
    states = library.read()
    assert [gpu.activity is None for gpu in states] == [False, True, False]
    library.close()
    assert sorted(gpus.gpm_calls()) == ["alloc"] * 4 + ["free"] * 4


def test_it_can_be_switched_off(gpus: FakeGpus) -> None:
    reader = GpuReader(activity=False)
    found = reader.read(deadline_s=LONG_S)
    reader.close()
    assert [(gpu.activity, gpu.activity_note) for gpu in found.gpus] == [(None, OFF), (None, OFF)]
    assert gpus.gpm_calls() == []


SAMPLED = """
import sys
from kinetod.gpus import reader_process

class Library:
    name = "counted"
    def open(self): return "1"
    def read(self): return []
    def read_processes(self): return []
    def close(self): pass

reader_process.SAMPLE_S = 0.001
reader_process.libraries = lambda **_: [
    reader_process.OpenLibrary(Library(), sample=lambda: sys.stderr.write(".") and sys.stderr.flush())
]
sys.exit(reader_process.main())
"""


def test_samples_are_taken_between_questions_once_the_library_is_open() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SAMPLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    for _ in range(2):
        process.stdin.write(b"?")
        process.stdin.flush()
        assert b'"counted"' in process.stdout.readline()
        assert process.stderr.read(3) == b"..."
    process.stdin.close()
    assert process.wait() == 0
    process.stdout.close()
    process.stderr.close()


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
