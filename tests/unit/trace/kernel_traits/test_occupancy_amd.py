"""Occupancy of AMD's Instinct GPUs, by hand."""

import math
from typing import Any

import numpy as np
import pytest
from kineto_trace.kernel_traits import occupancy
from kineto_trace.kernel_traits.occupancy import Shapes

MI300X: dict[str, Any] = {
    "id": 0, "name": "AMD Instinct MI300X", "computeMajor": 9, "computeMinor": 4, "maxThreadsPerBlock": 1024,
    "maxThreadsPerMultiprocessor": 2048, "regsPerBlock": 65536, "warpSize": 64, "numSms": 304,
    "maxSharedMemoryPerMultiProcessor": 65536,
}  # fmt: skip


def figures(device: dict[str, Any], **shape: int) -> tuple[float, float, float]:
    values = {"blocks": 608, "threads": 256, "registers": 0, "static": 0, "dynamic": 0, **shape}
    arrays = {name: np.array([value]) for name, value in values.items()}
    shapes = Shapes(
        blocks=arrays["blocks"],
        threads=arrays["threads"],
        registers=arrays["registers"],
        static_shared_memory=arrays["static"],
        dynamic_shared_memory=arrays["dynamic"],
    )
    blocks, waves, occupied = occupancy.amd_figures(device, shapes)
    return float(blocks[0]), float(waves[0]), float(occupied[0])


def test_blocks_and_waves_need_no_registers_but_occupancy_does() -> None:
    blocks, waves, occupied = figures(MI300X)
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
    assert figures(MI300X, **shape)[2] == pytest.approx(percent)


def test_other_gpus_of_amd_have_no_occupancy() -> None:
    assert math.isnan(figures({**MI300X, "computeMajor": 11}, registers=32)[2])


@pytest.mark.parametrize(
    ("changes", "usable"),
    [({}, True), ({"name": ""}, True), ({"numSms": 0}, False), ({"warpSize": 32}, False), ({"name": "NVIDIA"}, False)],
)
def test_only_amds_devices_with_known_compute_units_are_usable(changes: dict[str, Any], usable: bool) -> None:
    assert occupancy.is_supported_amd({**MI300X, **changes}) is usable


def test_cudas_rules_are_not_applied_to_amd() -> None:
    complete = {**MI300X, "regsPerMultiprocessor": 65536, "sharedMemPerMultiprocessor": 65536}
    assert not occupancy.is_supported(complete)
    assert not occupancy.is_supported({**complete, "name": ""})
    assert occupancy.is_supported({**complete, "name": "NVIDIA H100", "warpSize": 32})
