"""What the GPUs of a trace can do, so that advice suits them.

Theory of operation
    For NVIDIA, the compute capability decides: tensor cores multiply float16 from 7.0 on, bfloat16 and TF32 from 8.0
    on, float8 from 8.9 on; Triton, and so torch.compile, needs 7.0. AMD's numbers mean something else (gfx90a is 9.0),
    so advice is limited to what all Instinct GPUs can do. structure/activity_links.py finds the vendor; for others than
    NVIDIA and AMD, graphs are not advised. If a process has several GPUs, the least capable one counts. torch.compile
    also needs PyTorch 2; kinetod's own captures contain the version.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kineto_trace.analysis.overview.gpu_figures import global_memory, is_count, peak_memory
from kineto_trace.kernel_traits.gpu_vendors import WORDS, GpuVendor, VendorWords
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import device_properties, gpu_vendor

TENSOR_CORES, BFLOAT16, FLOAT8, COMPILES = (7, 0), (8, 0), (8, 9), (7, 0)
FAST_DOUBLE = ((6, 0), (7, 0), (8, 0), (9, 0), (10, 0))  # NVIDIA GPUs that compute float64 at half the speed of float32
HALF_SPEED, SLOW_DOUBLE = 2.0, 32.0  # times as long as float32; some other NVIDIA GPUs take 64 times
COMPILING_TORCH = (2, 0)
FULL = 0.8  # of the memory: above this no larger batch is advised
_TORCH = re.compile(r"torch\D{0,20}(\d{1,9})\.(\d{1,9})")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAbilities:
    """capability: of NVIDIA's GPUs; None if unknown.

    full: share of memory in use, if known.
    torch: major and minor version of PyTorch, if known.
    """

    vendor: GpuVendor
    capability: tuple[int, int] | None
    full: float | None
    torch: tuple[int, int] | None = None

    @property
    def words(self) -> VendorWords:
        """Returns the vendor's terms."""
        return WORDS[self.vendor]

    @property
    def tensor_cores(self) -> bool:
        """Returns whether it has tensor cores (or AMD's matrix cores), and names of kernels show their use."""
        return self.vendor is GpuVendor.AMD or (self.capability is not None and self.capability >= TENSOR_CORES)

    @property
    def double_ratio(self) -> float:
        """Returns the ratio of float64 to float32 time, at least; 2 if unknown."""
        slow = (
            self.capability is not None and self.capability >= min(FAST_DOUBLE) and self.capability not in FAST_DOUBLE
        )
        return SLOW_DOUBLE if slow else HALF_SPEED

    def precision(self) -> str:
        """Returns which types of numbers to use for matrix products; "" if tensor cores are not known."""
        sizes = "; sizes should be multiples of 8."
        if self.vendor in (GpuVendor.AMD, GpuVendor.INTEL):
            return "Use bfloat16 or float16 (torch.autocast)" + sizes
        if self.capability is None or self.capability < TENSOR_CORES:
            return ""
        if self.capability < BFLOAT16:
            return (
                "Use float16 (torch.autocast(dtype=torch.float16) with a GradScaler): the tensor cores of this GPU "
                f"(compute capability {_text(self.capability)}) multiply neither bfloat16 nor TF32" + sizes
            )
        advice = (
            "Use bfloat16 or float16 (torch.autocast), or TF32 for float32 (torch.set_float32_matmul_precision('high'))"
        )
        if self.capability >= FLOAT8:
            advice += ", or float8 for the largest products (torchao, Transformer Engine)"
        return advice + sizes

    def no_compiler(self) -> str:
        """Returns why torch.compile cannot be used; "" if nothing is known against it."""
        if self.capability is not None and self.capability < COMPILES:
            return (
                f"torch.compile needs compute capability {_text(COMPILES)}, and this GPU has {_text(self.capability)}"
            )
        if self.torch is not None and self.torch < COMPILING_TORCH:
            return f"torch.compile needs PyTorch {_text(COMPILING_TORCH)}, and this is {_text(self.torch)}"
        return ""

    def fusing(self) -> str:
        """Returns the advice for fewer kernels."""
        others = "fused operators (fused optimizers, F.scaled_dot_product_attention, fused norms and activations)"
        reason = self.no_compiler()
        return f"Use {others}: {reason}." if reason else f"torch.compile fuses them; else use {others}."

    def fewer_launches(self) -> str:
        """Returns the advice for fewer launches."""
        tools = [
            *([] if self.no_compiler() else ["torch.compile"]),
            *([self.words.graphs] if self.words.graphs else []),
        ]
        ways = [
            *([" or ".join(tools)] if tools else []),
            *([] if self.full is not None and self.full > FULL else ["a larger batch"]),
            "fused optimizers (fused=True)",
            "fewer tiny operators and less Python between them",
        ]
        return f"Give the GPU more work per launch: {', '.join(ways)}."

    def shorter_pauses(self) -> str:
        """Returns the advice for shorter pauses between kernels that were launched ahead."""
        graphs = f", or {self.words.graphs}, whose kernels follow each other faster" if self.words.graphs else ""
        return f"Run fewer and longer kernels: fused operators, larger tensors{graphs}."


def gpu_abilities(context: Context) -> GpuAbilities:
    """Returns the abilities of the GPUs that worked in the trace."""
    properties, peaks = context.get(device_properties), context.get(peak_memory)
    used = set(context.trace.table("kernel")["device"].tolist()) or set(properties)
    known = [properties[number] for number in sorted(used) if number in properties]
    vendor = context.get(gpu_vendor)
    nvidia = vendor in (GpuVendor.NVIDIA, GpuVendor.UNKNOWN)
    capabilities = [found for found in map(_capability, known) if found is not None]
    shares = [
        peaks[number] / memory
        for number in used & set(peaks) & set(properties)
        if (memory := global_memory(properties[number]))
    ]
    return GpuAbilities(
        vendor=vendor,
        capability=min(capabilities) if capabilities and nvidia else None,
        full=max(shares) if shares else None,
        torch=_torch_version(context.trace.target.framework),
    )


def _capability(properties: Mapping[str, Any]) -> tuple[int, int] | None:
    major: Any = properties.get("computeMajor")
    minor: Any = properties.get("computeMinor", 0)
    return (major, minor) if is_count(major) and is_count(minor) else None


def _torch_version(framework: str) -> tuple[int, int] | None:
    match = _TORCH.search(framework)
    return (int(match[1]), int(match[2])) if match else None


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
