"""How full a kernel's launch shape can make one of AMD's Instinct GPUs, by the rules of the CDNA instruction sets.

Theory of operation
    A compute unit has four SIMDs. Each holds up to eight waves of 64 threads, and 512 vector registers per thread for
    all of them, given out in units of eight; the compute unit has its LDS (shared memory), given out in units of 512
    bytes. (AMD Instinct MI200 and MI300 ISA reference guides, and the occupancy table of ROCm's documentation.)

    Traces of torch.profiler do not state the registers of AMD's kernels. Then only what needs none is told: blocks and
    waves per compute unit. Other GPUs of AMD (gfx10 and later) have other rules, and give the same.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.kernel_traits.gpu_vendors import GpuVendor, vendor_of_properties
from kineto_trace.kernel_traits.occupancy import Shapes

Floats = npt.NDArray[np.float64]

WAVE = 64  # threads
_CDNA = 9  # major number of the instruction set, gfx9
_SIMDS = 4
_WAVES_OF_SIMD = 8
_REGISTERS_OF_SIMD = 512  # per thread
_REGISTER_UNIT = 8
_LDS_UNIT = 512  # bytes
_REQUIRED = ("numSms", "maxThreadsPerMultiprocessor")


def usable(device: Mapping[str, Any]) -> bool:
    """Tells whether the device is AMD's, with waves of 64 threads and a known number of compute units."""
    known = all(isinstance(device.get(name), int) and device[name] > 0 for name in _REQUIRED)
    return known and vendor_of_properties(device) is GpuVendor.AMD and device.get("warpSize") == WAVE


def figures(device: Mapping[str, Any], shapes: Shapes) -> tuple[Floats, Floats, Floats]:
    """Returns blocks and waves per compute unit, and the occupancy (0 to 100; NaN: unknown) of each shape."""
    threads = np.maximum(shapes.threads, 1)
    blocks = shapes.blocks / device["numSms"]
    waves_of_block = -(-threads // WAVE)
    occupancy = np.full(len(threads), np.nan)
    lds = device.get("maxSharedMemoryPerMultiProcessor")
    if device.get("computeMajor") == _CDNA and isinstance(lds, int) and lds > 0:
        registers = -(-shapes.registers // _REGISTER_UNIT) * _REGISTER_UNIT
        waves_of_simd = np.minimum(_WAVES_OF_SIMD, _REGISTERS_OF_SIMD // np.maximum(registers, 1))
        used = -(-(shapes.static_shared_memory + shapes.dynamic_shared_memory) // _LDS_UNIT) * _LDS_UNIT
        resident = np.minimum(_SIMDS * waves_of_simd // waves_of_block, lds // np.maximum(used, 1))
        share = np.minimum(blocks, resident) * waves_of_block / (_SIMDS * _WAVES_OF_SIMD)
        occupancy = np.where(shapes.registers > 0, np.minimum(100 * share, 100.0), np.nan)
    return blocks, blocks * threads / WAVE, occupancy
