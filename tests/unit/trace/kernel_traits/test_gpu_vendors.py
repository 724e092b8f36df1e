"""Whose GPUs they are, by what drivers and runtimes call things."""

from typing import Any

import pytest
from kineto_trace.kernel_traits.gpu_vendors import WORDS, GpuVendor, vendor_of_calls, vendor_of_properties


@pytest.mark.parametrize(
    ("properties", "vendor"),
    [
        ({"name": "NVIDIA H200"}, GpuVendor.NVIDIA),
        ({"name": "Tesla V100-SXM2-32GB"}, GpuVendor.NVIDIA),
        ({"name": "A100-SXM4-80GB"}, GpuVendor.NVIDIA),
        ({"name": "AMD Instinct MI300X VF"}, GpuVendor.AMD),
        ({"name": "AMD Radeon Graphics"}, GpuVendor.AMD),
        ({"name": "", "warpSize": 64, "computeMajor": 9}, GpuVendor.AMD),
        ({"name": "", "warpSize": 32}, GpuVendor.UNKNOWN),
        ({"name": "Intel(R) Data Center GPU Max 1550"}, GpuVendor.INTEL),
        ({"name": "Intel(R) Arc(TM) B580 Graphics"}, GpuVendor.INTEL),
        ({"name": "Acme A1"}, GpuVendor.UNKNOWN),
        ({"name": None}, GpuVendor.UNKNOWN),
        ({}, GpuVendor.UNKNOWN),
    ],
)
def test_properties_tell_the_vendor(properties: dict[str, Any], vendor: GpuVendor) -> None:
    assert vendor_of_properties(properties) is vendor


@pytest.mark.parametrize(
    ("names", "vendor"),
    [
        (["cudaLaunchKernel"], GpuVendor.NVIDIA),
        (["cuLaunchKernelEx"], GpuVendor.NVIDIA),
        (["aclrtLaunch", "hipExtModuleLaunchKernel"], GpuVendor.AMD),
        (["urEnqueueKernelLaunch"], GpuVendor.INTEL),
        (["zeCommandListAppendLaunchKernel"], GpuVendor.INTEL),
        (["acmeLaunch"], GpuVendor.OTHER),
        ([], GpuVendor.UNKNOWN),
    ],
)
def test_calls_tell_the_vendor(names: list[str], vendor: GpuVendor) -> None:
    assert vendor_of_calls(names) is vendor


def test_every_vendor_has_words() -> None:
    assert set(WORDS) == set(GpuVendor)
