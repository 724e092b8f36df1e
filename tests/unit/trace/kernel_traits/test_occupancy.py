import math
from typing import Any

import numpy as np
import pytest
from kineto_trace.kernel_traits.occupancy import (
    Occupancy,
    Shapes,
    amd_figures,
    is_supported,
    is_supported_amd,
    occupancy,
)

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


def shapes_of(blocks: int, threads: int, registers: int, static: int, dynamic: int) -> Shapes:
    columns = (np.array([value], np.int64) for value in (blocks, threads, registers, static, dynamic))
    names = ("blocks", "threads", "registers", "static_shared_memory", "dynamic_shared_memory")
    return Shapes(**dict(zip(names, columns, strict=True)))


def figures(
    blocks: int, threads: int, registers: int = 32, static: int = 0, dynamic: int = 0, **device: int
) -> Occupancy:
    return occupancy({**H200, **device}, shapes_of(blocks, threads, registers, static, dynamic))


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


MI300X: dict[str, Any] = {
    "id": 0, "name": "AMD Instinct MI300X", "computeMajor": 9, "computeMinor": 4, "maxThreadsPerBlock": 1024,
    "maxThreadsPerMultiprocessor": 2048, "regsPerBlock": 65536, "warpSize": 64, "numSms": 304,
    "maxSharedMemoryPerMultiProcessor": 65536,
}  # fmt: skip


def of_amd(device: dict[str, Any], **shape: int) -> tuple[float, float, float]:
    """Blocks and waves of each compute unit, and the occupancy in percent."""
    values = {"blocks": 608, "threads": 256, "registers": 0, "static": 0, "dynamic": 0, **shape}
    blocks, waves, occupied = amd_figures(device, shapes_of(**values))
    return float(blocks[0]), float(waves[0]), float(occupied[0])


def test_blocks_and_waves_need_no_registers_but_occupancy_does() -> None:
    blocks, waves, occupied = of_amd(MI300X)
    assert (blocks, waves) == (2, 8)
    assert math.isnan(occupied)


@pytest.mark.parametrize(
    ("shape", "percent"),
    [
        ({"registers": 32}, 25),  # 2 blocks of 4 waves are there, of 32
        ({"registers": 32, "blocks": 304 * 100}, 100),
        ({"registers": 65, "blocks": 304 * 100}, 87.5),  # 72 registers: 7 waves of each SIMD
        ({"registers": 128, "blocks": 304 * 100}, 50),
        ({"registers": 512, "blocks": 304 * 100}, 12.5),
        ({"registers": 32, "blocks": 304 * 100, "static": 32_000, "dynamic": 800}, 12.5),  # one block by its LDS
    ],
)
def test_registers_and_lds_limit_the_waves(shape: dict[str, int], percent: float) -> None:
    assert of_amd(MI300X, **shape)[2] == pytest.approx(percent)


def test_other_gpus_of_amd_have_no_occupancy() -> None:
    assert math.isnan(of_amd({**MI300X, "computeMajor": 11}, registers=32)[2])


@pytest.mark.parametrize(
    ("changes", "usable"),
    [({}, True), ({"name": ""}, True), ({"numSms": 0}, False), ({"warpSize": 32}, False), ({"name": "NVIDIA"}, False)],
)
def test_only_amds_devices_with_known_compute_units_are_usable(changes: dict[str, Any], usable: bool) -> None:
    assert is_supported_amd({**MI300X, **changes}) is usable


def test_cudas_rules_are_not_applied_to_amd() -> None:
    complete = {**MI300X, "regsPerMultiprocessor": 65536, "sharedMemPerMultiprocessor": 65536}
    assert not is_supported(complete)
    assert not is_supported({**complete, "name": ""})
    assert is_supported({**complete, "name": "NVIDIA H100", "warpSize": 32})
