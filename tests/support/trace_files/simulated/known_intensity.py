"""A program whose kernels have known bytes and operations, as an H200 would run it by a simple model.

A kernel takes as long as the slowest of three: its bytes at the share of the memory's bandwidth that such kernels
reach, its operations at the share of the arithmetic peak that they reach, and a floor, which is the latency of small
work. Its counters follow: DRAM is its bytes by its time, the tensor pipe its operations by its time. What the
arithmetic says of it is which of the three it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from kineto_trace.kernel_traits.gpu_vendors import gpu_peaks
from kineto_trace.model.trace import Trace

from support.trace_files.simulated.sampled_gpu import MS, Run, sampled

OVERVIEW = ("GPU busy", "SM busy", "Tensor pipe", "DRAM", "Occupancy", "GPC clock")
TENSOR_SET = (*OVERVIEW[1:5], "FMA pipe", "Instructions")
_MI = 1 << 20
_ROWS = 8192


@dataclass(frozen=True, kw_only=True)
class KnownKernel:
    """reach: shares of the peaks that such kernels reach. floor_ns: what it takes at least. sm: share of SMs busy."""

    name: str
    bytes: float
    flop: float = 0.0
    precision: str = "bf16"
    reach: tuple[float, float] = (0.9, 0.93)
    floor_ns: float = 3_000
    sm: float = 96.0
    fma: float = 5.0

    def times(self) -> dict[str, float]:
        """The three times in ns, by the verdict for which each stands."""
        peaks = gpu_peaks("NVIDIA H200")
        assert peaks is not None
        return {
            "memory-bound": self.bytes / (peaks.memory * self.reach[0]),
            "compute-bound": self.flop / (1e3 * peaks.tflops[self.precision] * self.reach[1]),
            "latency-bound": self.floor_ns,
        }

    @property
    def verdict(self) -> str:
        """What the arithmetic says."""
        times = self.times()
        return max(times, key=lambda name: times[name])

    @property
    def duration(self) -> float:
        """In ns."""
        return max(self.times().values())

    def counters(self) -> dict[str, float]:
        """What counters show while it runs."""
        peaks = gpu_peaks("NVIDIA H200")
        assert peaks is not None
        on_cores = self.precision == "fp32"
        use = 100 * self.flop / (1e3 * peaks.tflops[self.precision] * self.duration)
        return {
            "GPU busy": 100.0,
            "SM busy": self.sm,
            "Tensor pipe": 0.0 if on_cores else use,
            "FMA pipe": use if on_cores else self.fma,
            "Instructions": min(1.1 * use, 99.0) if on_cores else 2 * self.fma,
            "DRAM": 100 * self.bytes / (peaks.memory * self.duration),
            "Occupancy": 60.0,
            "GPC clock": 1.755e9,
        }


def gemm(m: int, n: int, k: int, *, name: str, precision: str = "bf16", reach: float = 0.93) -> KnownKernel:
    """A product of matrices; each operand moves once."""
    width = 4 if precision == "fp32" else 2
    small = m * n <= 512 * 512
    return KnownKernel(
        name=name,
        bytes=width * float(m * k + k * n + m * n),
        flop=2.0 * m * n * k,
        precision=precision,
        reach=(0.85, reach),
        floor_ns=30_000 if small else 3_000,
        sm=12.0 if small else 96.0,
    )


KERNELS: Sequence[KnownKernel] = (
    KnownKernel(name="Memcpy DtoD (Device -> Device)", bytes=2 * 256 * _MI),
    KnownKernel(name="vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>", bytes=3 * 128 * _MI),
    KnownKernel(name="triton_poi_fused_triad_0", bytes=3 * 64 * _MI),
    gemm(8192, 8192, 8192, name="nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NNT"),
    gemm(4096, 4096, 4096, name="nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT"),
    gemm(16384, 1024, 1024, name="sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128", reach=0.8),
    gemm(128, 256, 4096, name="nvjet_tst_64x8_64x16_2x1_v_bz_splitK_TNN"),
    gemm(8, 16384, 16384, name="nvjet_tst_8x64_64x16_4x1_v_bz_TNT"),  # of few rows: the weights move
    KnownKernel(name="cunn_SoftMaxForward<8, float>", bytes=2 * 4 * 4096.0 * _ROWS, reach=(0.82, 1), fma=20),
    KnownKernel(name="indexSelectLargeIndex<float, gather>", bytes=2 * 4 * 1024.0 * 65536, reach=(0.7, 1)),
)
ON_CORES = gemm(4096, 4096, 4096, name="sm80_xmma_gemm_f32f32_f32f32_f32_simt_tn", precision="fp32", reach=0.85)


def program(
    kernels: Sequence[KnownKernel] = KERNELS,
    *,
    per_kernel_ns: int = 250 * MS,
    labels: Sequence[str] = OVERVIEW,
    sample_ns: int = MS,
    phases: bool = False,
    noise: float = 0.01,
    beside: float = 0.0,
    seed: int = 1,
) -> Trace:
    """Each kernel for about that long in all, in an irregular order, or one after the other (phases).

    beside: share of the runs during which another kernel runs on a second stream.
    """
    random = np.random.default_rng(seed)
    order = np.repeat(np.arange(len(kernels)), [max(int(per_kernel_ns / each.duration), 1) for each in kernels])
    order = order if phases else random.permutation(order)
    counters: Mapping[int, dict[str, float]] = {at: each.counters() for at, each in enumerate(kernels)}
    runs, now = [], 0.0
    for at in order.tolist():
        length = kernels[at].duration * random.uniform(0.97, 1.03)
        runs.append(Run(name=kernels[at].name, start=int(now), duration=int(length), counters=counters[at]))
        if random.random() < beside:
            other = int(random.integers(len(kernels)))
            start, end = now + 0.5 * length, now + 1.2 * length
            runs.append(
                Run(name=kernels[other].name, start=int(start), duration=int(end - start), counters=counters[other],
                    stream=8)
            )  # fmt: skip
            length = end - now
        now += length + random.exponential(2_000)
    return sampled(runs, labels, length_ns=int(now), sample_ns=sample_ns, noise=noise, spread=0.03, seed=seed,
                   idle={"GPC clock": 1.98e9})  # fmt: skip
