"""Device properties from the process's own libcuda."""

import ctypes
from pathlib import Path

from kineto_agent.sources import cupti_devices
from support.native import fake_cuda


def test_devices_are_described_with_kinetos_keys(tmp_path: Path) -> None:
    library = fake_cuda()
    ctypes.CDLL(str(library))
    maps = tmp_path / "maps"
    maps.write_text(f"7f00-7f01 r-xp 0 fe:00 1 {library}\n")
    assert cupti_devices.describe(str(maps)) == {
        "devices": [
            {
                "id": 0,
                "name": "Fake H200",
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


def test_without_cuda_nothing_is_invented(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text("")
    assert cupti_devices.describe(str(maps)) == {"devices": []}
