"""What an AMD GPU is to a trace, by rocprofiler's description of it."""

import pytest
from kineto_agent.sources.rocprofiler.gpu_activities import devices_of

REST = dict.fromkeys(("memory_bytes", "workgroup_most", "waves_per_unit", "wavefront", "lds_kb", "compute_units"), 1)


def addresses(*places: tuple[int, int]) -> list[object]:
    """The PCI address of each GPU. places: domain and location."""
    agents = [
        {"gpu": 1, "ordinal": number, "name": "", "arch": "", "domain": domain, "location": location, **REST}
        for number, (domain, location) in enumerate(places)
    ]
    host = {"gpu": 0, "ordinal": 0, "domain": 0, "location": 0}
    return [device.get("pci_bus_id") for device in devices_of({"agents": [host, *agents]})]


def test_a_gpu_has_its_address_as_the_kernel_writes_it() -> None:
    assert addresses((0, 0x0500), (0, 0xC1F9), (0x10001, 0)) == ["0000:05:00.0", "0000:c1:1f.1", "10001:00:00.0"]


@pytest.mark.parametrize("number", [1 << 28, 1])
def test_partitions_of_a_gpu_have_none(number: int) -> None:
    places = [(0, 0x0500 + partition * number) for partition in range(3)]
    assert addresses(*places, (0, 0x2600)) == [None, None, None, "0000:26:00.0"]
    if number > 0xFFFF:
        assert addresses(places[1]) == [None]  # the only one that the container may see
