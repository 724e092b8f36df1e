"""AMD's GPUs, with pyrsmi's functions replaced."""

from types import SimpleNamespace

import pytest
from kinetod.gpus.amd import AmdSmi, bus_id
from kinetod.gpus.gpu_types import GpuState, LibraryError, LibraryState
from kinetod.gpus.reader_process import OpenLibrary


def smi(**changes: object) -> SimpleNamespace:
    values = {
        "smi_initialize": lambda: None,
        "smi_shutdown": lambda: None,
        "smi_get_device_count": lambda: 1,
        "smi_get_device_utilization": lambda _index: 42,
        "smi_get_device_memory_total": lambda _index: 206141652992,
        "smi_get_device_memory_used": lambda _index: 283000000,
        "smi_get_device_memory_busy": lambda _index: -1,
        "smi_get_device_average_power": lambda _index: 140.0,
        "smi_get_device_name": lambda _index: "AMD Instinct MI300X",
        "smi_get_device_uuid": lambda _index: "GPU-0f",
        "smi_get_device_pci_id": lambda _index: 0xC100,
    }
    return SimpleNamespace(**{**values, **changes})


def test_what_pyrsmi_answers_becomes_a_state_and_its_errors_nothing() -> None:
    library = AmdSmi(smi())
    library.open()
    assert library.read() == [
        GpuState(
            vendor="amd",
            index=0,
            uuid="GPU-0f",
            name="AMD Instinct MI300X",
            pci_bus_id="0000:c1:00.0",
            device="amd0",
            memory_total_bytes=206141652992,
            memory_used_bytes=283000000,
            utilization=0.42,
            power_watts=140.0,
        )
    ]


@pytest.mark.parametrize(
    ("number", "text"),
    [(0xC100, "0000:c1:00.0"), (0x10005D8B, "1000:5d:11.3"), (5 << 32 | 0x0300, "0005:03:00.0"), (-1, "")],
)
def test_a_pci_number_is_written_as_the_kernel_does(number: int, text: str) -> None:
    assert bus_id(number) == text


def test_a_library_that_fails_is_opened_again_only_later() -> None:
    opened = []

    def fail() -> int:
        raise RuntimeError("the driver went away")

    library = OpenLibrary(AmdSmi(smi(smi_get_device_count=fail, smi_initialize=lambda: opened.append(1))))
    for _ in range(3):
        gpus, state = library.read()
        assert (gpus, state.state, state.detail) == ([], LibraryState.FAILED, "AMD SMI: the driver went away")
    assert len(opened) == 1


def test_a_missing_library_is_absent_not_broken() -> None:
    def missing() -> None:
        raise RuntimeError("AMD SMI library (libamd_smi.so) not found.")

    with pytest.raises(LibraryError) as caught:
        AmdSmi(smi(smi_initialize=missing)).open()
    assert caught.value.state is LibraryState.ABSENT
