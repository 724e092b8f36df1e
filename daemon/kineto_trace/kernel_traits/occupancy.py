"""The occupancy of a multiprocessor that a kernel's launch shape allows, by CUDA's rules and AMD's.

The rules are those of CUDA's programming guide and occupancy calculator: resident blocks on a multiprocessor
are limited by warp slots, block slots, registers, shared memory and barriers, each with its allocation unit.
Kineto shows the same figures; compute capabilities that are not in the tables give none.

For AMD's Instinct GPUs, the rules are those of the CDNA instruction sets.

Theory of operation
    A compute unit has four SIMDs. Each holds up to eight waves of 64 threads, and 512 vector registers per thread for
    all of them, allocated in units of eight; the compute unit has its LDS (shared memory), allocated in units of 512
    bytes. (AMD Instinct MI200 and MI300 ISA reference guides, and the occupancy table of ROCm's documentation.)

    Traces of torch.profiler do not state the registers of AMD's kernels. Then only blocks and waves per compute unit
    are known. The same holds for other GPUs of AMD (gfx10 and later), which have other rules.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kineto_trace.base.array_types import Floats, Floats32, Ints
from kineto_trace.kernel_traits.gpu_vendors import GpuVendor, vendor_of_properties

UNLIMITED = 2**31 - 1
NVIDIA_WARP = 32  # threads
REGISTER_UNIT = 256  # registers, per warp
RESERVED_SHARED_MEMORY = 1024  # bytes per block that the driver takes, from compute capability 8.0 on
REQUIRED = (
    "numSms",
    "warpSize",
    "maxThreadsPerBlock",
    "maxThreadsPerMultiprocessor",
    "regsPerBlock",
    "regsPerMultiprocessor",
    "sharedMemPerMultiprocessor",
    "computeMajor",
    "computeMinor",
)
_LIMITS = ("WARPS", "REGS", "SHARED_MEMORY", "BLOCKS", "BARRIERS")  # bit n of limiting_factors
WAVE = 64  # threads
_CDNA = 9  # major number of the instruction set, gfx9
_SIMDS = 4
_WAVES_OF_SIMD = 8
_REGISTERS_OF_SIMD = 512  # per thread
_REGISTER_UNIT = 8
_LDS_UNIT = 512  # bytes
_REQUIRED = ("numSms", "maxThreadsPerMultiprocessor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Launch shapes: blocks of the grid, threads of a block, registers per thread, shared memory bytes per block."""

    blocks: Ints
    threads: Ints
    registers: Ints
    static_shared_memory: Ints
    dynamic_shared_memory: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """One value per shape. percent: estimated achieved occupancy of the whole GPU, 0 to 100."""

    blocks_per_sm: Floats32
    warps_per_sm: Floats32
    percent: Ints
    active_blocks: Ints
    limiting_factors: Ints
    limit_registers: Ints
    limit_shared_memory: Ints
    limit_warps: Ints
    limit_blocks: Ints
    limit_barriers: Ints
    allocated_registers: Ints
    allocated_shared_memory: Ints


def is_supported(device: Mapping[str, Any]) -> bool:
    """Returns whether the properties for the rules are present, positive, and of a known compute capability."""
    values = [device.get(name) for name in REQUIRED]
    if not all(isinstance(value, int) and not isinstance(value, bool) and value < 2**31 for value in values):
        return False
    positive = all(device[name] > 0 for name in REQUIRED if name != "computeMinor")
    if vendor_of_properties(device) not in (GpuVendor.NVIDIA, GpuVendor.UNKNOWN) or device["warpSize"] != NVIDIA_WARP:
        return False  # other vendors have other rules, and numbers that look like compute capabilities
    return positive and _block_slots(device["computeMajor"], device["computeMinor"]) > 0


def _block_slots(major: int, minor: int) -> int:
    """Returns the resident blocks of a multiprocessor; 0 for an unknown compute capability."""
    by_minor: dict[int, dict[int, int]] = {
        7: {5: 16},
        8: {0: 32, 9: 24},
        10: {1: 24, 7: 16},
        11: {0: 24},
    }
    default = {5: 32, 6: 32, 7: 32, 8: 16, 9: 32, 10: 32, 11: 32, 12: 24}
    return by_minor.get(major, {}).get(minor, default.get(major, 0))


def _barriers(major: int, minor: int, block_slots: int) -> int:
    """Returns the blocks that a multiprocessor's barriers allow; they are limited from compute capability 9.0 on."""
    if major < 9:
        return UNLIMITED
    one_each = (major == 10 and minor != 0) or (major, minor) == (11, 0) or major == 12
    return block_slots if one_each else 2 * block_slots


def _round_up(values: Ints, unit: int) -> Ints:
    return -(-values // unit) * unit


def occupancy(device: Mapping[str, Any], shapes: Shapes) -> Occupancy:
    """Returns the figures for shapes launched on one device, for which usable() must be true."""
    major, minor = device["computeMajor"], device["computeMinor"]
    warp = device["warpSize"]
    threads = np.maximum(shapes.threads, 1)
    warps = -(-threads // warp)
    slots = _block_slots(major, minor)
    limit_warps = device["maxThreadsPerMultiprocessor"] // warp // warps
    limit_warps[shapes.threads > device["maxThreadsPerBlock"]] = 0
    limit_blocks = np.full(len(threads), slots)
    limit_registers, registers = _register_limit(device, shapes.registers, warps)
    limit_memory, memory = _memory_limit(device, shapes)
    limit_barriers = np.full(len(threads), _barriers(major, minor, slots))
    limits = np.stack([limit_warps, limit_registers, limit_memory, limit_blocks, limit_barriers])
    active = limits.min(axis=0)
    factors = sum((limits[bit] == active).astype(np.int64) << bit for bit in range(len(_LIMITS)))
    blocks_per_sm = (shapes.blocks / device["numSms"]).astype(np.float32)
    warps_per_sm = (blocks_per_sm * threads.astype(np.float32) / np.float32(warp)).astype(np.float32)
    resident = np.minimum(blocks_per_sm, active).astype(np.float32)
    fraction = resident * threads.astype(np.float32) / np.float32(device["maxThreadsPerMultiprocessor"])
    return Occupancy(
        blocks_per_sm=blocks_per_sm,
        warps_per_sm=warps_per_sm,
        percent=(fraction * np.float32(100) + np.float32(0.5)).astype(np.int64),
        active_blocks=active,
        limiting_factors=np.asarray(factors, np.int64),
        limit_registers=limit_registers,
        limit_shared_memory=limit_memory,
        limit_warps=limit_warps,
        limit_blocks=limit_blocks,
        limit_barriers=limit_barriers,
        allocated_registers=registers,
        allocated_shared_memory=memory,
    )


def _register_limit(device: Mapping[str, Any], registers: Ints, warps: Ints) -> tuple[Ints, Ints]:
    """Returns the blocks that the register file holds, and the registers of one block."""
    per_warp = _round_up(registers * device["warpSize"], REGISTER_UNIT)
    partitions = 2 if (device["computeMajor"], device["computeMinor"]) == (6, 0) else 4
    # A block's warps are spread over the sub-partitions: allocation counts whole rounds of them.
    rounds = _round_up(warps, partitions)
    per_partition = device["regsPerMultiprocessor"] // partitions
    warps_that_fit = per_partition // np.maximum(per_warp, 1) * partitions
    limit = np.where(registers == 0, UNLIMITED, warps_that_fit // warps)
    limit[per_warp * rounds > device["regsPerBlock"]] = 0
    return limit, per_warp * warps


def _memory_limit(device: Mapping[str, Any], shapes: Shapes) -> tuple[Ints, Ints]:
    """Returns the blocks that shared memory holds, and the bytes of one block."""
    reserved = RESERVED_SHARED_MEMORY if device["computeMajor"] >= 8 else 0
    unit = 128 if device["computeMajor"] >= 8 else 256
    used = _round_up(shapes.static_shared_memory + shapes.dynamic_shared_memory + reserved, unit)
    total = device["sharedMemPerMultiprocessor"]
    return np.where(used == 0, UNLIMITED, total // np.maximum(used, 1)), used


def is_supported_amd(device: Mapping[str, Any]) -> bool:
    """Returns whether the device is AMD's, with waves of 64 threads and a known number of compute units."""
    known = all(isinstance(device.get(name), int) and device[name] > 0 for name in _REQUIRED)
    return known and vendor_of_properties(device) is GpuVendor.AMD and device.get("warpSize") == WAVE


def amd_figures(device: Mapping[str, Any], shapes: Shapes) -> tuple[Floats, Floats, Floats]:
    """Returns blocks and waves per compute unit, and the occupancy (0 to 100; NaN if unknown) of each shape."""
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
