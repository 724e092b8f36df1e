"""How well the launch of each kernel fills its GPU: blocks and warps per multiprocessor, estimated occupancy.

Traces of others carry these figures as arguments of their kernels. Where one has none, and in our own captures, they
are computed from the launch shape and the properties of the device, once per distinct shape: by CUDA's rules
(occupancy.py) for NVIDIA's GPUs, by AMD's (amd_occupancy.py) for Instinct. For other vendors' GPUs nothing is computed:
Intel's kernels state neither their shape in threads nor their registers.

Kineto takes the grid of AMD's kernels from the call that launched them, and hipExtModuleLaunchKernel, by which rocBLAS
and MIOpen launch, counts threads where others count blocks. Where the call is not known (graphs), nothing is computed.
"""

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.row_groups import group
from kineto_trace.kernel_traits import amd_occupancy
from kineto_trace.kernel_traits.gpu_vendors import GpuVendor
from kineto_trace.kernel_traits.kernel_types import matches
from kineto_trace.kernel_traits.occupancy import Shapes, occupancy, usable
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Table
from kineto_trace.structure.activity_links import KERNEL, calls, gpu
from kineto_trace.structure.event_arguments import argument
from kineto_trace.structure.gpu_devices import device_properties, gpu_vendor

Floats = npt.NDArray[np.float64]

BLOCKS, WARPS, OCCUPANCY = "blocks per SM", "warps per SM", "est. achieved occupancy %"  # Kineto's arguments
_SHAPE = (
    "device",
    "grid_x",
    "grid_y",
    "grid_z",
    "block_x",
    "block_y",
    "block_z",
    "registers",
    "static_shared_memory",
    "dynamic_shared_memory",
)
_NO_UNIT, _BLOCKS, _THREADS = range(3)
_LAUNCHES_BLOCKS = re.compile(r"^hip(?:Ext)?(?:Module)?Launch(?:Cooperative)?Kernel")
_LAUNCHES_THREADS = re.compile(r"^hip(?:Ext|Hcc)ModuleLaunchKernel")
_INT_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class LaunchFigures:
    """One value per row of the table `kernel`; NaN: unknown. occupancy: estimated achieved occupancy, 0 to 100 %."""

    blocks_per_sm: Floats
    warps_per_sm: Floats
    occupancy: Floats


def launch_figures(context: Context) -> LaunchFigures:
    """The figures of all kernels: as the file says, else computed."""
    table, found = context.trace.table("kernel"), stated_figures(context)
    missing = np.flatnonzero(np.isnan(found.blocks_per_sm) | np.isnan(found.occupancy))
    if len(missing):
        stated = (found.blocks_per_sm, found.warps_per_sm, found.occupancy)
        for known, computed in zip(stated, _computed(context, table, missing), strict=True):
            known[missing] = np.where(np.isnan(known[missing]), computed, known[missing])
    return found


def stated_figures(context: Context) -> LaunchFigures:
    """The figures of all kernels that the file says."""
    table = context.trace.table("kernel")
    return LaunchFigures(*(_argument(context, table, name) for name in (BLOCKS, WARPS, OCCUPANCY)))


def _argument(context: Context, table: Table, name: str) -> Floats:
    if not table.origin:
        return np.full(len(table), np.nan)
    return argument(context, "kernel", name).copy()


def _computed(context: Context, table: Table, rows: npt.NDArray[np.int64]) -> list[Floats]:
    """The three figures of these rows; NaN where the device's properties are unknown or no shape was recorded."""
    devices, unit = context.get(device_properties), _grid_unit(context, table)[rows]
    shapes = group([unit, *(table[name][rows] for name in _SHAPE)])
    values = np.stack([table[name][rows[shapes.first]].astype(np.int64) for name in _SHAPE]).clip(0, _INT_MAX)
    found = np.full((3, len(shapes.first)), np.nan)
    for device, properties in devices.items():
        units = unit[shapes.first]
        own = np.flatnonzero((values[0] == device) & (values[1:7].min(axis=0) > 0) & (units != _NO_UNIT))
        if not len(own):
            continue
        shape = values[:, own]
        threads, grid = shape[4] * shape[5] * shape[6], shape[1] * shape[2] * shape[3]
        launched = Shapes(
            blocks=np.where(units[own] == _THREADS, -(-grid // threads), grid),
            threads=threads,
            registers=shape[7],
            static_shared_memory=shape[8],
            dynamic_shared_memory=shape[9],
        )
        if usable(properties):
            figures = occupancy(properties, launched)
            found[:, own] = figures.blocks_per_sm, figures.warps_per_sm, figures.percent
        elif amd_occupancy.usable(properties):
            found[:, own] = amd_occupancy.figures(properties, launched)
    return [row[shapes.number] for row in found]


def _grid_unit(context: Context, table: Table) -> npt.NDArray[np.uint8]:
    """What the grid of each row of the table `kernel` counts: _BLOCKS, _THREADS, or _NO_UNIT."""
    if not table.origin or context.get(gpu_vendor) is not GpuVendor.AMD:
        return np.full(len(table), _BLOCKS, np.uint8)
    strings, found = context.trace.strings, np.full(len(table), _NO_UNIT, np.uint8)
    units = np.where(matches(strings, _LAUNCHES_BLOCKS), _BLOCKS, _NO_UNIT).astype(np.uint8)
    units[matches(strings, _LAUNCHES_THREADS)] = _THREADS
    activity, called = context.get(gpu), context.get(calls)
    known = np.flatnonzero((activity.kind == KERNEL) & (activity.call >= 0))
    found[activity.row[known]] = units[called.name[activity.call[known]]]
    return found
