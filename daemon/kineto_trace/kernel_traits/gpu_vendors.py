"""Whose GPUs they are, and what their vendor calls the parts that findings and views speak of."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

_BY_NAME = (
    ("amd", re.compile(r"\bAMD\b|Radeon|Instinct|\bMI\d{2,3}|^gfx\d", re.IGNORECASE)),
    ("intel", re.compile(r"\bIntel\b|\bArc\b|\bData Center GPU (?:Max|Flex)\b", re.IGNORECASE)),
    ("nvidia", re.compile(r"NVIDIA|GeForce|Tesla|Quadro|\b(?:GH|GB|[ABHLV])\d{2,3}\b|\bTITAN\b", re.IGNORECASE)),
)
_BY_CALL = (
    ("amd", re.compile(r"hip[A-Z]|hsa_")),
    ("nvidia", re.compile(r"cuda[A-Z]|cu[A-Z]")),
    ("intel", re.compile(r"ze[A-Z]|ur(?:Enqueue|Queue|Event|USM|Kernel|Program)|pi(?:Enqueue|Queue|Event)|sycl")),
)


class GpuVendor(StrEnum):
    """The maker of a trace's GPUs. UNKNOWN: nothing tells; OTHER: another one than these."""

    NVIDIA = "nvidia"
    AMD = "amd"
    INTEL = "intel"
    OTHER = "other"
    UNKNOWN = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class VendorWords:
    """What the vendor calls things, in the middle of a sentence. graphs: empty where there are none to advise.

    runtime: what programs call. multiprocessor: what runs blocks. tensor_cores: what multiplies matrices. status: the
    command that lists processes. sharing: how programs share a GPU. synchronize, event: PyTorch's names. empty_cache:
    its function that gives memory back. allocator: a setting of its allocator that keeps memory; empty: none is known.
    """

    runtime: str
    multiprocessor: str
    tensor_cores: str
    graphs: str
    status: str
    sharing: str
    synchronize: str
    event: str
    empty_cache: str
    allocator: str


_NVIDIA = VendorWords(
    runtime="CUDA",
    multiprocessor="multiprocessor",
    tensor_cores="tensor cores",
    graphs="CUDA graphs",
    status="nvidia-smi",
    sharing="MPS or MIG let them run beside each other",
    synchronize="torch.cuda.synchronize()",
    event="torch.cuda.Event",
    empty_cache="torch.cuda.empty_cache()",
    allocator="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
)
WORDS: Mapping[GpuVendor, VendorWords] = {
    GpuVendor.NVIDIA: _NVIDIA,
    GpuVendor.UNKNOWN: _NVIDIA,  # as it was in all traces before other vendors had any
    GpuVendor.AMD: VendorWords(
        runtime="HIP",
        multiprocessor="compute unit",
        tensor_cores="matrix cores",
        graphs="HIP graphs (torch.cuda.CUDAGraph)",
        status="amd-smi",
        sharing="compute partitions give each of them a part of it",
        synchronize="torch.cuda.synchronize()",
        event="torch.cuda.Event",
        empty_cache="torch.cuda.empty_cache()",
        allocator="",
    ),
    GpuVendor.INTEL: VendorWords(
        runtime="Level Zero",
        multiprocessor="Xe core",
        tensor_cores="XMX engines",
        graphs="",
        status="xpu-smi",
        sharing="they take turns",
        synchronize="torch.xpu.synchronize()",
        event="torch.xpu.Event",
        empty_cache="torch.xpu.empty_cache()",
        allocator="",
    ),
    GpuVendor.OTHER: VendorWords(
        runtime="the device's runtime",
        multiprocessor="processor of the device",
        tensor_cores="matrix units",
        graphs="",
        status="the vendor's own tool",
        sharing="they take turns",
        synchronize="calls that synchronise with the device",
        event="the device's events",
        empty_cache="calls that empty the allocator's cache",
        allocator="",
    ),
}


def vendor_of_properties(properties: Mapping[str, Any]) -> GpuVendor:
    """Returns the vendor by a device's properties: its name, and where that is empty its warps of 64 threads (AMD)."""
    name = str(properties.get("name") or "")
    found = next((vendor for vendor, pattern in _BY_NAME if pattern.search(name)), "")
    if not found and properties.get("warpSize") == 64:
        return GpuVendor.AMD
    return GpuVendor(found)


def vendor_of_calls(names: Iterable[str]) -> GpuVendor:
    """Returns the vendor by the names of runtime and driver calls; OTHER: there are some, and they tell none."""
    found = GpuVendor.UNKNOWN
    for name in names:
        for vendor, pattern in _BY_CALL:
            if pattern.match(name):
                return GpuVendor(vendor)
        found = GpuVendor.OTHER
    return found
