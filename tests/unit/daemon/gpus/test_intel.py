"""Intel's GPUs through the fake Sysman, as the reader process reads them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kinetod.gpus.gpu_reader import GpuReader
from kinetod.gpus.gpu_types import GpuQuestion, GpuState, LibraryError, LibraryState, Snapshot
from kinetod.gpus.intel import IntelSysman
from support.accelerators.sysman import FakeIntelGpus
from support.waiting import scaled

GIB = 1 << 30


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeIntelGpus:
    """What the fake Sysman shows to processes that are started now."""
    gpus = FakeIntelGpus(tmp_path)
    for name, value in gpus.environ.items():
        monkeypatch.setenv(name, value)
    return gpus


@pytest.fixture
def reader(gpus: FakeIntelGpus) -> Iterator[GpuReader]:
    reader = GpuReader()
    yield reader
    gpus.say()
    reader.close()


def read(reader: GpuReader, readings: int = 1) -> Snapshot:
    found = Snapshot()
    for _ in range(readings):
        found = reader.read(max_age_s=0, deadline_s=scaled(30))
    return found


def intel(snapshot: Snapshot) -> list[GpuState]:
    return [gpu for gpu in snapshot.gpus if gpu.vendor == "intel"]


def test_a_gpu_has_the_same_identity_where_only_its_processes_are_asked_for(reader: GpuReader) -> None:
    asked = reader.read(question=GpuQuestion.PROCESSES, max_age_s=0, deadline_s=scaled(30))
    found = [(gpu.uuid, gpu.name, gpu.pci_bus_id, gpu.index) for gpu in intel(asked)]
    assert found == [(gpu.uuid, gpu.name, gpu.pci_bus_id, gpu.index) for gpu in intel(read(reader))]
    assert [uuid for uuid, *_ in found] == ["a0" * 16, "a1" * 16]


def test_a_gpu_has_its_identity_memory_and_sensors(reader: GpuReader) -> None:
    snapshot = read(reader, 2)
    first, second = intel(snapshot)
    assert (first.name, first.pci_bus_id, second.pci_bus_id) == (
        "Intel(R) Data Center GPU Max 1550",
        "0000:29:00.0",
        "0000:39:00.0",
    )
    assert (first.uuid, second.uuid) == ("a0" * 16, "a1" * 16)
    assert (first.memory_total_bytes, first.memory_used_bytes) == (128 * GIB, 8 * GIB)  # not that of the host
    assert (first.temperature_celsius, first.memory_temperature_celsius) == (42.5, 43.5)
    assert (first.sm_clock_hertz, first.memory_clock_hertz) == (1.55e9, None)
    assert first.power_limit_watts == 600
    (library,) = [each for each in snapshot.libraries if each.name == "sysman"]
    assert (library.state, library.driver_version) == (LibraryState.OK, "1.6.33578")


def test_counters_become_rates_over_the_time_between_two_readings(reader: GpuReader) -> None:
    gpu = intel(read(reader))[0]
    assert (gpu.utilization, gpu.power_watts, gpu.pcie_receive_bytes_per_second) == (None, None, None)
    assert gpu.energy_joules is not None
    gpu = intel(read(reader, 2))[0]
    assert gpu.utilization == pytest.approx(0.25, abs=0.01)  # of the compute engines of both tiles
    assert gpu.power_watts == pytest.approx(300)
    assert gpu.pcie_receive_bytes_per_second == pytest.approx(3e9)
    assert gpu.pcie_transmit_bytes_per_second == pytest.approx(1e9)


def test_what_a_gpu_does_not_have_is_not_told(gpus: FakeIntelGpus, reader: GpuReader) -> None:
    gpus.say("poor 1", "gpus 1")
    (gpu,) = intel(read(reader, 2))
    assert gpu.utilization == pytest.approx(0.5, abs=0.01)  # of the busier tile
    assert gpu.power_watts == pytest.approx(290)  # of the domain that is not a tile's
    assert (gpu.temperature_celsius, gpu.pcie_receive_bytes_per_second) == (None, None)


def test_a_lost_gpu_does_not_hide_the_others(gpus: FakeIntelGpus, reader: GpuReader) -> None:
    read(reader)
    gpus.say("lost 0")
    first, second = intel(read(reader))
    assert (first.works, first.memory_total_bytes, second.works) == (False, None, True)


def test_a_library_without_a_driver_is_absent_and_says_what_to_install(gpus: FakeIntelGpus, reader: GpuReader) -> None:
    gpus.say("init 2013265921")
    snapshot = read(reader)
    (library,) = [each for each in snapshot.libraries if each.name == "sysman"]
    assert library.state is LibraryState.ABSENT
    assert "libze_intel_gpu.so.1" in library.detail
    assert "zesInit returned 0x78000001" in library.detail


def test_a_driver_that_hangs_makes_the_reader_late_and_not_the_daemon(gpus: FakeIntelGpus, reader: GpuReader) -> None:
    gpus.say("hang 1")
    late = reader.read(max_age_s=0, deadline_s=0.2)
    assert {library.state for library in late.libraries} == {LibraryState.LATE}


def test_a_missing_loader_is_absent() -> None:
    def missing() -> None:
        raise OSError("libze_loader.so.1: cannot open shared object file: No such file or directory")

    with pytest.raises(LibraryError, match="Level Zero loader") as caught:
        IntelSysman(missing).open()  # type: ignore[arg-type]
    assert caught.value.state is LibraryState.ABSENT
