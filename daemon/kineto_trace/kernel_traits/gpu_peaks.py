"""How fast GPUs can be at most: published peaks of dense arithmetic (TFLOP/s) and of memory (GB/s), by name.

Sources: the data sheets of NVIDIA (A100, A10, A30, A40, H100, H200, L4, L40S, T4, V100, B200) and AMD (MI210, MI250X,
MI300X, MI325X), figures without sparsity, at the boost clock. A GPU under its power limit runs slower than that.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPeaks:
    """tflops: by precision (kernel_traits/precisions.py), the faster of tensor and ordinary cores. memory: GB/s."""

    tflops: Mapping[str, float]
    memory: float


def _peaks(
    memory: float, *, fp64: float, fp32: float, tf32: float, half: float, bf16: float = 1, fp8: float = 0, int8: float
) -> GpuPeaks:
    """half: fp16, and bf16 unless that is 0. What is 0, the GPU does not have."""
    tflops = {"fp64": fp64, "fp32": fp32, "tf32": tf32, "fp16": half, "bf16": half * bf16, "fp8": fp8, "int8": int8}
    return GpuPeaks(tflops={name: value for name, value in tflops.items() if value}, memory=memory)


_HOPPER = {"fp64": 67.0, "fp32": 67.0, "tf32": 494.7, "half": 989.4, "fp8": 1978.9, "int8": 1978.9}
# The first one whose words are all in the GPU's name.
_BY_NAME: tuple[tuple[tuple[str, ...], GpuPeaks], ...] = (
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
    (("MI325X",), _peaks(6000, fp64=163.4, fp32=163.4, tf32=653.7, half=1307.4, fp8=2614.9, int8=2614.9)),
    (("MI300X",), _peaks(5300, fp64=163.4, fp32=163.4, tf32=653.7, half=1307.4, fp8=2614.9, int8=2614.9)),
    (("MI210",), _peaks(1638, fp64=45.3, fp32=45.3, tf32=0, half=181, int8=181)),
)


def gpu_peaks(name: str | None) -> GpuPeaks | None:
    """The peaks of a GPU by the name that its driver gives it ("NVIDIA H200"); None: it is not in the table."""
    words = (name or "").replace("-", " ").split()
    return next((peaks for wanted, peaks in _BY_NAME if all(_has(words, word) for word in wanted)), None)


def _has(words: list[str], wanted: str) -> bool:
    """Whether a word is this one: models to the letter, as an L4 is no L40; SXM4 is SXM, PCIE is PCI."""
    if wanted in ("SXM", "PCI"):
        return any(word.upper().startswith(wanted) for word in words)
    return any(word.upper() == wanted.upper() for word in words)
