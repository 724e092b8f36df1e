from typing import Any

import numpy as np
import pytest
from kineto_trace.kernel_traits.occupancy import Occupancy, Shapes, is_supported, occupancy

H200: dict[str, Any] = {
    "id": 0,
    "computeMajor": 9,
    "computeMinor": 0,
    "maxThreadsPerBlock": 1024,
    "maxThreadsPerMultiprocessor": 2048,
    "regsPerBlock": 65536,
    "warpSize": 32,
    "sharedMemPerBlock": 49152,
    "numSms": 132,
    "regsPerMultiprocessor": 65536,
    "sharedMemPerMultiprocessor": 233472,
}


def figures(
    blocks: int, threads: int, registers: int = 32, static: int = 0, dynamic: int = 0, **device: int
) -> Occupancy:
    def column(value: int) -> Any:
        return np.array([value], np.int64)

    shapes = Shapes(
        blocks=column(blocks),
        threads=column(threads),
        registers=column(registers),
        static_shared_memory=column(static),
        dynamic_shared_memory=column(dynamic),
    )
    return occupancy({**H200, **device}, shapes)


def test_a_full_gpu_is_limited_by_warps_and_registers() -> None:
    result = figures(132 * 8, 256)
    assert result.blocks_per_sm[0] == 8
    assert result.warps_per_sm[0] == 64
    assert result.percent[0] == 100
    assert (result.active_blocks[0], result.limiting_factors[0]) == (8, 0b00011)


@pytest.mark.parametrize(
    ("shape", "factor", "blocks"),
    [
        ({"threads": 1024}, 0b00011, 2),
        ({"threads": 128, "registers": 255}, 0b00010, 2),
        ({"threads": 64, "dynamic": 100_000}, 0b00100, 2),
        ({"threads": 32, "registers": 16}, 0b01000, 32),
    ],
)
def test_says_what_limits(shape: dict[str, int], factor: int, blocks: int) -> None:
    result = figures(10_000, **shape)
    assert (result.limiting_factors[0], result.active_blocks[0]) == (factor, blocks)


def test_allocations_are_rounded_up() -> None:
    result = figures(1, 33, registers=9, static=1, dynamic=1)
    assert result.allocated_registers[0] == 2 * 512  # two warps of 9 * 32 registers, in units of 256
    assert result.allocated_shared_memory[0] == 1152  # 2 bytes and the driver's 1024, in units of 128


def test_few_blocks_do_not_fill_the_gpu() -> None:
    assert figures(32, 256).percent[0] == 3


@pytest.mark.parametrize(
    ("major", "minor", "blocks"), [(7, 0, 32), (7, 5, 16), (8, 0, 32), (8, 6, 16), (8, 9, 24), (10, 0, 32), (12, 0, 24)]
)
def test_block_slots_depend_on_the_compute_capability(major: int, minor: int, blocks: int) -> None:
    assert figures(1, 32, computeMajor=major, computeMinor=minor).limit_blocks[0] == blocks


@pytest.mark.parametrize(
    "change",
    [
        {"numSms": 0},
        {"numSms": None},
        {"warpSize": "32"},
        {"computeMajor": 99},
        {"regsPerBlock": 2**40},
        {"numSms": True},
    ],
)
def test_properties_that_cannot_be_used_are_not(change: dict[str, Any]) -> None:
    assert is_supported(H200)
    assert not is_supported({**H200, **change})
