"""Device properties from the process's own libcuda."""

import ctypes

import pytest
from kineto_agent.sources.cupti import cuda_devices
from kineto_agent.sources.cupti.collector_binding import Collector
from support.machine.native import fake_cuda


def test_devices_are_described_with_kinetos_keys() -> None:
    ctypes.CDLL(str(fake_cuda()))
    assert cuda_devices.describe(Collector.of_process().device) == {
        "devices": [
            {
                "id": 0,
                "name": "Fake H200",
                "uuid": "GPU-fa000000-0000-0000-0000-000000000000",
                "totalGlobalMem": 151397597184,
                "computeMajor": 9,
                "computeMinor": 0,
                "maxThreadsPerBlock": 1024,
                "maxThreadsPerMultiprocessor": 2048,
                "regsPerBlock": 65536,
                "warpSize": 32,
                "sharedMemPerBlock": 49152,
                "numSms": 132,
                "regsPerMultiprocessor": 65536,
                "sharedMemPerBlockOptin": 232448,
                "sharedMemPerMultiprocessor": 233472,
            }
        ],
        "cuda_driver_version": 13000,
    }


def test_devices_are_told_apart_by_the_uuids_that_nvml_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    ctypes.CDLL(str(fake_cuda()))

    def uuids() -> list[object]:
        return [each.get("uuid") for each in cuda_devices.describe(Collector.of_process().device)["devices"]]

    monkeypatch.setenv("FAKE_CUDA_VISIBLE", "31")
    assert uuids() == ["GPU-fa000000-0000-0000-0000-000000000003", "GPU-fa000000-0000-0000-0000-000000000001"]
    monkeypatch.setenv("FAKE_CUDA_MIG", "1")
    assert uuids() == ["MIG-fa000000-0000-0001-0000-000000000003", "MIG-fa000000-0000-0001-0000-000000000001"]
    monkeypatch.setenv("FAKE_CUDA_UUID", "none")
    assert uuids() == [None, None]


def test_what_is_not_told_is_not_invented() -> None:
    assert cuda_devices.describe(lambda index, attributes: b"") == {"devices": []}
    assert cuda_devices.describe(lambda index, attributes: bytes(cuda_devices.FACTS.size)) == {"devices": []}


def test_a_process_that_names_more_devices_than_it_describes_ends_the_list() -> None:
    facts = cuda_devices.FACTS.pack(8, 13000, 0, 0, 1 << 30, *[0] * 32, b"A GPU", bytes(16), 0)
    asked: list[int] = []

    def ask(index: int, attributes: bytes) -> bytes:
        asked.append(index)
        return facts if index == 0 else b""

    assert cuda_devices.describe(ask) == {
        "devices": [{"id": 0, "name": "A GPU", "totalGlobalMem": 1 << 30}],
        "cuda_driver_version": 13000,
    }
    assert asked == [0, 1]
