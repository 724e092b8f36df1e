"""The vendors of GPUs, their terms for parts of a GPU, and peak speeds.

Peak speeds are published peaks of dense arithmetic (TFLOP/s) and of memory (GB/s), by name.

Sources: the data sheets of NVIDIA (A100, A10, A30, A40, H100, H200, L4, L40S, T4, V100, B200) and AMD (MI100, MI210,
MI250, MI250X, MI300A, MI300X, MI325X, MI350X, MI355X), and Intel's product pages (Data Center GPU Max 1550 and 1100;
Arc B580, B570, Pro B60 and Pro B50, A770) and white papers (Gaudi 2 and 3): figures without sparsity, at the boost
clock. Of an Arc the page states int8 on XMX alone; fp16 and bf16 run at half of that, tf32 at a quarter. A GPU under
its power limit runs slower than that.

If programs see a part of a GPU as a device of its own, the peaks are those of the part: half of an MI250 or MI250X, and
a stack of a Max 1550, unless the device has the memory of the whole.
"""

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
_HOPPER = {"fp64": 67.0, "fp32": 67.0, "tf32": 494.7, "half": 989.4, "fp8": 1978.9, "int8": 1978.9}


class GpuVendor(StrEnum):
    """The maker of a trace's GPUs. UNKNOWN: no evidence; OTHER: not one of these."""

    NVIDIA = "nvidia"
    AMD = "amd"
    INTEL = "intel"
    OTHER = "other"
    UNKNOWN = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class VendorWords:
    """The vendor's terms, in the middle of a sentence.

    runtime: API that programs call.
    multiprocessor: unit that runs blocks.
    tensor_cores: unit that multiplies matrices.
    graphs: empty if there are none to advise.
    status: the command that lists processes.
    sharing: how programs share a GPU.
    synchronize, event: PyTorch's names.
    empty_cache: PyTorch's function that releases memory.
    allocator: a setting of its allocator that keeps memory; empty if none is known.
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
    sharing="MPS or MIG lets them run side by side",
    synchronize="torch.cuda.synchronize()",
    event="torch.cuda.Event",
    empty_cache="torch.cuda.empty_cache()",
    allocator="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
)
WORDS: Mapping[GpuVendor, VendorWords] = {
    GpuVendor.NVIDIA: _NVIDIA,
    GpuVendor.UNKNOWN: _NVIDIA,  # as in all traces before other vendors had any
    GpuVendor.AMD: VendorWords(
        runtime="HIP",
        multiprocessor="compute unit",
        tensor_cores="matrix cores",
        graphs="HIP graphs (torch.cuda.CUDAGraph)",
        status="amd-smi",
        sharing="compute partitions give each program a part of it",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPeaks:
    """The peaks of a GPU.

    tflops: by precision (kernel_traits/precisions.py), the faster of tensor and ordinary cores.
    memory: GB/s.
    part_bytes: memory of one of two equal parts, if these are its peaks; 0 if they are those of the whole.
    """

    tflops: Mapping[str, float]
    memory: float
    part_bytes: int = 0

    def whole(self) -> "GpuPeaks":
        """Returns the peaks of both parts together."""
        return GpuPeaks(tflops={name: 2 * peak for name, peak in self.tflops.items()}, memory=2 * self.memory)


def vendor_of_properties(properties: Mapping[str, Any]) -> GpuVendor:
    """Returns the vendor by a device's properties: its name, or if that is empty its warps of 64 threads (AMD)."""
    name = str(properties.get("name") or "")
    found = next((vendor for vendor, pattern in _BY_NAME if pattern.search(name)), "")
    if not found and properties.get("warpSize") == 64:
        return GpuVendor.AMD
    return GpuVendor(found)


def vendor_of_calls(names: Iterable[str]) -> GpuVendor:
    """Returns the vendor by the names of runtime and driver calls; OTHER if they identify none."""
    found = GpuVendor.UNKNOWN
    for name in names:
        for vendor, pattern in _BY_CALL:
            if pattern.match(name):
                return GpuVendor(vendor)
        found = GpuVendor.OTHER
    return found


def _peaks(
    memory: float,
    *,
    fp64: float = 0,
    fp32: float = 0,
    tf32: float = 0,
    half: float,
    bf16: float = 1,
    fp8: float = 0,
    int8: float = 0,
    part_gib: float = 0,
) -> GpuPeaks:
    """Returns the peaks. half: fp16, and bf16 by this factor; 0: the GPU lacks it, or its vendor does not state it."""
    tflops = {"fp64": fp64, "fp32": fp32, "tf32": tf32, "fp16": half, "bf16": half * bf16, "fp8": fp8, "int8": int8}
    known = {name: value for name, value in tflops.items() if value}
    return GpuPeaks(tflops=known, memory=memory, part_bytes=int(part_gib) << 30)


def gpu_peaks(name: str | None, memory_bytes: int | None = None) -> GpuPeaks | None:
    """Returns the peaks of a GPU by its driver's name for it ("NVIDIA H200"); None if it is not in the table.

    memory_bytes: of the device, if known.
    """
    words = (name or "").replace("-", " ").replace("/", " ").split()
    found = next((peaks for wanted, peaks in _PEAKS_BY_NAME if all(_has(words, word) for word in wanted)), None)
    if found is None or not found.part_bytes or (memory_bytes or 0) <= 1.5 * found.part_bytes:
        return found
    return found.whole()


def _has(words: list[str], wanted: str) -> bool:
    """Returns whether a word is this one: exactly for models (an L4 is no L40); SXM4 is SXM, PCIE is PCI."""
    if wanted in ("SXM", "PCI"):
        return any(word.upper().startswith(wanted) for word in words)
    return any(word.upper() == wanted.upper() for word in words)


# The first one whose words are all in the GPU's name.
_PEAKS_BY_NAME: tuple[tuple[tuple[str, ...], GpuPeaks], ...] = (
    (("B200",), _peaks(8000, fp64=40, fp32=80, tf32=1100, half=2250, fp8=4500, int8=4500)),
    (("H200",), _peaks(4800, **_HOPPER)),
    (("H100", "PCIe"), _peaks(2039, fp64=51.2, fp32=51.2, tf32=378, half=756, fp8=1513, int8=1513)),
    (("H100", "NVL"), _peaks(3938, fp64=60, fp32=60, tf32=417.5, half=835.5, fp8=1671, int8=1671)),
    (("H100", "HBM3"), _peaks(3352, **_HOPPER)),
    (("A100", "SXM", "80GB"), _peaks(2039, fp64=19.5, fp32=19.5, tf32=156, half=312, int8=624)),
    (("A100", "PCI", "80GB"), _peaks(1935, fp64=19.5, fp32=19.5, tf32=156, half=312, int8=624)),
    (("A100", "40GB"), _peaks(1555, fp64=19.5, fp32=19.5, tf32=156, half=312, int8=624)),
    (("A30",), _peaks(933, fp64=10.3, fp32=10.3, tf32=82, half=165, int8=330)),
    (("A40",), _peaks(696, fp64=0.58, fp32=37.4, tf32=74.8, half=149.7, int8=299.3)),
    (("A10G",), _peaks(600, fp64=0.49, fp32=31.5, tf32=35, half=70, int8=140)),
    (("A10",), _peaks(600, fp64=0.49, fp32=31.2, tf32=62.5, half=125, int8=250)),
    (("L40S",), _peaks(864, fp64=1.4, fp32=91.6, tf32=183, half=362, fp8=733, int8=733)),
    (("L4",), _peaks(300, fp64=0.47, fp32=30.3, tf32=60, half=121, fp8=242.5, int8=242.5)),
    (("V100", "SXM"), _peaks(900, fp64=7.8, fp32=15.7, tf32=0, half=125, bf16=0, int8=62.8)),
    (("V100", "PCI"), _peaks(900, fp64=7, fp32=14, tf32=0, half=112, bf16=0, int8=56)),
    (("T4",), _peaks(320, fp64=0.25, fp32=8.1, tf32=0, half=65, bf16=0, int8=130)),
    (("MI355X",), _peaks(8000, fp64=78.6, fp32=157.3, half=2516.6, fp8=5033.2, int8=5033.2)),
    (("MI350X",), _peaks(8000, fp64=72.1, fp32=144.2, half=2306.9, fp8=4613.7, int8=4613.7)),
    (("MI325X",), _peaks(6000, fp64=163.4, fp32=163.4, tf32=653.7, half=1307.4, fp8=2614.9, int8=2614.9)),
    (("MI300X",), _peaks(5300, fp64=163.4, fp32=163.4, tf32=653.7, half=1307.4, fp8=2614.9, int8=2614.9)),
    (("MI300A",), _peaks(5300, fp64=122.6, fp32=122.6, tf32=490.3, half=980.6, fp8=1961.2, int8=1961.2)),
    (("MI250X",), _peaks(1638, fp64=47.9, fp32=47.9, half=191.5, int8=191.5, part_gib=64)),
    (("MI250",), _peaks(1638, fp64=45.3, fp32=45.3, half=181, int8=181, part_gib=64)),
    (("MI210",), _peaks(1638, fp64=45.3, fp32=45.3, tf32=0, half=181, int8=181)),
    (("MI100",), _peaks(1229, fp64=11.5, fp32=46.1, half=184.6, bf16=0.5, int8=184.6)),
    (("Max", "1550"), _peaks(1638, fp64=26.2, fp32=26.2, tf32=209.7, half=419.4, int8=838.9, part_gib=64)),
    (("Max", "1100"), _peaks(1229, fp64=22.2, fp32=22.2, tf32=177.8, half=355.5, int8=711)),
    (("B580",), _peaks(456, fp32=13.7, tf32=58.3, half=116.5, int8=233)),
    (("B570",), _peaks(380, fp32=11.5, tf32=50.8, half=101.5, int8=203)),
    (("Pro", "B60"), _peaks(456, fp32=12.3, tf32=49.3, half=98.5, int8=197)),
    (("Pro", "B50"), _peaks(224, fp32=10.7, tf32=42.5, half=85, int8=170)),
    (("A770",), _peaks(560, fp32=17.2, half=131, int8=262)),
    (("GAUDI3",), _peaks(3700, half=1835, fp8=1835)),
    (("GAUDI2",), _peaks(2450, half=432, fp8=865)),
)
