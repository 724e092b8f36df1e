"""Whose GPUs they are, by what drivers and runtimes call things."""

from typing import Any

import pytest
from kineto_trace.kernel_traits.gpu_vendors import WORDS, GpuVendor, gpu_peaks, vendor_of_calls, vendor_of_properties


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


@pytest.mark.parametrize(
    ("name", "bf16", "memory"),
    [
        ("NVIDIA H200", 989.4, 4800),
        ("NVIDIA H100 80GB HBM3", 989.4, 3352),
        ("NVIDIA H100 PCIe", 756, 2039),
        ("NVIDIA H100 NVL", 835.5, 3938),
        ("NVIDIA A100-SXM4-80GB", 312, 2039),
        ("NVIDIA A100-SXM4-40GB", 312, 1555),
        ("NVIDIA A100 80GB PCIe", 312, 1935),
        ("NVIDIA L4", 121, 300),
        ("NVIDIA L40S", 362, 864),
        ("AMD Instinct MI300X", 1307.4, 5300),
        ("AMD Instinct MI300X VF", 1307.4, 5300),
        ("AMD Instinct MI250X/MI250", 191.5, 1638),
        ("AMD Instinct MI355X", 2516.6, 8000),
        ("AMD Instinct MI100", 92.3, 1229),
        ("Intel(R) Data Center GPU Max 1550", 419.4, 1638),
        ("Intel(R) Data Center GPU Max 1100", 355.5, 1229),
        ("Intel(R) Arc(TM) B580 Graphics", 116.5, 456),
        ("Intel(R) Arc(TM) Pro B60 Graphics", 98.5, 456),
    ],
)
def test_the_peaks_are_those_of_the_data_sheets(name: str, bf16: float, memory: float) -> None:
    peaks = gpu_peaks(name)
    assert peaks is not None
    assert (peaks.tflops["bf16"], peaks.memory) == (bf16, memory)


def test_a_gpu_without_a_precision_has_no_peak_in_it() -> None:
    peaks = gpu_peaks("Tesla V100-SXM2-32GB")
    assert peaks is not None
    assert not {"bf16", "tf32", "fp8"} & set(peaks.tflops)


@pytest.mark.parametrize(("gib", "bf16"), [(None, 419.4), (64, 419.4), (128, 838.8)])
def test_a_device_with_the_memory_of_both_parts_has_the_peaks_of_both(gib: int | None, bf16: float) -> None:
    peaks = gpu_peaks("Intel(R) Data Center GPU Max 1550", None if gib is None else gib << 30)
    assert peaks is not None
    assert peaks.tflops["bf16"] == pytest.approx(bf16)


@pytest.mark.parametrize("name", [None, "", "NVIDIA GeForce RTX 4090", "NVIDIA L40", "Quadro T400"])
def test_other_gpus_have_none(name: str | None) -> None:
    assert gpu_peaks(name) is None
